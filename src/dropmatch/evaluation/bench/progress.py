"""How far a benchmark has come, on stderr: a bar with the time left on a terminal, else lines."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINES_EVERY = 30.0  # seconds


class Bar:
    """Follows a run over so many groups of cells, or of something else.

    Args:
        total: how many, those that are done already among them.
        unit: what they are.
    """

    def __init__(self, total: int, unit: str = "groups of cells") -> None:
        self._unit = unit
        self._console = Console(stderr=True)
        self._total, self._found, self._measured, self._tokens = total, 0, 0, 0
        self._began, self._said = time.monotonic(), 0.0
        self._what = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            refresh_per_second=1,  # drawing takes time from what is measured
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, left="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
        tokens = f", {self._tokens} tokens" if self._tokens else ""
        self._say(f"{self._found + self._measured} of {self._total} {self._unit}{tokens}")

    def begin(self, what: str) -> None:
        """Something else is done now."""
        self._what = what
        self._bar.update(self._task, description=what)

    def done(self, tokens: int, measured: bool) -> None:
        """A group of a cell is there; measured now, or found in the folder."""
        if measured:
            self._measured += 1
            self._tokens += tokens
        else:
            self._found += 1
            self._began = time.monotonic() if not self._measured else self._began
        self._bar.update(self._task, advance=1, left=self._left())
        if measured and not self._console.is_terminal and time.monotonic() - self._said >= LINES_EVERY:
            self._say(f"{self._found + self._measured} of {self._total}, {self._what}, {self._left()}")

    def _left(self) -> str:
        """Time left, by what was measured in this run."""
        if not self._measured:
            return ""
        each = (time.monotonic() - self._began) / self._measured
        minutes = round(each * (self._total - self._found - self._measured) / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min left" if minutes >= 60 else f"{minutes} min left"

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
