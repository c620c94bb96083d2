"""What the analyses of `dropmatch paper` share: checked settings, models, texts, and where results go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropmatch.cli import paper_options as p
from dropmatch.cli.console import error_console, output_console, say
from dropmatch.cli.files import check_writable
from dropmatch.cli.session import quiet_libraries
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import SettingError
from dropmatch.models.names import NO_DRAFT, PROMPT_LOOKUP

if TYPE_CHECKING:
    from dropmatch.engines.hf.engine import Engine
    from dropmatch.evaluation.bench.tables import Sheet
    from dropmatch.evaluation.paper.draft_rows import Rows
    from dropmatch.evaluation.paper.texts import Texts
    from dropmatch.evaluation.tasks import Example, Task

_NOT_SETTINGS = ("json_file", "color", "texts", "out", "report_only")


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options as settings, ready for JSON: lists as lists, numbers in range.

    Raises:
        SettingError: a value out of range, or a file that could not be written in the end.
    """
    for name in ("json_file", "texts"):
        check_writable(values.get(name))
    settings = {name: value for name, value in values.items() if name not in _NOT_SETTINGS}
    p.at_least_one(**{name: settings.get(name) for name in ("limit", "max_tokens", "batch")})
    if "seeds" in settings:
        settings["seeds"] = p.seeds_of(settings["seeds"])
    dropout = settings["dropout"]
    if isinstance(dropout, str):
        settings["dropout"] = p.probabilities(dropout)
        dropout = settings["dropout"][0]
    AcceptanceConfig(rule="naive", heads=settings["heads"], dropout=dropout)
    length = settings.get("draft_length")
    if isinstance(length, int):
        p.at_least_one(draft_length=length)
        DraftConfig(draft_length=length)
    return settings


def task_of(settings: Mapping[str, Any]) -> tuple[Task, list[Example]]:
    """The task of checked settings, and its examples.

    Raises:
        SettingError: there is none of that name, its data cannot be read, or several examples have one id.
    """
    from dropmatch.evaluation.bench.plan import parse_tasks
    from dropmatch.evaluation.bench.runner import check_ids
    from dropmatch.evaluation.tasks.choose import choose_task

    choice = parse_tasks([settings["task"]])[0]
    task = choose_task(choice["name"], choice["data"], chat=not settings["raw"])
    examples = task.examples(settings["limit"])
    check_ids(task.name, examples)
    return task, examples


def target_alone(name: str, settings: Mapping[str, Any]) -> Engine:
    """An engine without a drafter."""
    quiet_libraries()
    from dropmatch.engines.hf.load import load

    say(error_console(None), "", f"loading {name}")
    return load(name, NO_DRAFT, dtype=settings["dtype"], device=settings["device"])


def decoded(
    engine: Engine,
    name: str,
    settings: Mapping[str, Any],
    examples: Sequence[Example],
    dropouts: Sequence[float],
    file: Path | None,
) -> Texts:
    """Texts of all examples without dropout and through all heads, decoded as far as the file lacks them.

    Args:
        engine: decodes.
        name: of its model.
        settings: checked ones.
        examples: of the task.
        dropouts: p.
        file: keeps the texts; None keeps none.

    Raises:
        SettingError: the file holds texts of other settings or of other prompts.
    """
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.paths import all_paths
    from dropmatch.evaluation.paper.texts import Texts, decode_all

    about = {"target": name, **{key: settings[key] for key in ("dtype", "task", "max_tokens", "raw")}}
    texts = Texts(file, about)
    paths = all_paths(dropouts, settings["heads"], settings["seeds"])
    with Bar(len(examples), "examples") as bar:
        decode_all(engine, examples, paths, settings["max_tokens"], texts, bar)
    return texts


def rows_of(settings: dict[str, Any]) -> tuple[Task, dict[int, Rows], Any]:
    """The draft rows of a task by mask seed, and the device that they were made on; the draft's name is filled in.

    Raises:
        SettingError: the drafter has no distribution, or a value is out of range.
    """
    from dropmatch import models
    from dropmatch.acceptance import get_rule
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.draft_rows import rows_by_seed
    from dropmatch.evaluation.paper.settings import sampled

    configs = [
        sampled("js", settings["heads"], settings["dropout"], seed, settings["support"]) for seed in settings["seeds"]
    ]
    draft = settings["draft"] or models.default_draft(settings["target"])
    if draft in (None, NO_DRAFT):
        raise SettingError(f"{settings['target']} has no drafter: give --draft MODEL")
    get_rule("js").check_drafter(draft != PROMPT_LOOKUP, PROMPT_LOOKUP)
    settings["draft"] = draft
    task, examples = task_of(settings)
    quiet_libraries()
    from dropmatch.engines.hf.load import load

    say(error_console(None), "", f"loading {settings['target']} and {draft}")
    options = {name: settings[name] for name in ("dtype", "device", "draft_weights")}
    engine = load(settings["target"], draft, **options)
    with Bar(len(examples) * len(configs), "texts") as bar:
        found = rows_by_seed(engine, examples, configs, settings["draft_length"], settings["max_tokens"], bar)
    return task, found, engine.model.device


def show(sheets: Sequence[Sheet], color: bool | None) -> None:
    """Tables on stdout."""
    from dropmatch.evaluation.bench.terminal import for_terminal

    output_console(color).print(for_terminal(sheets))


def write(file: Path | None, analysis: str, settings: Mapping[str, Any], result: Any, where: Any) -> None:
    """Everything as one JSON object.

    Args:
        file: None writes nothing.
        analysis: its name.
        settings: what was asked for.
        result: numbers.
        where: the device, or a benchmark's folder, which knows its machine.
    """
    if file is None:
        return
    from dropmatch.environment import machine, versions
    from dropmatch.evaluation.bench.store import machines
    from dropmatch.evaluation.paper import published

    if isinstance(where, Path):
        known = list(machines(where).values())
        about = known[-1] if known else {}
    else:
        about = {**versions(), **machine(where)}
    paper = published.for_json()
    everything = {
        "analysis": analysis,
        "settings": dict(settings),
        "result": result,
        "paper": {"source": paper["source"], **_mapping(paper[analysis])},
        "machine": about,
    }
    file.write_text(json.dumps(everything, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"rows": value}
