"""Figures of a summary, as SVG texts."""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.acceptance.evidence import LOSSLESS_REASONS
from dropmatch.errors import SettingError


@dataclass(frozen=True)
class Drawn:
    """A figure.

    Attributes:
        title: what it shows, and of which task.
        file: a name for it, which stays the same from report to report.
        svg: it.
    """

    title: str
    file: str
    svg: str


def prepare(folder: Path) -> None:
    """Make a folder for figures.

    Raises:
        SettingError: it cannot be made, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingError("figures need matplotlib: pip install 'dropmatch[eval]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write figures into {folder}: {error.strerror}") from error


def figures(summary: dict[str, Any]) -> list[Drawn]:
    """Figures of all tasks of a summary; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    found: list[Drawn] = []
    stems: set[str] = set()
    with matplotlib.rc_context({"svg.hashsalt": "dropmatch"}):  # the same summary gives the same files
        for name, task in summary["tasks"].items():
            stem = _stem(name, stems)
            stems.add(stem)
            for title, short, draw in (
                ("Speed and quality", "speed-and-quality", _speed_and_quality),
                ("Acceptance length by draft length", "acceptance-length", _by_draft_length),
                ("Rounds that accept a draft token and all before it", "by-position", _by_position),
                ("Accepted draft tokens by reason", "by-reason", _by_reason),
            ):
                svg = draw(task)
                if svg is not None:
                    file = f"{stem}-{short}.svg" if stem else f"{short}.svg"
                    found.append(Drawn(f"{name}: {title}", file, svg))
    return found


def _stem(task: str, taken: set[str]) -> str:
    """How a task's files begin; tasks of the same letters and digits of a to z and 0 to 9 are numbered."""
    slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
    names = itertools.chain([slug], (f"{slug}-{number}".strip("-") for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _speed_and_quality(task: dict[str, Any]) -> str | None:
    key = "score" if task["metric"] else "log_likelihood"
    scale = 100 if task["metric"] else 1
    cells = {name: cell for name, cell in task["cells"].items() if cell[key] and cell["over_first"]}
    if not cells:
        return None
    figure, axes = _axes()
    for number, (name, cell) in enumerate(cells.items()):
        speed = cell["over_first"]
        quality = {end: scale * cell[key][end] for end in ("value", "low", "high")}
        axes.errorbar(
            speed["value"],
            quality["value"],
            xerr=_ends(speed),
            yerr=_ends(quality),
            fmt="os^Dv<>P"[number % 8],
            label=f"{task['labels'][name]}, flagged" if cell["flags"] else task["labels"][name],
            markerfacecolor="none" if cell["flags"] else None,
            capsize=2,
            linewidth=0.8,
        )
    axes.set_xlabel(f"tokens per second over {task['first']}")
    axes.set_ylabel(f"{task['metric']} %" if task["metric"] else "mean log-likelihood a token under the target")
    _legend(figure)
    return _svg(figure)


def _by_draft_length(task: dict[str, Any]) -> str | None:
    from dropmatch.config import DraftConfig
    from dropmatch.rule_text import parse_rule, rule_text

    found: dict[str, dict[int, dict[str, float]]] = {}
    for cell, entry in task["cells"].items():
        length = entry["rule"].get("draft_length", DraftConfig.draft_length)
        if entry["acceptance_length_interval"]:
            name = rule_text({**parse_rule(task["labels"][cell]), "draft_length": None})
            found.setdefault(name, {})[length] = entry["acceptance_length_interval"]
    lines = {name: sorted(points.items()) for name, points in found.items() if len(points) > 1}
    if not lines:
        return None
    figure, axes = _axes()
    for name, points in lines.items():
        lengths, values = zip(*points, strict=True)
        ends = [[end for (end,) in side] for side in zip(*map(_ends, values), strict=True)]
        axes.errorbar(lengths, [each["value"] for each in values], yerr=ends, marker="o", capsize=2, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft length L")
    axes.set_ylabel("acceptance length")
    _legend(figure)
    return _svg(figure)


def _by_position(task: dict[str, Any]) -> str | None:
    cells = {
        task["labels"][name]: cell["accepted_by_position"]
        for name, cell in task["cells"].items()
        if cell["accepted_by_position"]
    }
    if not cells:
        return None
    figure, axes = _axes()
    for name, shares in cells.items():
        axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], marker=".", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("% of rounds")
    axes.set_ylim(0, 100)
    _legend(figure)
    return _svg(figure)


def _by_reason(task: dict[str, Any]) -> str | None:
    cells = {task["labels"][name]: cell for name, cell in task["cells"].items() if cell["accepted_by_reason"]}
    if not cells:
        return None
    figure, axes = _axes(height=0.3 * len(cells) + 1.2)
    found = {reason for cell in cells.values() for reason in cell["accepted_by_reason"]}
    reasons = sorted(found, key=lambda reason: (reason not in LOSSLESS_REASONS, reason))
    left = [0.0] * len(cells)
    for reason in reasons:
        widths = []
        for cell in cells.values():
            widths.append(100 * cell["accepted_by_reason"].get(reason, 0) / sum(cell["accepted_by_reason"].values()))
        axes.barh(list(cells), widths, left=left, label=reason)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("% of accepted draft tokens")
    axes.invert_yaxis()
    _legend(figure)
    return _svg(figure)


def _axes(height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    return figure, axes


def _legend(figure: Any) -> None:
    """Beside the axes: there may be many cells."""
    figure.legend(fontsize=7, loc="outside right upper")


def _ends(value: dict[str, float]) -> list[list[float]]:
    """How far an interval reaches to either side, as error bars take it."""
    return [[max(0.0, value["value"] - value["low"])], [max(0.0, value["high"] - value["value"])]]


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
