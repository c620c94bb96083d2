"""Which rule of a task is named the fastest that costs nothing, and what bars the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from dropmatch.evaluation.bench.plan import STRICT, without_seed

SIGNIFICANT = 0.05
Cells = Mapping[str, dict[str, Any]]


def best(cells: Cells, judges: Sequence[dict[str, Any]] = ()) -> str | None:
    """The fastest rule that nothing bars; None if there is none, or it is strict.

    A rule with several mask seeds is as fast as the mean of them, and out if one of them is.

    Args:
        cells: a task's, as the summary has them.
        judges: what judges say of them.
    """
    out = barred(cells, judges)
    rules: dict[str, list[str]] = defaultdict(list)
    for name in cells:
        rules[without_seed(name)].append(name)
    fine = {
        rule: mean(cells[name]["over_first"]["value"] for name in members)
        for rule, members in rules.items()
        if all(_was_compared(cells[name]) and name not in out for name in members)
    }
    fastest = max(fine, key=lambda rule: fine[rule]) if fine else None
    return None if fastest is None or _is_strict(cells[rules[fastest][0]]) else fastest


def barred(cells: Cells, judges: Sequence[dict[str, Any]] = ()) -> dict[str, list[str]]:
    """What speaks against a lossy cell, by cell; a cell that nothing speaks against is left out.

    A cell is out if its texts are flagged, not scored yet, or measurably worse than strict's by score, likelihood or
    a judge: either by the test, or by the interval, whichever says so. A bootstrap of few differences is too sure, and
    a test of few is blind; neither doubt is one to name a cell the best on.
    """
    found: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if _is_strict(cell):
            continue
        reasons = ["its texts are flagged"] if cell["flags"] else []
        if cell.get("unscored"):
            reasons.append("not all its texts are scored yet")
        for key, what in (("against_strict", "score"), ("log_likelihood_against_strict", "likelihood")):
            if _is_below(cell.get(key), by_test=key == "against_strict"):
                reasons.append(f"its {what} is below strict's")
        reasons += [
            f"{judge['model']} judges it worse"
            for judge in judges
            if judge["refused"] is None and _is_judged_worse(judge["cells"].get(name))
        ]
        if reasons:
            found[name] = reasons
    return found


def has_speeds(cells: Cells) -> bool:
    """Whether any lossy cell has a speed that can be compared with strict's."""
    return any(_was_compared(cell) for cell in cells.values() if not _is_strict(cell))


def _is_strict(cell: dict[str, Any]) -> bool:
    return cell["rule"]["rule"] == STRICT


def _was_compared(cell: dict[str, Any]) -> bool:
    """Whether a cell has a speed, and was compared with its strict one."""
    return bool(cell.get("over_first")) and (_is_strict(cell) or cell.get("over_strict") is not None)


def _is_below(found: dict[str, Any] | None, by_test: bool = True) -> bool:
    """Whether paired scores are measurably below those that they are compared with.

    Args:
        found: as `Paired` has them; None where there are none.
        by_test: also by the test, which asks how often it is below and not by how much.
    """
    if found is None:
        return False
    difference = found["difference"]
    return difference["high"] < 0 or (by_test and difference["value"] < 0 and found["p_value"] < SIGNIFICANT)


def _is_judged_worse(entry: dict[str, Any] | None) -> bool:
    """What a judge says of a cell, in pairs with strict's texts or of each alone."""
    if entry is None:
        return False
    if "win_rate" in entry:
        if entry["win_rate"] is None:
            return False
        lost_more = entry["losses"] > entry["wins"] and entry["p_value"] < SIGNIFICANT
        return lost_more or entry["win_rate"]["high"] < 0.5
    return _is_below(entry.get("against"))
