"""A summary as rows of texts: the same for Markdown, HTML and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dropmatch.evaluation.bench.plan import baseline, without_seed
from dropmatch.evaluation.judge.prompts import PAIRWISE

FEW_PAIRS = 3  # of groups: a bootstrap of fewer says less than their number


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: what it is about.
        headings: of its columns.
        rows: of texts.
        notes: sentences below it.
    """

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def sheets(summary: dict[str, Any]) -> list[Sheet]:
    """The tables of a summary: for each task its cells, its seeds where there are several, one cell against each other,
    and what judges say."""
    found = []
    for name, task in summary["tasks"].items():
        found.append(_cells(name, task))
        if task["seeds"]:
            found.append(_seeds(name, task))
        if task["against"]:
            found.append(_against(name, task))
        found += [sheet for judge in task["judges"] for sheet in judge_sheets(name, judge, task["labels"])]
    return found


def judge_sheets(name: str, judge: dict[str, Any], labels: Mapping[str, str] | None = None) -> list[Sheet]:
    """What one judge says of a task's cells, and of their turns and categories where there are some.

    `labels` are what the cells are called, where it is not their text.
    """
    parts = _judge_parts(name, judge, labels or {})
    return [_judge_sheet(name, judge, labels or {}), *([parts] if parts else [])]


def _judge_sheet(name: str, judge: dict[str, Any], labels: Mapping[str, str]) -> Sheet:
    pairwise = judge["kind"] == PAIRWISE
    compared = ("wins %", "won / tied / lost", "p", "same text", "orders disagree")
    quality = compared if pairwise else ("score of 10", "against strict", "lower / higher", "p")
    rows: list[tuple[str, ...]] = []
    if judge["refused"] is None:
        for cell, entry in judge["cells"].items():
            values = _pairs(entry) if pairwise else _graded(entry)
            judged = str(entry["judged"] - entry["unparsed"])
            rows.append((labels.get(cell, cell), judged, *values, str(entry["unparsed"])))
    title = f"{name}: judged by {judge['model']}, {judge['kind']} (wording {judge['version']})"
    return Sheet(title, ("cell", "n", *quality, "no verdict"), rows, _judge_notes(judge))


def _judge_parts(name: str, judge: dict[str, Any], labels: Mapping[str, str]) -> Sheet | None:
    """Means by turn and by category; None where there is neither."""
    cells = judge["cells"] if judge["refused"] is None else {}
    places = [
        place
        for kind, heading in (("turns", "turn {}"), ("categories", "{}"))
        for label in dict.fromkeys(label for entry in cells.values() for label in entry[kind])
        for place in [(kind, label, heading.format(label))]
    ]
    if not places:
        return None
    rows = [
        (labels.get(cell, cell), _mean(entry), *(_mean(entry[kind].get(label)) for kind, label, _ in places))
        for cell, entry in cells.items()
    ]
    what = "wins %, ties as half" if judge["kind"] == PAIRWISE else "mean scores"
    title = f"{name}: {judge['model']}, {judge['kind']}, by turn and category"
    note = f"Of the same verdicts, {what}; their numbers and intervals are in the JSON."
    return Sheet(title, ("cell", "all", *(heading for *_, heading in places)), rows, [note])


def _mean(entry: dict[str, Any] | None) -> str:
    """What a judge says of a part, without its interval."""
    found = None if entry is None else entry.get("win_rate", entry.get("score"))
    if entry is None or found is None:
        return ""
    return f"{100 * found['value']:.1f}" if "win_rate" in entry else f"{found['value']:.2f}"


def _cells(name: str, task: dict[str, Any]) -> Sheet:
    metric = task["metric"]
    scored = (f"{metric} %", "against strict", "lost / gained", "p")
    quality = scored if metric else ("log-likelihood", "against strict")
    lengths = {baseline(cell) for cell in task["cells"]} > {task["first"]}
    speeds: tuple[str, ...] = ("speed over strict",)
    if lengths:
        speeds = ("speed over strict of its L", f"speed over {task['first']}")
    headings = ("cell", "n", *speeds, "acceptance length", "lossy %", *quality, "cut", "looping")
    judges = [judge for judge in task["judges"] if judge["refused"] is None]
    headings += tuple(_judge_heading(judge, judges) for judge in judges)
    rows: list[tuple[str, ...]] = []
    for cell, entry in task["cells"].items():
        row = [
            f"{task['labels'][cell]} *" if entry["flags"] else task["labels"][cell],
            str(entry["examples"]),
            "1" if cell == baseline(cell) else _ratio(entry.get("over_strict")),
            *(["1" if cell == task["first"] else _ratio(entry["over_first"])] if lengths else []),
            _optional(entry["acceptance_length_interval"], 2),
            f"{entry['lossy_pct']:.1f}",
        ]
        row += _score(entry) if metric else _likelihood(entry)
        row += [str(entry["truncated"]), str(entry["looping"])]
        rows.append((*row, *(_judged(judge["cells"].get(cell)) for judge in judges)))
    return Sheet(name, headings, rows, _notes(task))


def _score(entry: dict[str, Any]) -> list[str]:
    found = entry.get("against_strict")
    own = _interval(entry["score"], 1, 100) if entry["score"] else ""
    if found is None:
        return [own, "", "", ""]
    return [own, _interval(found["difference"], 1, 100, sign=True), *_counts(found)]


def _counts(found: dict[str, Any]) -> list[str]:
    """What was lost and gained, and the p-value of that."""
    return [f"{found['lost']} / {found['gained']}", f"{found['p_value']:.2g}"]


def _against(name: str, task: dict[str, Any]) -> Sheet:
    """The reference cell beside each other one."""
    metric, mine = task["metric"], task["labels"][task["against"]["reference"]]
    quality = (f"{metric} points", "lost / gained", "p") if metric else ("log-likelihood",)
    rows: list[tuple[str, ...]] = []
    for cell, entry in task["against"]["cells"].items():
        score, likelihood, length = entry["score"], entry["log_likelihood"], entry["acceptance_length"]
        values = ["", "", ""] if metric else [""]
        if metric and score:
            values = [_interval(score["difference"], 1, 100, sign=True), *_counts(score)]
        elif likelihood and not metric:
            values = [_interval(likelihood["difference"], 3, sign=True)]
        rows.append(
            (
                task["labels"][cell],
                str(entry["examples"]),
                _ratio(entry["speed"]),
                _interval(length, 2, sign=True) if length else "",
                *values,
            )
        )
    headings = ("against", "n", "speed over it", "acceptance length", *quality)
    notes = [
        f"Each row is {mine} less the cell of the row, on the same examples: above 0 it accepts more or is better, and "
        "a speed above 1 is faster."
    ]
    if metric:
        notes.append(
            "Lost and gained are its examples. Of many rows some p are small by chance: none is corrected for that."
        )
    return Sheet(f"{name}: {mine} against each other lossy cell of its draft length", headings, rows, notes)


def _likelihood(entry: dict[str, Any]) -> list[str]:
    found = entry.get("log_likelihood_against_strict")
    own = _interval(entry["log_likelihood"], 3) if entry["log_likelihood"] else ""
    return [own, _interval(found["difference"], 3, sign=True) if found else ""]


def _judge_heading(judge: dict[str, Any], judges: list[dict[str, Any]]) -> str:
    """Of a judge's column: the wording is named where there are several."""
    alike = [each for each in judges if (each["model"], each["kind"]) == (judge["model"], judge["kind"])]
    model = judge["model"].rstrip("/").rpartition("/")[2]
    wording = f" ({judge['version']})" if len(alike) > 1 else ""
    return f"{model}{wording}: {'wins %' if judge['kind'] == PAIRWISE else 'score of 10'}"


def _judged(entry: dict[str, Any] | None) -> str:
    """What a judge says of a cell, in short."""
    if entry is None:
        return ""
    return _optional(entry["win_rate"], 1, 100) if "win_rate" in entry else _optional(entry["score"], 2)


def _pairs(entry: dict[str, Any]) -> list[str]:
    shares = "{wins} / {ties} / {losses}".format(**entry)
    p_value = "" if entry["p_value"] is None else f"{entry['p_value']:.2g}"
    disagree = f"{entry['orders_disagree']} of {entry['compared']}"
    return [_optional(entry["win_rate"], 1, 100), shares, p_value, str(entry["same"]), disagree]


def _graded(entry: dict[str, Any]) -> list[str]:
    found = entry["against"]
    own = _optional(entry["score"], 2)
    if found is None:
        return [own, "", "", ""]
    return [own, _interval(found["difference"], 2, sign=True), *_counts(found)]


def _judge_notes(judge: dict[str, Any]) -> list[str]:
    """How to read a judge's table, and what is amiss."""
    if judge["refused"] is not None:
        return [
            f"Worthless: {judge['unparsed']} of {judge['answers']} answers of {judge['model']} have no verdict.",
        ]
    cells = judge["cells"]
    notes = [
        f"{cell}: judged on {entry['judged']} of {entry['examples']} examples so far."
        for cell, entry in cells.items()
        if entry["judged"] < entry["examples"]
    ]
    notes += [
        f"{cell}: most of its examples have no verdict, so that it has no result."
        for cell, entry in cells.items()
        if 2 * entry["unparsed"] > entry["judged"]
    ]
    if judge["kind"] != PAIRWISE:
        return [*notes, "Scores from 1 to 10, with 95 % bootstrap intervals over examples; p is a sign test."]
    compared, disagree, first, second = (
        sum(entry[name] for entry in cells.values())
        for name in ("compared", "orders_disagree", "first_preferred", "second_preferred")
    )
    if compared:
        notes.append(
            f"Position bias: orders disagree on {disagree} of {compared} pairs ({100 * disagree / compared:.0f} %); "
            f"the first text was preferred in both orders on {first}, the second on {second}."
        )
    return [
        *notes,
        "Each text against strict's in both orders; a win needs both, and the same text is a tie. Wins are with half "
        "the ties, with a 95 % bootstrap interval over examples; p is a sign test of won against lost.",
    ]


def _notes(task: dict[str, Any]) -> list[str]:
    cells, names = task["cells"], task["labels"]
    notes = [f"* {names[cell]}: {'; '.join(entry['flags'])}" for cell, entry in cells.items() if entry["flags"]]
    notes += [f"{names.get(cell, cell)} crashed: {text}" for cell, text in task["failures"].items()]
    waiting = [f"{e['unscored']} of {e['examples']} of {names[cell]}" for cell, e in cells.items() if e["unscored"]]
    if waiting:
        notes.append(
            f"Texts without a {'score' if task['metric'] else 'likelihood'} yet: {', '.join(waiting)}. The benchmark's "
            "command, given again, does the rest."
        )
    notes += _choice(task)
    if task["barred"]:
        reasons = "; ".join(f"{names[cell]}: {' and '.join(why)}" for cell, why in task["barred"].items())
        notes.append(f"Never named the fastest: {reasons}.")
    apart = [names[cell] for cell, entry in cells.items() if "same_text" in entry and not entry["over_strict"]]
    if apart:
        notes.append(
            f"No speed for {', '.join(apart)}: decoded at another time than strict, so that the machine may have been "
            "another. With a new --out both run by turns."
        )
    if task["lengths_apart"]:
        notes.append(
            "The cells of another draft length ran in a process of their own, at another time: speeds over "
            f"{task['first']} hold what the machine did meanwhile."
        )
    return notes


def _choice(task: dict[str, Any]) -> list[str]:
    """The cell to take, with what is known of it: of few examples that is little."""
    cells, names, best = task["cells"], task["labels"], task["best"]
    lossy = any(cell != baseline(cell) for cell in cells)
    if best is None and lossy and not task["has_speeds"]:
        return ["No lossy cell has a speed that can be compared with strict's, so none is named the fastest."]
    if best is None:
        return ["No lossy cell is both faster than strict and free of what bars it."] if lossy else []
    notes = [f"Fastest of the lossy cells that are not flagged and not measurably worse than strict: {names[best]}."]
    for cell, entry in cells.items():
        if without_seed(cell) != best:
            continue
        known = [f"{_ratio(entry['over_first'])} times the speed of {task['first']}"]
        score, likelihood = entry.get("against_strict"), entry.get("log_likelihood_against_strict")
        if score:
            difference = _interval(score["difference"], 1, 100, sign=True)
            known.append(f"{difference} points against strict, p = {score['p_value']:.2g}, n = {score['n']}")
        if likelihood:
            difference = _interval(likelihood["difference"], 3, sign=True)
            known.append(f"log-likelihood {difference} against strict, n = {likelihood['n']}")
        if not score and not likelihood:
            known.append("its quality is not known")
        notes.append(f"{names[cell]}: {'; '.join(known)}.")
    return notes


def _seeds(name: str, task: dict[str, Any]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for rule, entry in task["seeds"].items():
        score = _spread(entry["score"], 1, 100) if entry["score"] else ""
        speed = _spread(entry["over_strict"], 2) if entry["over_strict"] else ""
        length = _spread(entry["acceptance_length"], 2) if entry["acceptance_length"] else ""
        rows.append((task["labels"][rule], str(entry["seeds"]), speed, length, score))
    headings = ("rule", "seeds", "speed over strict", "acceptance length", f"{task['metric'] or 'score'} %")
    return Sheet(f"{name}: over mask seeds", headings, rows, ["Mean over seeds, and the least and the greatest."])


def _interval(value: dict[str, float], digits: int, scale: float = 1.0, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    middle, low, high = (f"{scale * value[end]:{plus}.{digits}f}" for end in ("value", "low", "high"))
    return f"{middle} [{low}, {high}]"


def _optional(value: dict[str, float] | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else _interval(value, digits, scale)


def _ratio(value: dict[str, float] | None) -> str:
    """Of speeds, on groups of examples; of few there is no interval worth the name."""
    if value is None:
        return ""
    if value["pairs"] < FEW_PAIRS:
        return f"{value['value']:.2f} ({value['pairs']:.0f} group{'s' if value['pairs'] > 1 else ''})"
    return _interval(value, 2)


def _spread(value: dict[str, float], digits: int, scale: float = 1.0) -> str:
    return _interval(value, digits, scale)
