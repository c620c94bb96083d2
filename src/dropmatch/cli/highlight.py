"""Tokens coloured by why they were committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.style import Style
from rich.table import Table
from rich.text import Text

from dropmatch.cli.console import paint, printable

if TYPE_CHECKING:
    from dropmatch.engines.hf.result import Token

# in the order of the legend; a rule of another package gets the colour of `other`
COLORS = {
    "exact": "green",
    "sampled": "green",
    "js": "yellow",
    "majority": "magenta",
    "naive": "cyan",
    "other": "yellow",
    "correction": "red",
    "bonus": "blue",
}
MEANINGS = {
    "exact": "draft token that the target chooses too",
    "sampled": "draft token that lossless sampling accepts",
    "js": "accepted by the heads' spread",
    "majority": "accepted as the heads' majority",
    "naive": "accepted as one head's token",
    "correction": "the target's token where a draft token was rejected",
    "bonus": "the target's token after a whole draft",
}


def style_of(reason: str, lossy: bool) -> Style:
    """Colour of a reason; lossy tokens are bold and underlined, so that they show without colours too."""
    return Style(color=COLORS.get(reason, COLORS["other"]), bold=lossy or None, underline=lossy or None)


def painted(token: Token) -> str:
    """A token's text with escape codes around it."""
    return paint(printable(token.text), style_of(token.reason, token.lossy))


def colored_text(tokens: Iterable[Token], plain: bool) -> Text:
    """A whole text; without colours if it was decoded plainly, where every token has the same reason."""
    text = Text()
    for token in tokens:
        text.append(printable(token.text), None if plain else style_of(token.reason, token.lossy))
    return text


def legend(tokens: Iterable[Token], counts: bool = True) -> Text:
    """The reasons that occur among the tokens, each in its colour, with how often it occurs."""
    found = Counter((token.reason, token.lossy) for token in tokens)
    entries = []
    for reason, lossy in sorted(found, key=_place):
        label = (f"{reason} (lossy)" if lossy else reason, style_of(reason, lossy))
        entries.append(Text.assemble(label, f" {found[reason, lossy]}" if counts else ""))
    return Text("   ").join(entries)


def key(tokens: Iterable[Token]) -> Table:
    """The same reasons with what they mean, one a line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for reason, lossy in sorted({(token.reason, token.lossy) for token in tokens}, key=_place):
        meaning = MEANINGS.get(reason, "accepted by the rule") + (" (lossy)" if lossy else "")
        table.add_row(Text(reason, style_of(reason, lossy)), meaning)
    return table


def _place(found: tuple[str, bool]) -> tuple[int, str, bool]:
    reason, lossy = found
    order = list(COLORS)
    return order.index(reason if reason in order else "other"), reason, lossy
