"""Figures of a summary, as SVG texts."""

from __future__ import annotations

import io
from typing import Any

from dropmatch.acceptance.evidence import LOSSLESS_REASONS


def figures(name: str, task: dict[str, Any]) -> dict[str, str]:
    """Figures of one task, by title; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("svg")
    found = {
        "Speed and quality": _speed_and_quality(task),
        "Acceptance length by draft length": _by_draft_length(task),
        "Rounds that accept a draft token and all before it": _by_position(task),
        "Accepted draft tokens by reason": _by_reason(task),
    }
    return {f"{name}: {title}": svg for title, svg in found.items() if svg is not None}


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
            label=f"{name}, flagged" if cell["flags"] else name,
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
    from dropmatch.rule_text import rule_text

    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in task["cells"].values():
        length = cell["rule"].get("draft_length", DraftConfig.draft_length)
        if cell["acceptance_length"]:
            name = rule_text({**cell["rule"], "draft_length": None})
            lines.setdefault(name, []).append((length, cell["acceptance_length"]))
    lines = {name: sorted(points) for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    figure, axes = _axes()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft length L")
    axes.set_ylabel("acceptance length")
    _legend(figure)
    return _svg(figure)


def _by_position(task: dict[str, Any]) -> str | None:
    cells = {name: cell["accepted_by_position"] for name, cell in task["cells"].items() if cell["accepted_by_position"]}
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
    cells = {name: cell for name, cell in task["cells"].items() if cell["accepted_by_reason"]}
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
