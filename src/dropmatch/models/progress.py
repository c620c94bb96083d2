"""What a long step tells the user, on stderr: a bar on a terminal, else one plain line a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Column


def human(nbytes: float) -> str:
    """Bytes as people write them: 98.4 MB, 1.12 GB."""
    if nbytes < 1e6:
        return f"{nbytes / 1e3:.1f} kB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.2f} GB"


class Reporter:
    """Reports the steps of one call. `Reporter(silent=True)` says nothing at all."""

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._console = Console(file=sys.stderr)
        self._terminal = self._console.is_terminal and not silent

    def say(self, line: str) -> None:
        """One plain line."""
        if not self._silent:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def transfer(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of `total` bytes; yields a function to be told how many are done."""
        if not self._terminal:
            self.say(f"{label} ({human(total)})")
            yield lambda done: None
            return
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=16),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=min(done, total))
            bar.update(task, completed=total)

    @contextmanager
    def watch(self, label: str, total: int, measure: Callable[[], int]) -> Iterator[None]:
        """A step done by someone else, whose bytes `measure` counts from outside."""
        with self.transfer(label, total) as update:
            if not self._terminal:
                yield
                return
            stop = threading.Event()

            def poll() -> None:
                while not stop.wait(0.3):
                    update(measure())

            thread = threading.Thread(target=poll, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join()

    @contextmanager
    def busy(self, label: str) -> Iterator[None]:
        """A step whose length is not known."""
        if not self._terminal:
            self.say(label)
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bar:
            bar.add_task(label, total=None)
            yield


def reporter_for(progress: bool | Reporter) -> Reporter:
    """The reporter that a `progress` argument stands for."""
    return progress if isinstance(progress, Reporter) else Reporter(silent=not progress)
