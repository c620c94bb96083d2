"""Table 6: standard speculative decoding (SD) and DropMatch on it (SD+DM), over tasks and draft lengths.

A benchmark (`evaluation.bench`) in the paper's layout. Speedups are relative to SD at the smallest L, on the same
groups of examples; tau counts the bonus token; accuracy is the task's score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import STRICT, Plan
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.bench.worker import length_of
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.settings import Spread, over_seeds, sampled_text, spread_text
from dropmatch.evaluation.statistics import ratio_interval
from dropmatch.rule_text import parse_rule

SD, DM = "SD", "SD+DM"


def speculative_plan(
    values: Mapping[str, Any],
    draft_lengths: Sequence[int],
    heads: int,
    dropout: float,
    seeds: Sequence[int],
    evaluation: str = "lazy",
) -> Plan:
    """The benchmark behind the table.

    Args:
        values: the plan's other settings: target, draft, engine, batch, tasks, limit, max_tokens.
        draft_lengths: L of the rows.
        heads: K.
        dropout: p.
        seeds: mask seeds, each a cell.
        evaluation: "lazy", or "eager" as in the paper.

    Raises:
        SettingError: a value that will not do.
    """
    if not draft_lengths or len(set(draft_lengths)) < len(draft_lengths) or min(draft_lengths) < 1:
        raise SettingError(
            f"draft lengths (L) must be different integers of at least 1, got "
            f"{', '.join(map(str, draft_lengths)) or 'none'}"
        )
    rules = [sampled_text("js", heads, dropout, length, evaluation) for length in sorted(draft_lengths)]
    return Plan.from_values({**values, "rules": rules, "seeds": list(seeds)})


def speculative_table(plan: Plan, store: Store, metrics: Mapping[str, str | None]) -> dict[str, Any]:
    """Table 6 of what a folder holds, a part of a run too.

    Args:
        plan: what was run.
        store: its records.
        metrics: of each task, by its name, what its score is called; None of an open-ended task.

    Returns:
        For JSON: by task its `metric`, what crashed and its `rows`: method, L, cells, `speedup` (over SD at the
        smallest L), `tau` and `accuracy`: of one cell with its bootstrap interval, else over seeds.
    """
    summary = summarise(plan, store, dict(metrics))
    tasks = {}
    for name, task in summary["tasks"].items():
        shortest = min(length_of(cell) for cell in plan.rules)
        base = next(cell for cell in plan.rules if _method(cell) == SD and length_of(cell) == shortest)
        rows = []
        for length in sorted({length_of(cell) for cell in plan.rules}):
            for method in (SD, DM):
                chosen = [
                    c for c in plan.rules if c in task["cells"] and (_method(c), length_of(c)) == (method, length)
                ]
                if chosen:
                    rows.append(_row(store, name, task["cells"], base, method, length, chosen))
        tasks[name] = {"metric": task["metric"], "rows": rows, "failures": task["failures"]}
    return {"tasks": tasks}


def _row(
    store: Store, task: str, cells: Mapping[str, Any], base: str, method: str, length: int, chosen: Sequence[str]
) -> dict[str, Any]:
    entries = [cells[cell] for cell in chosen]
    return {
        "method": method,
        "draft_length": length,
        "cells": list(chosen),
        "examples": min(entry["examples"] for entry in entries),
        "speedup": _one_or_over_seeds([_speedup(store, task, cell, base) for cell in chosen]),
        "tau": over_seeds([entry["acceptance_length"] for entry in entries]),
        "accuracy": _one_or_over_seeds([entry["score"] for entry in entries]),
    }


def _one_or_over_seeds(values: Sequence[Spread | None]) -> Spread | None:
    """One cell's interval; of several the mean, the least and the greatest."""
    return values[0] if len(values) == 1 else over_seeds([value["value"] for value in values if value])


def _method(cell: str) -> str:
    return SD if parse_rule(cell)["rule"] == STRICT else DM


def _speedup(store: Store, task: str, cell: str, base: str) -> Spread | None:
    """Tokens per second over those of another cell, on the groups that both have."""
    mine, theirs = _speeds(store, task, cell), _speeds(store, task, base)
    shared = [key for key in mine if key in theirs]
    if not shared:
        return None
    return asdict(ratio_interval([mine[key] for key in shared], [theirs[key] for key in shared]))


def _speeds(store: Store, task: str, cell: str) -> dict[tuple[str, ...], float]:
    """Tokens per second by group, which its examples name."""
    return {
        tuple(group.ids): sum(output["tokens"] for output in group.outputs) / group.seconds
        for (name, rule, _), group in store.groups.items()
        if (name, rule) == (task, cell)
    }


def speculative_sheets(found: dict[str, Any], seeds: int) -> list[Sheet]:
    """Table 6 as texts, a table a task."""
    sheets = []
    for name, task in found["tasks"].items():
        known = published.task_of(name) if task["metric"] else None  # a file of prompts may be called gsm8k
        rows: list[tuple[str, ...]] = []
        for row in task["rows"]:
            key = row["method"], row["draft_length"]
            cells = [f"{row['method']}, L={row['draft_length']}", str(row["examples"]), spread_text(row["speedup"], 2)]
            cells += [spread_text(row["tau"], 2), spread_text(row["accuracy"], 1, 100)]
            for pair in published.SPECULATIVE.values():
                paper = pair.get(key, {}).get(known or "")
                cells.append(f"{paper[0]:.2f} / {paper[1]:.2f} / {paper[2]:.2f}" if paper else "")
            rows.append(tuple(cells))
        papers = (f"paper, {pair}" for pair in published.SPECULATIVE)
        headings = ("", "n", "speedup", "tau", f"{task['metric'] or 'score'} %", *papers)
        notes = [f"{cell} crashed: {text}" for cell, text in task["failures"].items()]
        sheets.append(Sheet(f"Table 6: {name}", headings, rows, notes))
    several = f"; of SD+DM the mean over {seeds} mask seeds, the least and the greatest" if seeds > 1 else ""
    if sheets:
        sheets[-1].notes.append(
            "speedup / tau / accuracy: speed over SD at the smallest L on the same examples (median over groups), "
            f"committed tokens a round with the bonus token, score. In brackets: 95 % bootstrap intervals{several}."
        )
    return sheets
