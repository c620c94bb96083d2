"""A summary as rows of texts: the same for Markdown, HTML and the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """The tables of a summary: for each task its cells, and its seeds where there are several."""
    found = []
    for name, task in summary["tasks"].items():
        found.append(_cells(name, task))
        if task["seeds"]:
            found.append(_seeds(name, task))
    return found


def _cells(name: str, task: dict[str, Any]) -> Sheet:
    metric = task["metric"]
    scored = (f"{metric} %", "against strict", "lost / gained", "p")
    quality = scored if metric else ("log-likelihood", "against strict")
    headings = ("cell", "n", "speed over strict", "acceptance length", "lossy %", *quality, "cut", "looping")
    rows: list[tuple[str, ...]] = []
    for cell, entry in task["cells"].items():
        ratio = entry.get("over_strict")
        row = [
            f"{cell} *" if entry["flags"] else cell,
            str(entry["examples"]),
            _interval(ratio, 2) if ratio else "1",
            f"{entry['acceptance_length']:.2f}" if entry["acceptance_length"] else "",
            f"{entry['lossy_pct']:.1f}",
        ]
        row += _score(entry) if metric else _likelihood(entry)
        rows.append((*row, str(entry["truncated"]), str(entry["looping"])))
    return Sheet(name, headings, rows, _notes(task))


def _score(entry: dict[str, Any]) -> list[str]:
    found = entry.get("against_strict")
    own = _interval(entry["score"], 1, 100) if entry["score"] else ""
    if found is None:
        return [own, "", "", ""]
    difference = _interval(found["difference"], 1, 100, sign=True)
    return [own, difference, f"{found['lost']} / {found['gained']}", f"{found['p_value']:.2g}"]


def _likelihood(entry: dict[str, Any]) -> list[str]:
    found = entry.get("log_likelihood_against_strict")
    own = _interval(entry["log_likelihood"], 3) if entry["log_likelihood"] else ""
    return [own, _interval(found["difference"], 3, sign=True) if found else ""]


def _notes(task: dict[str, Any]) -> list[str]:
    notes = [f"* {cell}: {'; '.join(entry['flags'])}" for cell, entry in task["cells"].items() if entry["flags"]]
    notes += [f"{cell} crashed: {text}" for cell, text in task["failures"].items()]
    if task["best"]:
        worse = "and whose score is not measurably below strict's" if task["metric"] else "(quality: see its texts)"
        notes.append(f"Fastest of the cells that are not flagged {worse}: {task['best']}.")
    return notes


def _seeds(name: str, task: dict[str, Any]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for rule, entry in task["seeds"].items():
        score = _spread(entry["score"], 1, 100) if entry["score"] else ""
        speed = _spread(entry["over_strict"], 2) if entry["over_strict"] else ""
        rows.append((rule, str(entry["seeds"]), speed, _spread(entry["acceptance_length"], 2), score))
    headings = ("rule", "seeds", "speed over strict", "acceptance length", f"{task['metric'] or 'score'} %")
    return Sheet(f"{name}: over mask seeds", headings, rows, ["Mean over seeds, and the least and the greatest."])


def _interval(value: dict[str, float], digits: int, scale: float = 1.0, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    middle, low, high = (f"{scale * value[end]:{plus}.{digits}f}" for end in ("value", "low", "high"))
    return f"{middle} [{low}, {high}]"


def _spread(value: dict[str, float], digits: int, scale: float = 1.0) -> str:
    return _interval(value, digits, scale)
