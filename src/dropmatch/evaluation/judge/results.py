"""What judgements come to: scores and wins with their intervals, against the strict cell of the same draft length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dropmatch.evaluation.bench.plan import Plan, baseline
from dropmatch.evaluation.bench.store import Store, conversation
from dropmatch.evaluation.judge.judgements import Judge, Judgement, Judgements
from dropmatch.evaluation.judge.prompts import FIRST, PAIRWISE, SECOND
from dropmatch.evaluation.statistics import mcnemar, mean_interval, paired

Said = Mapping[str, Mapping[str, Mapping[str, Any]]]  # outputs as the store has them, by cell and example
Found = Mapping[str, Judgement]  # by example


def results(plan: Plan, store: Store, judgements: Judgements, task: str) -> list[dict[str, Any]]:
    """For each judge of a task's texts, what it says of the cells; ready for JSON.

    Of a judge most of whose answers have no verdict, "refused" is an answer of it, and its numbers are left out.
    A cell's entry has those of its "turns" and "categories" too, where there are several turns or some category.
    """
    said = {cell: store.outputs(task, cell) for cell in plan.rules}
    found = []
    for judge in judgements.judges:
        result = _of_judge(judge, judgements, task, said)
        if result["cells"]:
            found.append(result)
    return found


def _of_judge(judge: Judge, judgements: Judgements, task: str, outputs: Said) -> dict[str, Any]:
    said: list[Judgement] = []
    measure: Callable[[Found, Found], dict[str, Any]] = _pairs if judge.kind == PAIRWISE else _scores
    parts = _parts(outputs)

    def look_up(shown: tuple[str, ...]) -> dict[str, Judgement]:
        """Judgements of present texts, by example."""
        found = {}
        for i in outputs[shown[-1]]:
            if all(i in outputs[cell] for cell in shown):
                texts = [text for cell in shown for text in conversation(outputs[cell][i])]
                each = judgements.get(judge, (task, shown, i), texts)
                if each is not None:
                    found[i] = each
        return found

    cells: dict[str, dict[str, Any]] = {}
    for cell in outputs:
        base = baseline(cell)
        alone = base == cell or base not in outputs
        if judge.kind == PAIRWISE:
            if alone:
                continue
            first, second = look_up((base, cell)), look_up((cell, base))
            said += [*first.values(), *second.values()]
        else:
            first, second = look_up((cell,)), {} if alone else look_up((base,))
            said += first.values()
        entry = measure(first, second)
        if entry["judged"]:
            cells[cell] = {"examples": len(outputs[cell]), **entry}
            for name, members in parts.items():
                each = {label: measure(_only(first, ids), _only(second, ids)) for label, ids in members.items()}
                cells[cell][name] = {label: part for label, part in each.items() if part["judged"]}
    asked = [each for each in said if each.answers]
    failed = [each for each in asked if each.verdict is None]
    refused = None
    if 2 * len(failed) > len(asked):
        refused = failed[-1].answers[-1]
        cells = {cell: {"examples": entry["examples"], "judged": entry["judged"]} for cell, entry in cells.items()}
    return {**asdict(judge), "answers": len(asked), "unparsed": len(failed), "refused": refused, "cells": cells}


def _parts(outputs: Said) -> dict[str, dict[str, set[str]]]:
    """The examples of each turn, where there are several, and of each category, as far as they have one."""
    turns, categories = dict[str, set[str]](), dict[str, set[str]]()
    for found in outputs.values():
        for i, output in found.items():
            turns.setdefault(str(len(conversation(output))), set()).add(i)
            if output.get("category"):
                categories.setdefault(output["category"], set()).add(i)
    return {"turns": dict(sorted(turns.items())) if len(turns) > 1 else {}, "categories": categories}


def _only(found: Found, ids: set[str]) -> Found:
    return {i: each for i, each in found.items() if i in ids}


def _scores(own: Found, base: Found) -> dict[str, Any]:
    """Of single answers."""
    mine, theirs = (
        {i: float(each.verdict) for i, each in found.items() if each.verdict is not None} for found in (own, base)
    )
    both = [i for i in mine if i in theirs]
    entry: dict[str, Any] = {"judged": len(own), "unparsed": len(own) - len(mine), "score": None, "against": None}
    if 2 * len(mine) >= len(own) and mine:
        entry["score"] = asdict(mean_interval(list(mine.values())))
        if both:
            entry["against"] = asdict(paired([theirs[i] for i in both], [mine[i] for i in both]))
    return entry


def _pairs(after: Found, before: Found) -> dict[str, Any]:
    """Of comparisons with strict: after it, and before it."""
    both = [i for i in after if i in before]
    decided = [i for i in both if after[i].verdict is not None and before[i].verdict is not None]
    # 1 where the cell's text is preferred, -1 where strict's is
    turns = [(_sign(after[i], SECOND, FIRST), _sign(before[i], FIRST, SECOND)) for i in decided]
    values = [a if a == b else 0 for a, b in turns]
    wins, losses = values.count(1), values.count(-1)
    entry: dict[str, Any] = {
        "judged": len(both),
        "unparsed": len(both) - len(decided),
        "same": sum(not after[i].answers for i in both),
        "compared": sum(bool(after[i].answers) for i in decided),
        "orders_disagree": sum(a != b for a, b in turns),
        "first_preferred": turns.count((-1, 1)),
        "second_preferred": turns.count((1, -1)),
        "wins": wins,
        "ties": len(values) - wins - losses,
        "losses": losses,
        "win_rate": None,
        "p_value": None,
    }
    if 2 * len(decided) >= len(both) and decided:
        entry["win_rate"] = asdict(mean_interval([(1 + value) / 2 for value in values]))
        entry["p_value"] = mcnemar(losses, wins)
    return entry


def _sign(judgement: Judgement, better: str, worse: str) -> int:
    return (judgement.verdict == better) - (judgement.verdict == worse)
