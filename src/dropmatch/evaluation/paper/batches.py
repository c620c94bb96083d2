"""Table 5: throughput of `js` over standard speculative decoding by batch size, with vLLM.

Each batch size is a benchmark of its own in a folder of its own (`batch-16`), so that a run which was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from dropmatch.engines.vllm.environment import require_vllm
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.bench.worker import run, tasks_of
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.settings import over_seeds, sampled_text, spread_text


def batch_plans(
    values: Mapping[str, Any],
    batches: Sequence[int],
    draft_length: int,
    heads: int,
    dropout: float,
    seeds: Sequence[int],
) -> dict[int, Plan]:
    """A plan for each batch size.

    Args:
        values: the plans' other settings: target, draft, tasks (one), limit, max_tokens.
        batches: sizes.
        draft_length: L.
        heads: K.
        dropout: p.
        seeds: mask seeds, each a cell.

    Raises:
        SettingError: a value that will not do.
    """
    if not batches or len(set(batches)) < len(batches):
        raise SettingError(f"batches must be different integers, got {', '.join(map(str, batches)) or 'none'}")
    rules = [sampled_text("js", heads, dropout, draft_length)]
    common = {**values, "engine": "vllm", "rules": rules, "seeds": list(seeds), "log_likelihood": False}
    return {batch: Plan.from_values({**common, "batch": batch}) for batch in batches}


def measure_batches(plans: Mapping[int, Plan], folder: Path) -> None:
    """Run what is missing.

    Args:
        plans: by batch size, of one task.
        folder: of all benchmarks.

    Raises:
        SettingError: vLLM is not there, or a batch cannot be filled; nothing was generated.
    """
    require_vllm()
    first = next(iter(plans.values()))  # all have its task and its limit
    tasks = tasks_of(first)
    examples = len(tasks[0].examples(first.task(first.tasks[0]).limit))
    for plan in plans.values():
        if examples < plan.batch:
            raise SettingError(
                f"a batch of {plan.batch} needs as many examples, and {tasks[0].name} gives {examples}: raise --limit, "
                "or leave that batch size out"
            )
    for batch, plan in plans.items():
        # no group that does not fill a batch
        run(replace(plan, limit=examples // batch * batch), batch_folder(folder, batch), tasks)


def batch_folder(folder: Path, batch: int) -> Path:
    """Of the benchmark of a batch size."""
    return folder / f"batch-{batch}"


def batches_table(plans: Mapping[int, Plan], folder: Path) -> dict[str, Any]:
    """Table 5 of what the folders hold, a part of a run too.

    Args:
        plans: by batch size, of one task.
        folder: of all benchmarks.

    Returns:
        For JSON: by batch size, of those that were begun, `over_strict` (over seeds; of one seed with its bootstrap
        interval), `acceptance_length` and `tokens_per_second` of both, `groups`, and what crashed.

    Raises:
        SettingError: a folder holds a benchmark of other settings.
    """
    tasks = tasks_of(next(iter(plans.values())))
    found = {}
    for batch, plan in plans.items():
        where = batch_folder(folder, batch)
        if not (where / "plan.json").exists():
            continue
        summary = summarise(plan, Store(where, plan), {task.name: task.metric for task in tasks})
        found[str(batch)] = _entry(summary["tasks"][tasks[0].name], plan)
    return {"task": tasks[0].name, "batches": found}


def _entry(task: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    strict, lossy = plan.rules[0], plan.rules[1:]
    cells = [task["cells"][rule] for rule in lossy if rule in task["cells"]]
    over = [cell["over_strict"] for cell in cells if cell.get("over_strict")]
    ratios = [{end: each[end] for end in ("value", "low", "high")} for each in over]
    both = {"strict": [task["cells"][strict]] if strict in task["cells"] else [], "js": cells}
    return {
        "over_strict": ratios[0] if len(ratios) == 1 else over_seeds([ratio["value"] for ratio in ratios]),
        "acceptance_length": {name: _mean(each, "acceptance_length") for name, each in both.items()},
        "tokens_per_second": {name: _mean(each, "tokens_per_second") for name, each in both.items()},
        "groups": min((cell["groups"] for each in both.values() for cell in each), default=0),
        "failures": task["failures"],
    }


def _mean(cells: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [cell[name] for cell in cells if cell[name] is not None]
    return mean(values) if values else None


def batches_sheet(found: dict[str, Any], seeds: int) -> Sheet:
    """Table 5 as texts."""
    rows: list[tuple[str, ...]] = []
    notes = []
    for batch, entry in found["batches"].items():
        paper = published.BATCHES.get(int(batch))
        numbers = [entry[name][which] for name in ("acceptance_length", "tokens_per_second") for which in entry[name]]
        texts = [f"{number:.2f}" if number is not None else "-" for number in numbers]
        speed = spread_text(entry["over_strict"], 2)
        rows.append((batch, speed, *texts, str(entry["groups"]), f"{paper:.2f}" if paper else ""))
        notes += [f"batch {batch}, {cell} crashed: {text}" for cell, text in entry["failures"].items()]
    interval = f"least and greatest over {seeds} mask seeds" if seeds > 1 else "95 % bootstrap interval over groups"
    notes += [
        f"Median over groups of examples of the throughput over SD's on the same group; in brackets: {interval}.",
        "The paper: GSM8K, L=10, Llama-3.1-70B-Instruct, vLLM on four A100s.",
    ]
    headings = (
        "batch",
        "js over SD",
        "tau: SD",
        "js",
        "tokens/s: SD",
        "js",
        "groups",
        "paper: js over SD",
    )
    return Sheet(f"Table 5: throughput by batch size, {found['task']}", headings, rows, notes)
