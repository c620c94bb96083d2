"""Paired statistics of two settings on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
AT_ONCE = 2**20  # values drawn at once: 8 MB of them, and as much of their places


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Two settings on n examples with a score each.

    Attributes:
        n: examples.
        difference: mean score of the second less that of the first, with a bootstrap interval over examples.
        lost: examples on which the second scores less.
        gained: examples on which it scores more.
        p_value: exact McNemar test of lost against gained (two-sided sign test); 1 if nothing differs.
    """

    n: int
    difference: Interval
    lost: int
    gained: int
    p_value: float


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value of McNemar's test: under equal chances, lost ~ Binomial(lost + gained, 1/2)."""
    n, k = lost + gained, min(lost, gained)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def paired(base: Sequence[float], other: Sequence[float], seed: int = 0) -> Paired:
    """Compare scores of the same examples.

    Raises:
        ValueError: there are none, or not as many of both.
    """
    if len(base) != len(other) or not len(base):
        raise ValueError(f"scores of the same examples are needed, got {len(base)} and {len(other)}")
    difference = np.asarray(other, dtype=float) - np.asarray(base, dtype=float)
    lost, gained = int((difference < 0).sum()), int((difference > 0).sum())
    return Paired(len(base), mean_interval(difference, seed), lost, gained, mcnemar(lost, gained))


def mean_interval(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Mean with a percentile bootstrap interval over its values."""
    array = np.asarray(values, dtype=float)
    return Interval(float(array.mean()), *_ends(array, np.mean, seed))


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """Median of the ratios of pairs, with a percentile bootstrap interval over pairs."""
    ratios = np.asarray(above, dtype=float) / np.asarray(below, dtype=float)
    return Interval(float(np.median(ratios)), *_ends(ratios, np.median, seed))


def sums_ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """Ratio of two sums over the same examples, with a percentile bootstrap interval over examples.

    Raises:
        ValueError: the sum below is 0.
    """
    pairs = np.asarray([(a, b) for a, b in zip(above, below, strict=True) if b], dtype=float)
    if not len(pairs):
        raise ValueError("there is nothing to divide by")
    a, b = pairs.T

    def estimate(places: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(a[places].sum(axis=axis) / b[places].sum(axis=axis))

    return Interval(float(a.sum() / b.sum()), *_ends(np.arange(len(pairs)), estimate, seed))


def sums_ratio_intervals(above: np.ndarray, below: np.ndarray, seed: int = 0) -> list[Interval | None]:
    """Ratios of the sums of m pairs of columns over the same examples, each with a percentile bootstrap interval.

    All columns are looked at in the same samples of examples, so that many cost little more than one.

    Args:
        above: [n, m].
        below: [n, m], not negative.
        seed: of the samples.

    Returns:
        m intervals; None where there is nothing to divide by.
    """
    above, below = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    columns = np.concatenate([above, below], axis=1)  # [n, 2m]
    draws, (n, m) = np.random.default_rng(seed), above.shape
    found, size = list[np.ndarray](), max(1, AT_ONCE // n)
    for first in range(0, RESAMPLES, size):
        samples = min(size, RESAMPLES - first)
        places = draws.integers(0, n, size=(samples, n)) + n * np.arange(samples)[:, None]
        times = np.bincount(places.ravel(), minlength=samples * n).reshape(samples, n)  # each example is in a sample
        sums = times.astype(float) @ columns  # [samples, 2m]
        with np.errstate(invalid="ignore"):
            found.append(sums[:, :m] / sums[:, m:])
    ratios, totals = np.concatenate(found), columns.sum(axis=0)
    intervals: list[Interval | None] = []
    for i in range(m):
        if not totals[m + i]:
            intervals.append(None)
            continue
        low, high = np.nanpercentile(ratios[:, i], [2.5, 97.5])  # nothing below in a sample: it says nothing
        intervals.append(Interval(float(totals[i] / totals[m + i]), float(low), float(high)))
    return intervals


def sums_ratio_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]], seed: int = 0
) -> Interval:
    """Ratio of two sums less another ratio of two, over the same examples; the interval resamples examples of both.

    Args:
        first, second: of each, what is above and what is below by example. Examples with nothing below in one of them
            are left out.
        seed: of the bootstrap.

    Raises:
        ValueError: the sums below are 0.
    """
    rows = [row for row in zip(*first, *second, strict=True) if row[1] and row[3]]
    if not rows:
        raise ValueError("there is nothing to divide by")
    a, b, c, d = np.asarray(rows, dtype=float).T

    def estimate(places: np.ndarray, axis: int) -> np.ndarray:
        sums = [values[places].sum(axis=axis) for values in (a, b, c, d)]
        return np.asarray(sums[0] / sums[1] - sums[2] / sums[3])

    value = float(a.sum() / b.sum() - c.sum() / d.sum())
    return Interval(value, *_ends(np.arange(len(rows)), estimate, seed))


def share_interval(yes: int, n: int) -> Interval:
    """A share with Wilson's interval, which does not shrink to a point at 0 and 1."""
    z, share = 1.959964, yes / n
    middle, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def _ends(values: np.ndarray, estimate: Callable[..., np.ndarray], seed: int) -> tuple[float, float]:
    """The 95 % percentile interval of an estimate over samples of n values with replacement.

    Samples are drawn in blocks, one after the other out of the same stream.
    """
    draws, n = np.random.default_rng(seed), len(values)
    found, size = list[np.ndarray](), max(1, AT_ONCE // n)
    for first in range(0, RESAMPLES, size):
        places = draws.integers(0, n, size=(min(size, RESAMPLES - first), n))  # [samples, n]
        found.append(estimate(values[places], axis=1))
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return float(low), float(high)
