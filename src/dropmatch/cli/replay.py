"""`dropmatch replay`: ask rules about recorded rounds again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from dropmatch.cli import options as o
from dropmatch.cli.console import output_console
from dropmatch.cli.files import check_writable
from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from rich.console import Console

MOST_COMPARED = 10  # a wider table of agreement would not fit; --json has all of it
FILE = Annotated[Path, typer.Argument(metavar="FILE", help="A record of dropmatch record.", show_default=False)]
Rules = Annotated[
    list[str],
    typer.Argument(
        metavar="RULE...",
        show_default=False,
        help="Rules with their settings: js:p=0.2, naive:K=3:p=0.3, js:strictness=0.7, typical:threshold=0.1, ... "
        "See dropmatch rules.",
    ),
]
Examples = Annotated[
    int,
    typer.Option("--examples", metavar="N", help="Show N rows that only one of the rules accepts, least likely first."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", show_default=False, help="Write everything as one JSON object."),
]


def replay(
    file: FILE,
    rules: Rules,
    examples: Examples = 0,
    json_file: JsonFile = None,
    color: o.Color = None,
) -> None:
    """Ask any rules about recorded rounds, in seconds and without a model.

    What they accept of the draft tokens that are not the target's own, how
    likely the target finds those, and where the rules differ. Verdicts are
    those that decoding would give on the same rows. Below a number: its 95 %
    bootstrap interval over drafts.
    """
    from dropmatch.evaluation.lab import Record, compare, settings_of

    if examples < 0:
        raise SettingError(f"examples must be 0 or more, got {examples}")
    check_writable(json_file)
    configs = settings_of(rules)
    record = Record.load(file)
    for config in configs.values():
        record.check(config)
    found = compare(record, configs)
    output = output_console(color)
    about = record.about
    output.print(
        Text(
            f"{found['mismatches']} draft tokens that are not the target's own, of {found['draft_tokens']} in "
            f"{found['rounds']} rounds; target {about.get('target')}, draft {about.get('draft')}"
        )
    )
    output.print(_table(found))
    close = [name for name, rule in found["rules"].items() if rule["approximate"]]
    if close:
        output.print(
            Text(
                f"Verdicts of {', '.join(close)} are close to the live ones only: this record is of an earlier "
                "version, which did not keep what they need of the whole vocabulary. They may accept a little more."
            )
        )
    if 1 < len(configs) <= MOST_COMPARED:
        output.print(_agreement(found))
    if examples:
        _show_examples(output, found, examples)
    if json_file is not None:
        everything = {"record": {k: v for k, v in about.items() if k not in ("texts", "contexts")}, **found}
        json_file.write_text(json.dumps(everything, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _table(found: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("rule", overflow="fold")
    for heading in (
        "accept.\nlength",
        "accepts of\nits rows",
        "their mean\nprobab.",
        "below\n0.05",
        "as exact\nmatch",
        "it\nalone",
    ):
        table.add_column(heading, justify="right")
    table.add_row("exact match", f"{found['exact_acceptance_length']:.2f}", "0 %", "", "", "100.0 %", "")
    for name, rule in found["rules"].items():
        table.add_row(
            name,
            _with_interval(rule, "acceptance_length", 2),
            _with_interval(rule, "accepted_pct", 1, " %"),
            _with_interval(rule, "mean_probability", 3),
            _with_interval(rule, "unlikely_pct", 1, " %"),
            f"{rule['exact_agreement_pct']:.1f} %",
            str(rule["alone"]) if len(found["rules"]) > 1 else "",
        )
    return table


def _with_interval(rule: dict[str, Any], name: str, digits: int, unit: str = "") -> str:
    """A number over its interval; nothing of none."""
    if rule[name] is None:
        return ""
    low, high = (f"{end:.{digits}f}" for end in rule["intervals"][name])
    return f"{rule[name]:.{digits}f}{unit}\n{low}-{high}"


def _agreement(found: dict[str, Any]) -> Table:
    """On how many rows two rules say the same."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("agree on, %")
    for number in range(1, len(found["rules"]) + 1):
        table.add_column(str(number), justify="right")
    for number, (name, rule) in enumerate(found["rules"].items(), start=1):
        table.add_row(f"{number} {name}", *(f"{share:.0f}" for share in rule["agreement_pct"].values()))
    return table


def _show_examples(output: Console, found: dict[str, Any], count: int) -> None:
    for name, rows in found["alone"].items():
        output.print(Text(f"\nonly {name} accepts:", style="bold"))
        for row in rows[:count]:
            line = Text(f"  …{_visible(row['context'][-50:])}", style="dim")
            line.append(f" {_visible(row['draft'])}", style="yellow")
            line.append(f" ({row['draft_probability']:.3f})", style="dim")
            line.append(f" for {_visible(row['clean'])}", style="green")
            line.append(f" ({row['clean_probability']:.3f})", style="dim")
            output.print(line)
        if not rows:
            output.print(Text("  nothing", style="dim"))


def _visible(text: str) -> str:
    """Line breaks and the like as one sees them in source code."""
    return text if text.isprintable() else repr(text)[1:-1]
