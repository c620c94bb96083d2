"""Two cells of a task side by side, on the examples that both have, and a table of one cell against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import STRICT, Plan, baseline, in_full
from dropmatch.evaluation.bench.store import Store, Timed
from dropmatch.evaluation.bench.workload import LOG_LIKELIHOOD, SCORE
from dropmatch.evaluation.statistics import paired, ratio_interval, sums_ratio_difference
from dropmatch.rule_text import parse_rule

OURS = ("js", "naive")


def groups_of(store: Store, task: str, cell: str) -> dict[int, Timed]:
    """The groups of a cell, by number."""
    return {number: group for (t, c, number), group in sorted(store.groups.items()) if (t, c) == (task, cell)}


def shared(store: Store, task: str, cell: str, other: str) -> tuple[dict[int, Timed], dict[int, Timed], list[int]]:
    """The groups of two cells, and the numbers of those that both have with the same examples."""
    mine, theirs = groups_of(store, task, cell), groups_of(store, task, other)
    return mine, theirs, [n for n in mine if n in theirs and mine[n].ids == theirs[n].ids]


def value_of(store: Store, task: str, cell: str, name: str, example: str) -> float | None:
    """A score of one text; None if it has none."""
    return store.scores.get((task, cell, example), {}).get(name)


def speed_of(group: Timed) -> float:
    """Tokens per second."""
    return sum(output["tokens"] for output in group.outputs) / group.seconds


def speed_over(store: Store, task: str, cell: str, other: str, together: bool = True) -> dict[str, float] | None:
    """Tokens per second over another cell's on the same groups; None if there are none.

    Args:
        store: the records.
        task: the task.
        cell, other: its cells.
        together: only of groups that one process decoded with both cells, by turns.
    """
    mine, theirs, numbers = shared(store, task, cell, other)
    if together:
        numbers = [n for n in numbers if mine[n].run == theirs[n].run]
    if not numbers:
        return None
    found = ratio_interval([speed_of(mine[n]) for n in numbers], [speed_of(theirs[n]) for n in numbers])
    return {**asdict(found), "pairs": len(numbers)}


def score_against(
    store: Store, task: str, cell: str, other: str, name: str, ids: Sequence[str]
) -> dict[str, Any] | None:
    """A cell's scores less another's of the same examples, as `Paired` has them; None if no example has both."""
    values = [(value_of(store, task, other, name, i), value_of(store, task, cell, name, i)) for i in ids]
    both = [(theirs, ours) for theirs, ours in values if theirs is not None and ours is not None]
    return asdict(paired([theirs for theirs, _ in both], [ours for _, ours in both])) if both else None


def reference(plan: Plan, asked: str | None) -> str | None:
    """The cell that is compared with each other: the one asked for, or DropMatch's first; None if there is none.

    Raises:
        SettingError: the benchmark has no such cell, or it is a strict one.
    """
    if asked is None:
        return next((cell for cell in plan.rules if parse_rule(cell)["rule"] in OURS), None)
    wanted = in_full(asked)
    for cell in plan.rules:
        if in_full(cell) == wanted:
            if wanted["rule"] == STRICT:
                raise SettingError(f"--against {asked}: all cells are compared with strict anyway; name a lossy one")
            return cell
    raise SettingError(f"--against {asked}: the benchmark has no such cell; it has {', '.join(plan.rules)}")


def against_each_other(store: Store, task: str, cell: str, cells: Sequence[str]) -> dict[str, Any] | None:
    """One cell compared with every other lossy one of its draft length: its values less theirs, its speed over theirs.

    Args:
        store: the records.
        task: the task.
        cell: the reference.
        cells: those of the task that have texts.
    """
    others = [c for c in cells if c not in (cell, baseline(c)) and baseline(c) == baseline(cell)]
    if cell not in cells:
        return None
    found = {other: entry for other in others if (entry := _pair(store, task, cell, other)) is not None}
    return {"reference": cell, "cells": found} if found else None


def _pair(store: Store, task: str, cell: str, other: str) -> dict[str, Any] | None:
    mine, theirs, numbers = shared(store, task, cell, other)
    if not numbers:
        return None
    ids = [i for n in numbers for i in mine[n].ids]
    counts = [
        ([o["accepted"] + o["rounds"] for o in outputs], [o["rounds"] for o in outputs])
        for outputs in ([o for n in numbers for o in groups[n].outputs] for groups in (mine, theirs))
    ]
    rounds = any(a and b for a, b in zip(counts[0][1], counts[1][1], strict=True))
    return {
        "examples": len(ids),
        "score": score_against(store, task, cell, other, SCORE, ids),
        "log_likelihood": score_against(store, task, cell, other, LOG_LIKELIHOOD, ids),
        "acceptance_length": asdict(sums_ratio_difference(counts[0], counts[1])) if rounds else None,
        "speed": speed_over(store, task, cell, other),
    }
