"""Examples of the harness's tasks out of JSONL files, where they do not come from the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_library import reason
from dropmatch.evaluation.tasks.jsonl import placed_rows

Config = dict[str, Any]
QUESTIONS = ("question", "problem", "Problem", "input", "query", "text")  # what tasks call `prompt`
_MMLU = ("cais/mmlu", "hails/mmlu_no_train")
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "openai/gsm8k": {"question": str, "answer": str},
    "google/IFEval": {"key": (int, str), "prompt": str, "instruction_id_list": list, "kwargs": list},
    **{path: {"question": str, "choices": list} for path in _MMLU},
}  # where a task's templates do not tell, or any value would do for them
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


@dataclass(frozen=True)
class Row:
    """One example.

    Attributes:
        doc: its fields.
        place: file and line, for messages.
    """

    doc: dict[str, Any]
    place: str


def read_examples(path: Path) -> list[Row]:
    """The rows of a file: {"id", "task", "prompt", "answer", "meta"}, or in a task's own fields.

    What is in `meta` counts as fields of the row. All rows have the fields of the first.

    Raises:
        SettingError: the file cannot be read, or a row is malformed; the message names line and field.
    """
    rows = [Row(_flat(row), place) for place, row in placed_rows(path, {})]
    for row in rows:
        for name in rows[0].doc:
            if name not in row.doc:
                raise SettingError(f"{row.place}: the field {name!r} is missing, which the first row has")
    return rows


def check_subjects(configs: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Refuse rows that belong to none of several tasks.

    Args:
        configs: settings of all tasks that the file is for.
        rows: of the file.

    Raises:
        SettingError: a row's subject is of no task; the message has the subjects there are.
    """
    parts = [config.get("dataset_name") for config in configs]
    if len(parts) == 1 or not all(parts):  # a task without a part takes all rows
        return
    known = {_plain(part) for part in parts}
    for row in rows:
        subject = row.doc.get("subject")
        if subject is not None and _plain(subject) not in known:
            raise SettingError(
                f"{row.place}: no task here is of the subject {subject!r}: correct it, or leave the row out; there are "
                f"{', '.join(sorted(set(map(str, parts))))}"
            )


def rows_of(config: Mapping[str, Any], rows: Sequence[Row], alone: bool) -> list[Row]:
    """The rows that belong to a task.

    Args:
        config: the task's settings.
        rows: of the file.
        alone: it is the only task that the file is for.

    Raises:
        SettingError: it is one of several, and a row does not say whose it is.
    """
    part = config.get("dataset_name")
    if part is None or not (alone or part):
        return list(rows)
    found = []
    for row in rows:
        subject = row.doc.get("subject")
        if subject is None and not alone:
            raise SettingError(
                f"{row.place}: the field 'subject' is missing: the file is for several tasks, and it says which one "
                f"a row is of (for {config['task']}: {part!r})"
            )
        if subject is None or _plain(subject) == _plain(part):
            found.append(row)
    return found


def to_docs(config: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows in the task's own fields.

    Raises:
        SettingError: a row lacks one.
    """
    docs = []
    for row in rows:
        doc = dict(row.doc)
        if "prompt" in doc:
            doc = {name: doc["prompt"] for name in _asked_for(config)} | doc
        if config.get("dataset_path") in _MMLU:
            doc["answer"] = _index(doc, row.place)
        _check(config, doc, row.place)
        docs.append(doc)
    return docs


def examples_split(config: Mapping[str, Any]) -> str | None:
    """Where the harness takes examples from."""
    return config.get("test_split") or config.get("validation_split")


def draws_fewshots(config: Mapping[str, Any]) -> bool:
    """Whether a task draws few-shots from another split than its examples."""
    return _fewshot_split(config) not in (None, examples_split(config))


def splits(
    config: Mapping[str, Any],
    docs: list[dict[str, Any]],
    shots: list[dict[str, Any]] | None,
    num_fewshot: int,
    advice: str,
) -> dict[str, list[dict[str, Any]]]:
    """The data set of a task by split.

    Args:
        config: its settings.
        docs: examples.
        shots: what few-shots are drawn from; None is none.
        num_fewshot: how many are.
        advice: how few-shots are given, or done without, where the data came from.

    Raises:
        SettingError: few-shots are wanted out of a split that is not there.
    """
    source = _fewshot_split(config)
    if shots is None and num_fewshot > 0 and draws_fewshots(config):
        raise SettingError(
            f"the task {config['task']} takes its {num_fewshot} few-shots from the split {source!r}, and the data "
            f"have none: {advice}"
        )
    # splits that are only named: the harness opens them even if it takes nothing from there
    found = {config[name]: docs for name in _SPLITS if config.get(name)}
    if source is not None and shots is not None and draws_fewshots(config):
        found[source] = shots
    return found


def dataset(parts: Mapping[str, list[dict[str, Any]]], path: Path) -> Any:
    """A data set of the datasets library.

    Raises:
        SettingError: the values of a field are of several types.
    """
    import datasets

    try:
        return datasets.DatasetDict({split: datasets.Dataset.from_list(docs) for split, docs in parts.items()})
    except Exception as error:
        raise SettingError(f"{path}: rows do not fit together ({reason(error)})") from error


def _fewshot_split(config: Mapping[str, Any]) -> str | None:
    """Where the harness takes few-shots from; None if the task has its own."""
    settings = config.get("fewshot_config") or {}
    if config.get("fewshot_split") or settings.get("split"):
        return settings.get("split") or config["fewshot_split"]
    if settings.get("samples") is not None:
        return None
    return config.get("training_split") or config.get("validation_split") or config.get("test_split")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    meta = row.get("meta")
    doc = {name: value for name, value in row.items() if name != "meta"}
    if isinstance(meta, Mapping):
        doc |= {name: value for name, value in meta.items() if name not in doc}
    elif meta is not None:
        doc["meta"] = meta
    return doc


def _asked_for(config: Mapping[str, Any]) -> list[str]:
    """Which names of a question a task may look for; all if its own code does."""
    parts = [config.get(name) for name in ("doc_to_text", "doc_to_target", "doc_to_choice", "process_docs")]
    if any(callable(part) for part in parts):
        return list(QUESTIONS)
    words = set(re.findall(r"\w+", " ".join(str(part) for part in parts)))
    return [name for name in QUESTIONS if name in words]


def _check(config: Mapping[str, Any], doc: dict[str, Any], place: str) -> None:
    """Fill in the task's templates, which refuse a missing field."""
    from lm_eval.utils import apply_template

    for name, kind in _FIELDS.get(config.get("dataset_path") or "", {}).items():
        if not isinstance(doc.get(name), kind) or doc[name] in ("", []):
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            told = f"got {doc[name]!r}" if name in doc else "and it is missing"
            raise SettingError(f"{place}: the field {name!r} must be a non-empty {kinds}, {told}")
    if "instruction_id_list" in doc and len(doc["instruction_id_list"]) != len(doc.get("kwargs") or []):
        raise SettingError(f"{place}: the fields 'instruction_id_list' and 'kwargs' must be of one length")
    if config.get("process_docs") is not None:  # the templates are for what it makes of the row
        return
    for part in ("doc_to_text", "doc_to_target"):
        template = config.get(part)
        if not isinstance(template, str):
            continue
        if template.isidentifier():
            if template not in doc:
                raise SettingError(f"{place}: the field {template!r} is missing, which the task {config['task']} needs")
            continue
        try:
            apply_template(template, doc)
        except Exception as error:  # templates are programs, and raise what they like
            raise SettingError(
                f"{place}: a field that the task {config['task']} needs is missing, or is not as it should be "
                f"({reason(error)})"
            ) from error


def _index(doc: Mapping[str, Any], place: str) -> int:
    """The right choice of a row of MMLU, which may say it by number or letter."""
    for name in ("answer_index", "answer"):
        value = doc.get(name)
        if isinstance(value, str) and value in ("A", "B", "C", "D"):
            return "ABCD".index(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 4:
            return value
    raise SettingError(f"{place}: the field 'answer' must be a letter from A to D or its number from 0 to 3")


def _plain(subject: Any) -> str:
    return str(subject).lower().replace(" ", "_")
