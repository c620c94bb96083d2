"""Where text goes: stdout for what was asked for, stderr for what is said about it."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

# what would move the cursor or restyle the terminal, were a model to write it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to `failures.Group`."""
        raise  # called while the error is handled


def output_console(color: bool | None = None) -> Console:
    """Stdout. color: True and False force it; None asks the terminal (and NO_COLOR)."""
    return _console(sys.stdout, color)


def error_console(color: bool | None = None) -> Console:
    """Stderr, likewise."""
    return _console(sys.stderr, color)


def _console(file: TextIO, color: bool | None) -> Console:
    if color is None:
        return _Console(file=file, highlight=False)
    if color:
        return _Console(file=file, highlight=False, force_terminal=True, color_system="standard", no_color=False)
    return _Console(file=file, highlight=False, color_system=None, no_color=True)


def has_color(console: Console) -> bool:
    """Whether what is printed there may be coloured."""
    return console.color_system is not None and not console.no_color


def say(console: Console, label: str, message: str, style: str = "") -> None:
    """One line, whatever the width of the terminal; the label is styled."""
    console.print(Text.assemble((label, style), " ".join(message.split())), soft_wrap=True)


def paint(text: str, style: Style) -> str:
    """Text with the escape codes of a style around each line, to be written as it is."""
    return "\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))


def printable(text: str) -> str:
    """Text without control characters other than tab and newline."""
    return _CONTROL.sub("\ufffd", text)


def to_json(value: Any, file: TextIO) -> str:
    """One line of JSON that the file's encoding can hold."""
    encoding = (getattr(file, "encoding", None) or "ascii").lower().replace("-", "")
    return json.dumps(value, ensure_ascii=encoding not in ("utf8", "utf16", "utf32"))
