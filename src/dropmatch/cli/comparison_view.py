"""How a comparison looks: texts side by side, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dropmatch.cli.comparison import PLAIN, STRICT, Difference, PromptRecord, Record, Total
from dropmatch.cli.console import has_color, printable
from dropmatch.cli.highlight import colored_text, legend

if TYPE_CHECKING:
    from dropmatch.engines.hf.result import Token

PANEL_WIDTH = 48  # narrower than that, code does not read well
WIDE = 110  # a table with two long tokens in a row fits
PROMPT_CHARACTERS = 400
TOKEN_CHARACTERS, SHORT_TOKEN_CHARACTERS = 16, 10
ROUNDING = 0.5  # of a logit; bfloat16 has steps of 0.125 to 0.25 where logits are 16 to 64


def show_prompt(record: PromptRecord, number: int, count: int, console: Console) -> RenderableType:
    """One prompt: the texts of all methods, and their numbers."""
    prompt = printable(record.prompt)
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = prompt[:PROMPT_CHARACTERS].rstrip() + " …"
    return Group(
        Rule(f"prompt {number} of {count}", style="dim"),
        Text(prompt, style="italic"),
        Text(),
        _panels(record.records, console.width),
        *([legend(speculated(record), counts=False)] if has_color(console) else []),
        Text(),
        _numbers(record, console.width),
        *(Text(line) for line in _roundings(record)),
        Text(),
    )


def speculated(record: PromptRecord) -> list[Token]:
    """All tokens but those of plain decoding, which have no reason to tell apart."""
    return [token for r in record.records if r.method.name != PLAIN for token in r.result.tokens]


def _panels(records: Sequence[Record], width: int) -> RenderableType:
    """Side by side as far as they fit, in even rows."""
    columns = max(1, min(len(records), width // PANEL_WIDTH))
    rows = -(-len(records) // columns)
    columns = -(-len(records) // rows)
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    panels = [_panel(record) for record in records]
    for start in range(0, len(panels), columns):
        grid.add_row(*panels[start : start + columns])
    return grid


def _panel(record: Record) -> Panel:
    text = colored_text(record.result.tokens, plain=record.method.name == PLAIN)
    text.rstrip()
    title = f"{record.method.name}, {record.tokens_per_second:.1f} tokens/s"
    return Panel(text, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _table(*headings: tuple[str, bool]) -> Table:
    """Headings and whether the column holds numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, numeric in headings:
        lowered = heading if "\n" in heading else f"\n{heading}"  # all stand on the line
        table.add_column(lowered, justify="right" if numeric else "left", no_wrap=numeric)
    return table


def _numbers(record: PromptRecord, width: int) -> Table:
    plain, strict = record.of(PLAIN), record.of(STRICT)
    table = _table(
        ("method", False),
        ("tokens/s", True),
        ("vs\nplain", True),
        *([("vs\nstrict", True)] if strict else []),
        ("accept.\nlength", True),
        ("lossy", True),
        ("first token that\ndiffers from plain", False),
        ("finish", False),
    )
    for r in record.records:
        s = r.result.statistics
        table.add_row(
            r.method.name,
            f"{r.tokens_per_second:.1f}",
            _ratio(r.tokens_per_second, plain.tokens_per_second if plain else 0.0),
            *([_ratio(r.tokens_per_second, strict.tokens_per_second)] if strict else []),
            f"{s.acceptance_length:.2f}",
            f"{100 * s.lossy_share:.1f} %",
            "" if r is plain else _difference(r.difference, wide=width >= WIDE),
            r.result.finish_reason,
        )
    return table


def show_totals(totals: Sequence[Total], prompts: int) -> Table:
    """All methods over all prompts."""
    speeds = {total.method.name: total.tokens_per_second for total in totals}
    table = _table(
        ("method", False),
        ("tokens", True),
        ("seconds", True),
        ("tokens/s", True),
        ("vs\nplain", True),
        *([("vs\nstrict", True)] if STRICT in speeds else []),
        ("accept.\nlength", True),
        ("lossy", True),
        ("same text\nas plain", True),
    )
    for t in totals:
        table.add_row(
            t.method.name,
            str(t.tokens),
            f"{t.seconds:.1f}",
            f"{t.tokens_per_second:.1f}",
            _ratio(t.tokens_per_second, speeds[PLAIN]),
            *([_ratio(t.tokens_per_second, speeds[STRICT])] if STRICT in speeds else []),
            f"{t.acceptance_length:.2f}",
            f"{100 * t.lossy_share:.1f} %",
            "" if t.method.name == PLAIN else f"{t.same_text} of {prompts}",
        )
    return table


def caveats(totals: Sequence[Total], repeats: int, machine: str) -> list[str]:
    """What the numbers do not say."""
    lossy = [total.method.name for total in totals if not total.method.lossless]
    lines = [
        "Acceptance length: tokens per round of the target. Lossy: share of the tokens that lossless decoding "
        "would have refused. Behind a token that differs: its probability under the target.",
    ]
    if lossy:
        verb = "is a lossy rule: it" if len(lossy) == 1 else "are lossy rules: they"
        lines.append(
            f"{' and '.join(lossy)} {verb} may change the text, and nothing here says whether for better or "
            "worse. Read the texts, or measure the quality on a task."
        )
    times = "one run each" if repeats == 1 else f"medians of {repeats} runs"
    more = " Use --repeats 3 or more before trusting a small difference." if repeats < 3 else ""
    lines.append(
        f"Tokens/s are of this machine ({machine}) with whatever else ran on it meanwhile: {times}, prefill "
        f"included.{more}"
    )
    return lines


def suspicions(prompts: Sequence[PromptRecord], totals: Sequence[Total]) -> list[str]:
    """What looks wrong: a lossy rule that accepts less than strict does, a lossless one that changes the text."""
    strict = next((total for total in totals if total.method.name == STRICT), None)
    lines = [
        f"{total.method.name} accepts fewer draft tokens per round than strict ({total.acceptance_length:.2f} and "
        f"{strict.acceptance_length:.2f} tokens per round): by chance, if the texts differ; else a defect"
        for total in totals
        if strict and not total.method.lossless and total.acceptance_length < strict.acceptance_length
    ]
    for i, prompt in enumerate(prompts, start=1):
        for record in prompt.records:
            if record.method.lossless and record.difference and not _is_rounding(record.difference):
                lines.append(f"{record.method.name} changed the text of prompt {i}, by more than rounding: a defect")
    return lines


def _roundings(record: PromptRecord) -> list[str]:
    """Why a lossless method's text is not that of plain decoding."""
    lines = []
    for r in record.records:
        d = r.difference
        if r.method.lossless and d and _is_rounding(d):
            lines.append(
                f"{r.method.name} differs from plain by rounding, which depends on how many tokens the target reads "
                f"at once: it gives the two tokens {d.plain_probability:.3f} and {d.other_probability:.3f} there."
            )
    return lines


def _is_rounding(difference: Difference) -> bool:
    """Whether the target finds both tokens about equally likely."""
    ours, theirs = difference.plain_probability, difference.other_probability
    if not ours or not theirs:
        return False
    return abs(log(ours / theirs)) <= ROUNDING


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else ""


def _difference(difference: Difference | None, wide: bool) -> str:
    """Which token, both texts, and what the target gives them."""
    if difference is None:
        return "none"
    d, size = difference, TOKEN_CHARACTERS if wide else SHORT_TOKEN_CHARACTERS
    plain, other = _quoted(d.plain, d.plain_probability, size), _quoted(d.other, d.other_probability, size)
    gap = " " if wide else "\n"
    return f"{d.index + 1}: {plain}{gap}→ {other}"


def _quoted(text: str | None, probability: float | None, size: int) -> str:
    if text is None or probability is None:
        return "(end)"
    return f"{text if len(text) <= size else text[: size - 1] + '…'!r} {probability:.2f}"
