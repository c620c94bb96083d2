"""`dropmatch bench`: rules, settings and tasks side by side, speed beside quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o
from dropmatch.cli.console import error_console, output_console, say
from dropmatch.cli.failures import INTERRUPTED
from dropmatch.errors import DropMatchError, SettingError

RUNNING = "What is run"
PlanFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PLAN.yaml]",
        show_default=False,
        help="The plan: target, draft, engine, batch, max_tokens, limit, tasks, rules, grid, seeds. Options replace "
        "what it says.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        rich_help_panel=o.OUTPUT,
        help="The folder of records and reports. Given again, a run goes on where it was stopped.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="TASK",
        show_default=False,
        rich_help_panel=RUNNING,
        help="A task, may be given several times: humaneval, humaneval_plus (EvalPlus), any generative task of "
        "lm-evaluation-harness (gsm8k_cot, ifeval, mmlu_generative, ...), or a .jsonl file of prompts. TASK=FILE takes "
        "its examples from a JSONL file instead of the hub.",
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--rules",
        metavar="RULE,...",
        show_default="js,naive",
        rich_help_panel=RUNNING,
        help="Rules with their settings, one cell each: js:p=0.1,js:p=0.3:L=10,typical:threshold=0.2. Strict is always "
        "there: all are compared with it.",
    ),
]
Metric = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="[TASK=]NAME",
        show_default="the first that is averaged over texts",
        rich_help_panel=RUNNING,
        help="Which of its metrics a task of lm-evaluation-harness is scored by; may be given several times.",
    ),
]
Filter = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="[TASK=]NAME",
        show_default="flexible-extract, or else the first",
        rich_help_panel=RUNNING,
        help="Which of the harness's filters takes the answer out of a text: strict-match, flexible-extract, ...; "
        "may be given several times.",
    ),
]
UnsafeCode = Annotated[
    bool,
    typer.Option(
        "--unsafe-code",
        rich_help_panel=RUNNING,
        help="Allow tasks of the harness that run the generated texts as programs on this machine (mbpp, ...), as its "
        "--confirm_run_unsafe_code does: in a container. HumanEval's programs are confined, and need no such leave.",
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        metavar="N,...",
        show_default="the request's own",
        rich_help_panel=RUNNING,
        help="Mask seeds of sampled verdicts, each a cell of its own.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        show_default="all",
        rich_help_panel=RUNNING,
        help="Examples of each task; of a group of tasks, of all together.",
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "--turns",
        metavar="N",
        show_default="all",
        rich_help_panel=RUNNING,
        help="Of conversations in a .jsonl file at most so many turns, each on the cell's own replies before.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        show_default="hf",
        rich_help_panel=o.MODELS,
        help="hf: one example at a time; vllm: in batches, each draft length in a process of its own.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", show_default="10", rich_help_panel=o.MODELS, help="vLLM: requests at once."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        show_default="the task's own limit, or 256",
        rich_help_panel=RUNNING,
        help="The most tokens of an example; a task's own limit holds too.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="MODEL",
        show_default=o.DEFAULT_TARGET,
        rich_help_panel=o.MODELS,
        help="The model whose text is wanted: a hub id, a local folder, a .gguf file, or a demo model.",
    ),
]
ReportOnly = Annotated[
    bool,
    typer.Option(
        "--report-only",
        rich_help_panel=o.OUTPUT,
        help="Run nothing; report what the --out folder holds, of a benchmark that is still running too: of the other "
        "options only --against and --plots are taken.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="CELL",
        show_default="the first of js and naive",
        rich_help_panel=o.OUTPUT,
        help="The cell that the report compares with each other one of its draft length: js:p=0.1.",
    ),
]
Plots = Annotated[
    Path | None,
    typer.Option(
        "--plots",
        metavar="DIR",
        show_default=False,
        rich_help_panel=o.OUTPUT,
        help="Write the figures there too, as TASK-NAME.svg.",
    ),
]


def bench(
    plan_file: PlanFile = None,
    out: Out = Path("bench"),
    task: Tasks = None,
    rules: Rules = None,
    seeds: Seeds = None,
    limit: Limit = None,
    turns: Turns = None,
    metric: Metric = None,
    filter_name: Filter = None,
    unsafe_code: UnsafeCode = False,
    max_tokens: MaxTokens = None,
    target: Target = None,
    draft: o.Draft = None,
    engine: EngineName = None,
    batch: Batch = None,
    raw: o.RawPrompts = False,
    report_only: ReportOnly = False,
    against: Against = None,
    plots: Plots = None,
    color: o.Color = None,
) -> None:
    """Measure rules on tasks: speed beside quality, against strict decoding on the same examples.

    Cells take turns on every group of examples, so that they share what the
    machine does meanwhile. Every text is kept; a run that was stopped goes on
    where it was. At the end: report.json, report.md, plots and report.html.

    Example: dropmatch bench --task gsm8k_cot --rules js:p=0.1,js:p=0.3,typical --limit 100 --out results/first
    """
    from dropmatch.evaluation.bench.pairs import reference
    from dropmatch.evaluation.bench.plan import Plan, cells, parse_tasks, with_setting
    from dropmatch.evaluation.bench.plots import prepare
    from dropmatch.evaluation.bench.report import write_report
    from dropmatch.evaluation.bench.store import Store
    from dropmatch.evaluation.bench.unfinished import score_what_is_there
    from dropmatch.evaluation.bench.worker import run, tasks_of

    given: dict[str, Any] = {"target": target, "draft": draft, "engine": engine, "batch": batch, "limit": limit}
    given |= {"max_tokens": max_tokens, "tasks": parse_tasks(task) if task else None}
    given |= {"rules": _listed(rules), "seeds": _numbers(seeds), "raw": raw or None, "turns": turns}
    given = {name: value for name, value in given.items() if value is not None}
    choices = {"metric": metric or [], "filter": filter_name or []}
    if report_only:
        if plan_file is not None or given or unsafe_code or any(choices.values()):
            raise SettingError(
                f"--report-only reports what {out} holds: leave out all options but --out, --against and --plots"
            )
        plan = Plan.load(out)
    else:
        values = {"target": o.DEFAULT_TARGET, **({} if plan_file is None else Plan.read(plan_file)), **given}
        if rules:
            values.pop("grid", None)
        elif not values.get("rules") and not values.get("grid"):
            values["rules"] = list(cells(["js", "naive"], ()))
        if isinstance(values.get("tasks"), list):  # else refused as no list
            for name, texts in choices.items():
                values["tasks"] = with_setting(values["tasks"], name, texts)
            if unsafe_code:
                values["tasks"] = with_setting(values["tasks"], "unsafe_code", [True])
        plan = Plan.from_values(values)
    before = Plan.load(out).rules if (out / "plan.json").exists() else ()
    # now, and not after hours
    reference(replace(plan, rules=tuple(dict.fromkeys([*plan.rules, *before]))), against)
    if plots is not None:
        prepare(plots)

    errors, output = error_console(color), output_console(color)
    tasks = tasks_of(plan)
    interrupted = False
    if not report_only:
        say(errors, "", f"{len(plan.rules)} cells on {len(tasks)} tasks, into {out}")
        try:
            run(plan, out, tasks)
        except KeyboardInterrupt:
            interrupted = True
            say(errors, "", "interrupted: give the same command again to go on")
    if (out / "plan.json").exists():
        plan = replace(plan, rules=Plan.load(out).rules)  # with the cells that were run there before
    store = Store(out, plan)
    if interrupted or report_only:
        for name, why in score_what_is_there(plan, store, tasks).items():
            say(errors, "", f"{name}: texts that have no score yet stay without one: {why}")
    if store.groups or store.failures:
        metrics = {each.name: each.metric for each in tasks}
        output.print(write_report(plan, store, metrics, against=against, plots=plots))
        say(errors, "", f"written: {', '.join(str(path) for path in sorted(out.glob('report.*')))}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if store.failures and not store.groups:
        (_, cell), error = next(iter(store.failures.items()))
        raise DropMatchError(f"every cell has crashed; {cell}: {error}")


def _listed(texts: list[str] | None) -> list[str] | None:
    """Items of lists separated by commas."""
    if texts is None:
        return None
    return [item.strip() for text in texts for item in text.split(",") if item.strip()]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise SettingError(f"--seeds must be integers with commas between them, got {text!r}") from None
