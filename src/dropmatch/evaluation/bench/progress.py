"""How far a benchmark has come, on stderr: a bar with the time left on a terminal, else lines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

GROUPS = "groups of cells"
LINES_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class Load:
    """One kind of work, which goes on at one pace.

    Attributes:
        unit: what is counted.
        total: how many there are, those done before among them.
        amount: of what is still to be done, in what takes the time: tokens, or the units themselves.
        found: how many were done before and nobody will tell of.
        pace: seconds that a piece of the amount took earlier; None if that is not known.
    """

    unit: str
    total: int
    amount: float
    found: int = 0
    pace: float | None = None


class _Stage:
    """How far one kind of work has come."""

    def __init__(self, load: Load) -> None:
        self.load, self.count, self.left = load, load.found, load.amount
        self.seconds = self.measured = 0.0

    @property
    def pace(self) -> float | None:
        """Seconds for a piece of the amount: as measured in this run, or as it was earlier."""
        return self.seconds / self.measured if self.measured else self.load.pace

    def take(self, amount: float) -> None:
        """So much less is to be done."""
        self.left = max(0.0, self.left - amount)


class Bar:
    """Follows a run.

    Args:
        work: how many groups, or something else, are to be done, those that are done already among them; or several
            kinds of work, each with a pace of its own.
        unit: what they are, if it is a number.
    """

    def __init__(self, work: int | Sequence[Load], unit: str = GROUPS) -> None:
        loads = [Load(unit, work, work)] if isinstance(work, int) else work
        self._stages = {each.unit: _Stage(each) for each in loads}
        self._console = Console(stderr=True)
        self._tokens = 0
        self._since, self._said, self._aside = time.monotonic(), -math.inf, False
        self._what = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            refresh_per_second=1,  # drawing takes time from what is measured
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, counts=self._counts("/"), left=self._left())

    def __enter__(self) -> Bar:
        self._since = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
        tokens = f", {self._tokens} tokens" if self._tokens else ""
        self._say(f"{self._counts(' of ')}{tokens}")

    def begin(self, what: str) -> None:
        """Something else is done now."""
        if self._aside:
            self._since, self._aside = time.monotonic(), False
        self._show(what)

    def aside(self, what: str) -> None:
        """Until the next thing begins, something is done that is none of the work, and is timed with none of it."""
        self._aside = True
        self._show(what)

    def done(
        self, tokens: int, measured: bool, *, unit: str | None = None, count: int = 1, amount: float | None = None
    ) -> None:
        """Some of the work is done; measured now, or found.

        Args:
            tokens: that were decoded for it.
            measured: it took the time since the last was done.
            unit: of which kind; None is the first.
            count: how many.
            amount: how much of the amount; None is as many.
        """
        stage, now = self._stage(unit), time.monotonic()
        amount = count if amount is None else amount
        if measured:
            stage.seconds += now - self._since
            stage.measured += amount
            self._tokens += tokens
        self._since = now
        stage.count += count
        stage.take(amount)
        self._show(self._what)

    def lost(self, amount: float, *, unit: str | None = None) -> None:
        """So much of the amount will not be done, since what it was of has crashed; it says nothing of the pace."""
        self._stage(unit).take(amount)
        self._since = time.monotonic()
        self._show(self._what)

    def _stage(self, unit: str | None) -> _Stage:
        return next(iter(self._stages.values())) if unit is None else self._stages[unit]

    def _counts(self, of: str) -> str:
        return ", ".join(f"{stage.count}{of}{stage.load.total} {unit}" for unit, stage in self._stages.items())

    def _left(self) -> str:
        """Time left, at the paces so far; at least that where the pace of something is not known yet."""
        waiting = [stage for stage in self._stages.values() if stage.left > 0]
        known = [stage.left * stage.pace for stage in waiting if stage.pace is not None]
        if not waiting:
            return ""
        minutes = round(sum(known) / 60)
        if len(known) < len(waiting) and not minutes:
            return "time left not known yet"
        if not minutes:
            return "less than a minute left"
        text = f"{minutes // 60} h {minutes % 60:02d} min left" if minutes >= 60 else f"{minutes} min left"
        return text if len(known) == len(waiting) else f"at least {text}"

    def _share(self) -> float:
        """How much of the work is done, by the time that it takes as far as that is known."""
        stages = list(self._stages.values())
        paced = [stage for stage in stages if stage.pace] or stages[:1]
        all_of = sum((stage.pace or 1.0) * stage.load.amount for stage in paced)
        left = sum((stage.pace or 1.0) * stage.left for stage in paced)
        return 1.0 - left / all_of if all_of else 1.0

    def _show(self, what: str) -> None:
        self._what = what
        if self._console.is_terminal:
            self._bar.update(
                self._task, description=what, completed=self._share(), counts=self._counts("/"), left=self._left()
            )
        elif time.monotonic() - self._said >= LINES_EVERY:
            self._say(", ".join(part for part in (self._counts(" of "), what, self._left()) if part))

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
