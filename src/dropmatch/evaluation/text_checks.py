"""Signs that a text has gone wrong."""

from __future__ import annotations

LOOPS = 4


def loops(text: str, longest: int = 10) -> bool:
    """Whether the end of a text repeats itself: its last words, up to `longest`, stand there four times in a row.

    Runs of characters without spaces (code, Chinese) count too, by the same rule on the last characters.
    """
    words = text.split()
    return _repeats(words, longest) or _repeats(list(text.rstrip()[-200:]), 40, shortest=3)


def _repeats(items: list[str], longest: int, shortest: int = 1) -> bool:
    for size in range(shortest, longest + 1):
        if len(items) < LOOPS * size:
            return False
        tail = items[-size:]
        if all(items[-(i + 1) * size : len(items) - i * size] == tail for i in range(LOOPS)):
            return True
    return False
