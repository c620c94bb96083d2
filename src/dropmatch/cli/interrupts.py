"""Ctrl-C that waits for the end of a round, so that what was generated is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed.

    Attributes:
        pressed: it was; finish the round and stop.
        gentle: only note it. Set once there is something to keep; until then, and at the second Ctrl-C,
            KeyboardInterrupt is raised at once.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.gentle = False

    def press(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        repeated, self.pressed = self.pressed, True
        if repeated or not self.gentle:
            raise KeyboardInterrupt


@contextmanager
def noting_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C is noted in the yielded object. A shell that had it ignored is obeyed."""
    interrupt = Interrupt()
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not in_main_thread or before in (signal.SIG_IGN, None):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
