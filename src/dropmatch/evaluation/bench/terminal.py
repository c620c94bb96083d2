"""Tables on a terminal: where one is too wide, its columns go on below."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.console import Group as Lines
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dropmatch.evaluation.bench.tables import Sheet

GAP = 3  # between columns, as rich pads them


class Fitted:
    """A sheet in as many tables as the terminal's width asks for, each with the first column.

    Args:
        sheet: what is shown.
    """

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet = self._sheet
        widths = [_width(sheet, column) for column in range(len(sheet.headings))]
        for number, columns in enumerate(_parts(widths, options.max_width)):
            title = escape(sheet.title) if number == 0 else None
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
            for column in columns:
                # said, or a long heading is given room at the cost of other columns
                table.add_column(
                    escape(sheet.headings[column]),
                    justify="right" if column else "left",
                    overflow="fold",
                    width=min(widths[column], options.max_width),
                )
            for row in sheet.rows:
                table.add_row(*(Text(row[column]) for column in columns))
            yield table
            yield Text("")


def for_terminal(sheets: Sequence[Sheet]) -> Lines:
    """Tables as a terminal shows them, with their notes."""
    return Lines(*(Lines(Fitted(sheet), *(Text(note) for note in sheet.notes), Text("")) for sheet in sheets))


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """Columns that fit beside each other and the first one."""
    parts, used = [[0]], widths[0]
    for column in range(1, len(widths)):
        if used + GAP + widths[column] > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(column)
        used += GAP + widths[column]
    return parts


def _width(sheet: Sheet, column: int) -> int:
    """Of a column whose texts stand in one line each; headings may break between words."""
    words = [*sheet.headings[column].split(), ""]
    return max(len(text) for text in [*words, *(row[column] for row in sheet.rows)])
