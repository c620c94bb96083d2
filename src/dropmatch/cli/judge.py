"""`dropmatch judge`: a language model's opinion of a benchmark's texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.console import error_console, output_console, say
from dropmatch.cli.failures import INTERRUPTED
from dropmatch.errors import DropMatchError, SettingError

if TYPE_CHECKING:
    from dropmatch.evaluation.bench.plan import Plan, TaskChoice
    from dropmatch.evaluation.tasks import Task

JUDGE, JUDGED = "The judge", "What is judged"
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="The folder that dropmatch bench has written.")
]
URL = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="URL",
        show_default=False,
        rich_help_panel=JUDGE,
        help="Where the judge is served, with OpenAI's interface: http://localhost:8000/v1.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", show_default=False, rich_help_panel=JUDGE, help="The judge's name at the endpoint."
    ),
]
KeyVariable = Annotated[
    str,
    typer.Option(
        "--api-key-env",
        metavar="VARIABLE",
        rich_help_panel=JUDGE,
        help="The environment variable that holds the key, which is sent to the endpoint. A server without keys "
        "needs none.",
    ),
]
Kind = Annotated[
    str,
    typer.Option(
        "--kind",
        metavar="KIND",
        rich_help_panel=JUDGE,
        help="single: each text gets 1 to 10. pairwise: each lossy text against strict's, in both orders; a win needs "
        "both.",
    ),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", metavar="N", rich_help_panel=JUDGE, help="Questions at once, 1 to 256.")
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        metavar="N",
        rich_help_panel=JUDGE,
        help="The most tokens of an answer; a judge that thinks at length before its verdict needs more.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="TASK",
        show_default="all",
        rich_help_panel=JUDGED,
        help="A task of the benchmark; may be given several times.",
    ),
]
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cells",
        metavar="RULE,...",
        show_default="all",
        rich_help_panel=JUDGED,
        help="Cells of the benchmark, as its report calls them: js:p=0.1,typical. Strict is judged with them.",
    ),
]


def judge(
    folder: Folder,
    endpoint: URL,
    model: Model,
    api_key_env: KeyVariable = "OPENAI_API_KEY",
    kind: Kind = "single",
    concurrency: Concurrency = 4,
    max_tokens: MaxTokens = 2048,
    task: Tasks = None,
    cells: Cells = None,
    color: o.Color = None,
) -> None:
    """Let a language model judge the texts of a benchmark, against strict decoding on the same examples.

    Every answer is kept in DIR/judgements.jsonl; a run that was stopped goes on
    where it was, and other judges and kinds are kept apart. At the end:
    DIR/judge.json; dropmatch bench --report-only shows the judges too.

    Example: dropmatch judge results/first --endpoint http://localhost:8000/v1 --model Qwen2.5-32B --kind pairwise
    """
    from dropmatch.evaluation.bench.plan import Plan
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.bench.store import Store
    from dropmatch.evaluation.bench.tables import judge_sheets
    from dropmatch.evaluation.bench.terminal import for_terminal
    from dropmatch.evaluation.bench.worker import tasks_of
    from dropmatch.evaluation.judge.asking import advice, ask, missing, questions
    from dropmatch.evaluation.judge.endpoint import Endpoint
    from dropmatch.evaluation.judge.judgements import Judge, Judgements
    from dropmatch.evaluation.judge.prompts import check_kind
    from dropmatch.evaluation.judge.results import results

    for name, value, most in (("concurrency", concurrency, 256), ("max_tokens", max_tokens, 10**6)):
        if not 1 <= value <= most:
            raise SettingError(f"{name} must be an integer from 1 to {most}, got {value}")
    who = Judge.now(model, check_kind(kind))
    plan = Plan.load(folder)
    known = list(zip(tasks_of(plan), plan.tasks, strict=True))
    tasks, chosen = _tasks(known, task), _cells(plan, cells)
    store, judgements = Store(folder, plan), Judgements(folder)
    wanted = questions(plan, store, tasks, chosen, kind)
    work = missing(wanted, who, judgements)
    to_ask = sum(each.known is None for each in work)

    errors, interrupted = error_console(color), False
    say(errors, "", f"{to_ask} questions for {model}; {len(wanted)} judgements are wanted in all")
    if work:
        server = Endpoint(endpoint, model, api_key_env, max_tokens) if to_ask else None
        try:
            with Bar(len(work), "answers") as bar:
                ask(work, who, judgements, server, concurrency, bar)
        except KeyboardInterrupt:
            interrupted = True
            say(errors, "", "interrupted: give the same command again to go on")
        except DropMatchError:
            if judgements.path.exists():
                say(errors, "", "the answers so far are kept: the same command goes on from there")
            raise
        if server is not None and server.samples:
            say(
                errors,
                "",
                f"{model} takes no temperature and was asked at its own: verdicts may differ from run to run",
            )
    found = {each.name: results(plan, store, judgements, each.name) for each, _ in known}
    path = folder / "judge.json"
    path.write_text(json.dumps({"tasks": found}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    mine = [(t.name, one) for t, _ in tasks for one in found[t.name] if asdict(who).items() <= one.items()]
    sheets = [sheet for name, one in mine if one["refused"] is None for sheet in judge_sheets(name, one)]
    if sheets:
        output_console(color).print(for_terminal(sheets))
    say(errors, "", f"written: {path}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    for name, one in mine:
        if one["refused"] is not None:
            raise DropMatchError(
                f"{name}: {one['unparsed']} of {one['answers']} answers of {model} have no verdict, so that the "
                f"result is worthless: {advice([one['refused']])}"
            )


def _tasks(known: Sequence[tuple[Task, TaskChoice]], names: Sequence[str] | None) -> list[tuple[Task, TaskChoice]]:
    """Tasks of a benchmark by the names of its plan or its report."""
    for name in names or ():
        if not any(name in (task.name, choice.name) for task, choice in known):
            raise SettingError(
                f"the benchmark has no task {name!r}; it has {', '.join(task.name for task, _ in known)}"
            )
    return [(t, choice) for t, choice in known if not names or t.name in names or choice.name in names]


def _cells(plan: Plan, texts: Sequence[str] | None) -> list[str]:
    """Cells of a benchmark by their texts, however written."""
    from dropmatch.rule_text import parse_rule

    if texts is None:
        return list(plan.rules)
    known = {frozenset(parse_rule(cell).items()): cell for cell in plan.rules}
    found = []
    for text in (item for each in texts for item in each.split(",") if item.strip()):
        cell = known.get(frozenset(parse_rule(text).items()))
        if cell is None:
            raise SettingError(f"the benchmark has no cell {text.strip()!r}; it has {', '.join(plan.rules)}")
        found.append(cell)
    if not found:
        raise SettingError(f"--cells names none; the benchmark has {', '.join(plan.rules)}")
    return list(dict.fromkeys(found))
