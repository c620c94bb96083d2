"""What the analyses of `dropmatch paper` share: checked settings, models, texts, and where results go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dropmatch.cli import paper_options as p
from dropmatch.cli.console import error_console, output_console, say
from dropmatch.cli.failures import INTERRUPTED
from dropmatch.cli.files import check_writable
from dropmatch.cli.session import quiet_libraries
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import SettingError
from dropmatch.models.names import NO_DRAFT, PROMPT_LOOKUP

if TYPE_CHECKING:
    from dropmatch.engines.hf.engine import Engine
    from dropmatch.evaluation.bench.tables import Sheet
    from dropmatch.evaluation.paper.draft_rows import Rows
    from dropmatch.evaluation.paper.paths import Path as HeadPath
    from dropmatch.evaluation.paper.texts import Texts
    from dropmatch.evaluation.tasks import Example, Task

_NOT_SETTINGS = ("json_file", "color", "texts", "rows", "out", "report_only")


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options as settings, ready for JSON: lists as lists, numbers in range.

    Raises:
        SettingError: a value out of range, or a file that could not be written in the end.
    """
    for name in ("json_file", "texts", "rows"):
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
    task = choose_task(choice["name"], choice["data"], chat=not settings["raw"], turns=1)
    examples = task.examples(settings["limit"])
    check_ids(task.name, examples)
    return task, examples


def target_alone(name: str, settings: Mapping[str, Any]) -> Engine:
    """An engine without a drafter."""
    quiet_libraries()
    from dropmatch.engines.hf.load import load

    say(error_console(None), "", f"loading {name}")
    return load(name, NO_DRAFT, dtype=settings["dtype"], device=settings["device"])


class Run:
    """What may take hours: Ctrl-C ends what is done inside, and the tables of what is there can still be shown.

    Attributes:
        stopped: it has.
    """

    def __init__(self) -> None:
        self.stopped = False

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            return False
        self.stopped = True
        say(error_console(None), "", "interrupted: give the same command again to go on")
        return True

    def leave(self) -> None:
        """End the command as a shell expects of one that was interrupted.

        Raises:
            typer.Exit: it was.
        """
        if self.stopped:
            raise typer.Exit(INTERRUPTED)


def decoded(
    run: Run,
    name: str,
    settings: Mapping[str, Any],
    examples: Sequence[Example],
    paths: Sequence[HeadPath],
    file: Path,
) -> Texts:
    """Texts of all examples through some heads, decoded as far as the file lacks them; fewer if the run is stopped.

    Args:
        run: may be stopped.
        name: of the model, which is loaded if it is needed.
        settings: checked ones.
        examples: of the task.
        paths: the heads.
        file: keeps the texts.

    Raises:
        SettingError: the file holds texts of other settings or of other prompts.
    """
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.texts import Texts, decode_all

    about = {"target": name, **{key: settings[key] for key in ("dtype", "task", "max_tokens", "raw")}}
    texts = Texts(file, about)
    texts.kept.check_examples(examples)  # before the model is loaded
    missing = len(texts.whole(examples, paths)) < len(examples)
    with run:
        engine = target_alone(name, settings) if missing else None
        with Bar(len(examples), "examples") as bar:
            decode_all(engine, examples, paths, settings["max_tokens"], texts, bar)
    return texts


def rows_of(run: Run, settings: dict[str, Any], file: Path) -> tuple[Task, dict[int, Rows], dict[str, Any]]:
    """The draft rows of a task by mask seed, and what they were made on; the draft's name is filled in.

    Args:
        run: may be stopped; the rows are then those that are there, or none.
        settings: checked ones.
        file: keeps the rows.

    Raises:
        SettingError: the drafter has no distribution, a value is out of range, or the file holds rows of other
            settings or of other prompts.
    """
    from dropmatch import models
    from dropmatch.acceptance import get_rule
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.kept_rows import KeptRows, decode_rows
    from dropmatch.evaluation.paper.settings import sampled

    seeds = settings["seeds"]
    configs = [sampled("js", settings["heads"], settings["dropout"], seed, settings["support"]) for seed in seeds]
    draft = settings["draft"] or models.default_draft(settings["target"])
    if draft in (None, NO_DRAFT):
        raise SettingError(f"{settings['target']} has no drafter: give --draft MODEL")
    get_rule("js").check_drafter(draft != PROMPT_LOOKUP, PROMPT_LOOKUP)
    settings["draft"] = draft
    about = {name: value for name, value in settings.items() if name not in ("limit", "seeds", "device")}
    rows = KeptRows(file, about | {"shortlist_size": configs[0].shortlist_size})
    task, examples = task_of(settings)
    rows.kept.check_examples(examples)
    missing = any((example.id, seed) not in rows for example in examples for seed in seeds)
    with run:
        engine = _pair(settings) if missing else None
        with Bar(len(examples) * len(configs), "texts") as bar:
            decode_rows(engine, examples, configs, settings["draft_length"], settings["max_tokens"], rows, bar)
    return task, rows.by_seed(examples, seeds), rows.kept.machine


def _pair(settings: Mapping[str, Any]) -> Engine:
    """An engine with the drafter."""
    quiet_libraries()
    from dropmatch.engines.hf.load import load

    target, draft = settings["target"], settings["draft"]
    say(error_console(None), "", f"loading {target} and {draft}")
    return load(target, draft, **{name: settings[name] for name in ("dtype", "device", "draft_weights")})


def beside(file: Path, what: str) -> Path:
    """texts.jsonl -> texts.WHAT.jsonl"""
    return file.with_name(f"{file.stem}.{what}{file.suffix}")


def show(sheets: Sequence[Sheet], color: bool | None) -> None:
    """Tables on stdout."""
    from dropmatch.evaluation.bench.terminal import for_terminal

    output_console(color).print(for_terminal(sheets))


def write(
    file: Path | None, analysis: str, settings: Mapping[str, Any], result: Any, where: Any, run: Run | None = None
) -> None:
    """Everything as one JSON object.

    Args:
        file: None writes nothing.
        analysis: its name.
        settings: what was asked for.
        result: numbers.
        where: the device, what is known of the machine, or a benchmark's folder, which knows it.
        run: whether the numbers are of a part of what was asked for; None of all.
    """
    if file is None:
        return
    from dropmatch.environment import machine, versions
    from dropmatch.evaluation.bench.store import machines
    from dropmatch.evaluation.paper import published

    if isinstance(where, Path):
        known = list(machines(where).values())
        about = known[-1] if known else {}
    elif isinstance(where, Mapping):
        about = dict(where)
    else:
        about = {**versions(), **machine(where)}
    paper = published.for_json()
    everything = {
        "analysis": analysis,
        "settings": dict(settings),
        "complete": run is None or not run.stopped,
        "result": result,
        "paper": {"source": paper["source"], **_mapping(paper[analysis])},
        "machine": about,
    }
    file.write_text(json.dumps(everything, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"rows": value}
