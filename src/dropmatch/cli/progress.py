"""How far a comparison has come, on stderr: a bar on a terminal, else a line per run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from dropmatch.engines.hf.result import GenerationResult


class Display:
    """Follows the runs of a comparison.

    Args:
        console: where to; a bar if it is a terminal.
        prompts: how many.
        methods: how many.
        repeats: how many runs per prompt and method.
        max_tokens: the most tokens of a run.
    """

    def __init__(self, console: Console, prompts: int, methods: int, repeats: int, max_tokens: int) -> None:
        self._console = console
        self._prompts, self._repeats, self._max_tokens = prompts, repeats, max_tokens
        self._label, self._done, self._finished_runs = "", 0, 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
            refresh_per_second=2,  # drawing takes time from what is measured
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("warming up", total=prompts * methods * repeats * max_tokens)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the bar meanwhile."""
        self._bar.start()
        try:
            yield
        finally:
            self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make room for other output."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def warm_up(self, method: str) -> None:
        """A run that is not measured begins."""
        self._say(f"warming up: {method}")

    def begin(self, prompt: int, method: str, repeat: int) -> None:
        """A run begins; prompts count from 1, repetitions from 0."""
        again = f", run {repeat + 1} of {self._repeats}" if self._repeats > 1 else ""
        self._label = f"prompt {prompt} of {self._prompts}, {method}{again}"
        self._done = 0
        self._bar.update(self._task, description=self._label)

    def add(self, tokens: int) -> None:
        """The run has generated more tokens."""
        self._done += tokens
        self._bar.advance(self._task, tokens)

    def end(self, result: GenerationResult) -> None:
        """The run is over; a text that ended early is done as well."""
        self._finished_runs += 1
        self._bar.update(self._task, completed=self._finished_runs * self._max_tokens)
        s = result.statistics
        self._say(f"{self._label}: {s.generated} tokens, {s.tokens_per_second:.1f} tokens/s", bar=self._label)

    def _say(self, line: str, bar: str | None = None) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=bar or line)
        else:
            self._console.print(Text(line), soft_wrap=True)
