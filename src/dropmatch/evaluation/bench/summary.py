"""What a benchmark's records come to: speed beside quality, each with its interval, and what is suspicious.

All is compared with the strict cell of the same draft length on the same examples. Where there are several draft
lengths, speeds are also compared with the first strict cell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from dropmatch.evaluation.bench.choice import barred, best, has_speeds
from dropmatch.evaluation.bench.labels import labels, settings_of
from dropmatch.evaluation.bench.pairs import (
    against_each_other,
    groups_of,
    reference,
    score_against,
    shared,
    speed_of,
    speed_over,
    value_of,
)
from dropmatch.evaluation.bench.plan import Plan, baseline, without_seed
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.workload import LOG_LIKELIHOOD, SCORE, score_of, unscored
from dropmatch.evaluation.judge.judgements import Judgements
from dropmatch.evaluation.judge.results import results
from dropmatch.evaluation.statistics import (
    Interval,
    mean_interval,
    share_interval,
    sums_ratio_interval,
)
from dropmatch.evaluation.text_checks import loops
from dropmatch.rule_text import parse_rule

# a cell with so many percent more of its texts looping or cut than strict's is flagged
MORE_LOOPS, MORE_CUTS = 5.0, 10.0


def summarise(plan: Plan, store: Store, metrics: dict[str, str | None], against: str | None = None) -> dict[str, Any]:
    """Everything, ready for JSON.

    Args:
        plan: what was run.
        store: its records.
        metrics: of each task, by its name, what its score is called; None of an open-ended task.
        against: the cell that is compared with each other; None is DropMatch's first.

    Raises:
        SettingError: the benchmark has no such cell, or its plan or its judgements cannot be read.
    """
    tasks, judgements, chosen = {}, Judgements(store.folder), reference(plan, against)
    names = labels(plan.rules, settings_of(store.folder))
    for task, metric in metrics.items():
        cells = {cell: _cell(store, task, cell) for cell in plan.rules if groups_of(store, task, cell)}
        for cell, entry in cells.items():
            _compare(store, task, cell, baseline(cell), entry, cells)
            # vLLM decodes each draft length in a process of its own
            together = plan.engine == "hf" or baseline(cell) == plan.rules[0]
            entry["over_first"] = speed_over(store, task, cell, plan.rules[0], together)
            name = score_of(plan, metric)
            entry["unscored"] = len(unscored(store, task, cell, name)) if name else 0
        judges = results(plan, store, judgements, task)
        tasks[task] = {
            "metric": metric,
            "first": plan.rules[0],
            "lengths_apart": plan.engine != "hf" and len({baseline(cell) for cell in cells}) > 1,
            "labels": names,
            "cells": cells,
            "seeds": _over_seeds(cells),
            "best": best(cells, judges),
            "barred": barred(cells, judges),
            "has_speeds": has_speeds(cells),
            "against": None if chosen is None else against_each_other(store, task, chosen, list(cells)),
            "judges": judges,
            "failures": {cell: text for (name, cell), text in store.failures.items() if name == task},
        }
    return {"plan": asdict(plan), "tasks": tasks}


def _cell(store: Store, task: str, cell: str) -> dict[str, Any]:
    groups = groups_of(store, task, cell)
    outputs = [output for group in groups.values() for output in group.outputs]
    ids = [i for group in groups.values() for i in group.ids]
    tokens, rounds = sum(o["tokens"] for o in outputs), sum(o["rounds"] for o in outputs)
    accepted, lossy = sum(o["accepted"] for o in outputs), sum(o["lossy"] for o in outputs)
    reasons, lengths = Counter[str](), Counter[int]()
    for output in outputs:
        reasons.update(output["reasons"])
        lengths.update({int(length): count for length, count in output["lengths"].items()})
    scores = _scores(store, task, cell, SCORE, ids)
    likelihoods = _scores(store, task, cell, LOG_LIKELIHOOD, ids)
    return {
        "rule": parse_rule(cell),
        "examples": len(outputs),
        "groups": len(groups),
        "tokens": tokens,
        "tokens_per_second": median(speed_of(group) for group in groups.values()),
        "acceptance_length": 1.0 + accepted / rounds if rounds else None,
        "acceptance_length_interval": _length_interval(outputs) if rounds else None,
        "lossy_pct": 100 * lossy / tokens if tokens else 0.0,
        "accepted_by_reason": dict(sorted(reasons.items())),
        "accepted_by_position": _by_position(lengths),
        **_degenerate(outputs),
        "score": _score_interval(scores),
        "log_likelihood": asdict(mean_interval(likelihoods)) if likelihoods else None,
        "flags": [],
    }


def _compare(
    store: Store, task: str, cell: str, base: str, entry: dict[str, Any], cells: dict[str, dict[str, Any]]
) -> None:
    """Add what a cell is against strict, on the groups and examples that both have."""
    if base not in cells or cell == base:
        return
    mine, theirs, numbers = shared(store, task, cell, base)
    if not numbers:
        return
    entry["over_strict"] = speed_over(store, task, cell, base)
    ids = [i for number in numbers for i in mine[number].ids]
    for name, key in ((SCORE, "against_strict"), (LOG_LIKELIHOOD, "log_likelihood_against_strict")):
        found = score_against(store, task, cell, base, name, ids)
        if found is not None:
            entry[key] = found
    entry["same_text"] = sum(
        a["text"] == b["text"] for n in numbers for a, b in zip(mine[n].outputs, theirs[n].outputs, strict=True)
    )
    entry["flags"] = _flags(*([o for n in numbers for o in groups[n].outputs] for groups in (mine, theirs)))


def _degenerate(outputs: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many texts are cut off, loop or are empty."""
    return {
        "truncated": sum(output["finish"] == "length" for output in outputs),
        "looping": sum(loops(output["text"]) for output in outputs),
        "empty": sum(not output["text"].strip() for output in outputs),
    }


def _flags(outputs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with a cell's texts, beside strict's on the same examples."""
    counts, theirs, n = _degenerate(outputs), _degenerate(base), len(outputs)
    found = []
    for name, more, what in (("looping", MORE_LOOPS, "looping"), ("truncated", MORE_CUTS, "cut off")):
        if 100 * (counts[name] - theirs[name]) / n >= more:
            found.append(
                f"{100 * counts[name] / n:.0f} % of its texts are {what}, {100 * theirs[name] / n:.0f} % of strict's"
            )
    if counts["empty"] > theirs["empty"] and 100 * counts["empty"] / n >= MORE_LOOPS:
        found.append(f"{counts['empty']} of its texts are empty")
    return found


def _over_seeds(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of rules that were run with several seeds: the mean over seeds, and the least and the greatest."""
    groups = defaultdict(list)
    for name, cell in cells.items():
        if cell["rule"].get("mask_seed") is not None:
            groups[without_seed(name)].append(cell)
    found = {}
    for name, members in groups.items():
        entry: dict[str, Any] = {"seeds": len(members)}
        for key in ("score", "over_strict", "log_likelihood"):
            values = [cell[key]["value"] for cell in members if cell.get(key)]
            entry[key] = _spread(values) if values else None
        lengths = [cell["acceptance_length"] for cell in members if cell["acceptance_length"]]
        entry["acceptance_length"] = _spread(lengths) if lengths else None
        found[name] = entry
    return found


def _length_interval(outputs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over examples: committed tokens over rounds."""
    committed, rounds = [o["accepted"] + o["rounds"] for o in outputs], [o["rounds"] for o in outputs]
    return asdict(sums_ratio_interval(committed, rounds))


def _score_interval(scores: Sequence[float]) -> dict[str, float] | None:
    """Of shares Wilson's, which is none of one point where all or none are right."""
    if not scores:
        return None
    if set(scores) <= {0.0, 1.0}:
        return asdict(share_interval(int(sum(scores)), len(scores)))
    return asdict(mean_interval(scores))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return asdict(Interval(mean(values), min(values), max(values)))


def _scores(store: Store, task: str, cell: str, name: str, ids: Sequence[str]) -> list[float]:
    values = (value_of(store, task, cell, name, i) for i in ids)
    return [value for value in values if value is not None]


def _by_position(lengths: Counter[int]) -> list[float]:
    """Share of rounds that accepted the draft token at each place, and all before it."""
    rounds, longest = sum(lengths.values()), max(lengths, default=0)
    return [sum(n for length, n in lengths.items() if length > place) / rounds for place in range(longest)]
