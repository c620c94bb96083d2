"""Signs that a text has gone wrong."""

from __future__ import annotations

from collections.abc import Iterator

LOOPS, LOOPS_OF_MANY = 4, 3  # times in a row, of few words and of many
MANY, MOST = 20, 80  # words
LONG = 40  # characters
VARIED = 3  # different characters


def loops(text: str) -> bool:
    """Whether the end of a text repeats itself: its last words stand there four times in a row, or many of them three.

    Runs of characters without spaces (code, Chinese) count too, by the same rule on the last characters. What has less
    than three different ones must go on for 40: 1,000,000,000,000 and ruled lines are no loops.
    """
    words = text.split()
    few = any(_repeated(words, LOOPS, 1, MANY - 1))
    # the last word may be half a word
    if few or any(part for some in (words, words[:-1]) for part in _repeated(some, LOOPS_OF_MANY, MANY, MOST)):
        return True
    parts = _repeated(list(text.rstrip()[-200:]), LOOPS, 1, LONG)
    return any(LOOPS * len(part) >= LONG or len(set(part)) >= VARIED for part in parts)


def _repeated(items: list[str], times: int, shortest: int, longest: int) -> Iterator[list[str]]:
    """What of a length stands at the end so many times in a row, the shortest first."""
    for size in range(shortest, min(longest, len(items) // times) + 1):
        tail = items[-size:]
        if all(items[-(i + 1) * size : len(items) - i * size] == tail for i in range(times)):
            yield tail
