"""Signs that a text has gone wrong."""

from __future__ import annotations

from collections.abc import Iterator

LOOPS = 4
LONG = 40  # characters
VARIED = 3  # different characters


def loops(text: str, longest: int = 10) -> bool:
    """Whether the end of a text repeats itself: its last words, up to `longest`, stand there four times in a row.

    Runs of characters without spaces (code, Chinese) count too, by the same rule on the last characters. What has less
    than three different ones must go on for 40: 1,000,000,000,000 and ruled lines are no loops.
    """
    if any(_repeated(text.split(), longest)):
        return True
    parts = _repeated(list(text.rstrip()[-200:]), LONG)
    return any(LOOPS * len(part) >= LONG or len(set(part)) >= VARIED for part in parts)


def _repeated(items: list[str], longest: int) -> Iterator[list[str]]:
    """What stands at the end LOOPS times in a row, the shortest first."""
    for size in range(1, min(longest, len(items) // LOOPS) + 1):
        tail = items[-size:]
        if all(items[-(i + 1) * size : len(items) - i * size] == tail for i in range(LOOPS)):
            yield tail
