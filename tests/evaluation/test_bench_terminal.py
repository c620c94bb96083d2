"""Tables on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.bench.terminal import for_terminal

HEADINGS = ("cell", "n", "speed over strict", "acceptance length", "score %", "lost / gained", "looping")
ROWS = [
    ("strict", "100", "1", "4.50", "50.0 [40.0, 60.0]", "", "0"),
    ("typical:threshold=0.3:delta=1.0", "100", "1.07 [1.00, 2.65]", "4.97", "44.0 [34.0, 54.0]", "13 / 7", "3"),
]


def shown(width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(for_terminal([Sheet("gsm8k", HEADINGS, ROWS, ["A note."])]))
    return file.getvalue()


@pytest.mark.parametrize("width", [55, 60, 80, 100, 120, 200])
def test_nothing_is_broken_where_a_row_is_too_long(width: int) -> None:
    text = shown(width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    for column in range(1, len(HEADINGS)):
        values = [row[column] for row in ROWS if row[column]]
        assert all(any(line.startswith(row[0]) and row[column] in line for line in lines) for row in ROWS), values
    assert text.count("gsm8k") == text.count("A note.") == 1
    assert text.count("13 / 7") == 1  # each column once


def test_a_wide_terminal_has_one_table() -> None:
    assert shown(200).count("typical:threshold=0.3:delta=1.0") == 1
    assert shown(80).count("typical:threshold=0.3:delta=1.0") > 1


def test_a_terminal_narrower_than_a_column_folds_it() -> None:
    assert "typical:thre" in shown(30)
