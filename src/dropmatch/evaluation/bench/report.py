"""The reports of a benchmark: JSON, Markdown, figures, and one HTML file that opens without a network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group as Lines

from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.plots import Drawn, figures, prepare
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.bench.tables import Sheet, sheets
from dropmatch.evaluation.bench.terminal import for_terminal

HOW_TO_READ = (
    "Speed is the median over groups of examples of a cell's tokens per second over strict's in the same group, with "
    "a 95 % bootstrap interval over groups. Scores and acceptance lengths have 95 % intervals over examples: Wilson's "
    "for shares of right answers, else bootstrap; lost and gained are examples against strict, p is McNemar's exact "
    "test. The fastest cell is looked for among those that neither a test nor a paired interval puts below strict. "
    "Few examples prove little: an interval that holds 0 is no proof of no loss."
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace }
thead th { border-bottom: 2px solid #888; vertical-align: bottom }
figure { display: inline-block; margin: 1rem 1rem 1rem 0; max-width: 100% }
figure svg { max-width: 100%; height: auto }
figcaption, .note { color: #555; font-size: 90% }
"""


def write_report(
    plan: Plan,
    store: Store,
    metrics: dict[str, str | None],
    *,
    against: str | None = None,
    plots: Path | None = None,
) -> Lines:
    """Write all reports into the benchmark's folder.

    Args:
        plan: what was run.
        store: its records.
        metrics: of each task, by its name, what its score is called.
        against: the cell that is compared with each other; None is DropMatch's first.
        plots: a folder that the figures are written to as well; it is made if it is not there.

    Returns:
        The tables for a terminal.

    Raises:
        SettingError: the benchmark has no such cell, or there can be no figures in the folder for them.
    """
    summary = summarise(plan, store, metrics, against)
    summary["machines"] = store.machines()
    tables, drawn = sheets(summary), figures(summary)
    about = _about(plan, summary["machines"])
    _write(store.folder / "report.json", json.dumps(summary, ensure_ascii=False, indent=1) + "\n")
    if plots is not None:
        prepare(plots)
    for folder in (store.folder, *([] if plots is None else [plots])):
        for each in drawn:
            _write(folder / each.file, each.svg)
    _write(store.folder / "report.md", _markdown(tables, about, drawn))
    _write(store.folder / "report.html", _html(tables, about, drawn))
    return for_terminal(tables)


def _about(plan: Plan, machines: dict[str, dict[str, Any]]) -> str:
    texts = (
        ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("system", "device"))
        for machine in machines.values()
    )
    where = "; then ".join(dict.fromkeys(texts))  # a folder may have been continued elsewhere
    batch = f", batch {plan.batch}" if plan.engine == "vllm" else ""
    budget = f"at most {plan.max_tokens} tokens" if plan.max_tokens else "each task's own limit of tokens"
    models = f"Target {plan.target}, draft {plan.draft or 'its own'}"
    return f"{models}, greedy, {budget}{batch}; {where}."


def _markdown(tables: list[Sheet], about: str, drawn: Sequence[Drawn]) -> str:
    parts = [about, HOW_TO_READ]
    for table in tables:
        rows = [table.headings, ("---", *("---:",) * (len(table.headings) - 1)), *table.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        parts += [f"## {table.title}", body, *table.notes]
    parts += [f"![{each.title}]({each.file})" for each in drawn]
    return "\n\n".join(parts) + "\n"


def _html(tables: list[Sheet], about: str, drawn: Sequence[Drawn]) -> str:
    parts = [f"<p>{html.escape(about)}</p>", f'<p class="note">{html.escape(HOW_TO_READ)}</p>']
    for table in tables:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in table.headings)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>\n" for row in table.rows
        )
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        parts.append(f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>")
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in table.notes]
    if not drawn:
        parts.append("<p class=\"note\">Figures need matplotlib: pip install 'dropmatch[eval]'.</p>")
    parts += [
        f"<figure>{_apart(each.svg, number)}<figcaption>{html.escape(each.title)}</figcaption></figure>"
        for number, each in enumerate(drawn)
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>dropmatch bench</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>dropmatch bench</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _apart(svg: str, number: int) -> str:
    """The ids in a figure, different from those of the others on the page."""
    return re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>f{number}-", svg)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
