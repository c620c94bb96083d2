"""Paired statistics against scipy and closed forms."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from dropmatch.evaluation.statistics import (
    Interval,
    mcnemar,
    mean_interval,
    paired,
    ratio_interval,
    share_interval,
    sums_ratio_difference,
    sums_ratio_interval,
    sums_ratio_intervals,
)
from dropmatch.evaluation.text_checks import loops


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_binomial_test(lost: int, gained: int) -> None:
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_pair_counts_what_was_lost_and_gained(rows: list[tuple[bool, bool]]) -> None:
    base, other = [a for a, _ in rows], [b for _, b in rows]
    found = paired(base, other)
    assert found.n == len(rows)
    assert found.lost == sum(a and not b for a, b in rows)
    assert found.gained == sum(b and not a for a, b in rows)
    assert found.difference.value == pytest.approx((found.gained - found.lost) / len(rows))
    assert found.difference.low - 1e-12 <= found.difference.value <= found.difference.high + 1e-12
    assert paired(base, base).p_value == 1.0


def test_a_bootstrap_interval_is_scipys() -> None:
    values = np.random.default_rng(1).normal(size=80)
    ours = mean_interval(values)
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=10_000).confidence_interval
    assert ours.value == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=0.02)


def test_the_interval_of_a_ratio_is_about_its_median() -> None:
    found = ratio_interval([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert 2.0 <= found.low <= found.high <= 3.0


@pytest.mark.parametrize("n", [1, 7, 80, 500])
def test_samples_are_those_of_one_stream(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    at_once = values[np.random.default_rng(3).integers(0, n, size=(10_000, n))]
    for found, estimates in (
        (mean_interval(values, 3), at_once.mean(axis=1)),
        (ratio_interval(values, np.ones(n), 3), np.median(at_once, axis=1)),
    ):
        assert [found.low, found.high] == np.percentile(estimates, [2.5, 97.5]).tolist()


@pytest.mark.parametrize("interval", [mean_interval, lambda values: ratio_interval(values, np.ones(len(values)))])
def test_many_examples_take_little_memory(interval: Callable[[np.ndarray], Interval]) -> None:
    values = np.zeros(3000)
    tracemalloc.start()
    interval(values)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50 * 2**20


@given(st.integers(1, 500), st.data())
def test_wilsons_interval_is_scipys(n: int, data: st.DataObject) -> None:
    yes = data.draw(st.integers(0, n))
    theirs = binomtest(yes, n).proportion_ci(method="wilson")
    ours = share_interval(yes, n)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)


@pytest.mark.parametrize(("base", "other"), [([], []), ([1.0], [1.0, 2.0])])
def test_scores_of_different_examples_are_refused(base: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="same examples"):
        paired(base, other)


SENTENCE = (
    "The river was a place of great calm and of slow change, known to all who lived beside it for its wide and "
    "quiet water and its old trees. "
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is so. " + "and so on " * 5, True),
        ("no no no no", True),
        ("no no no", False),
        ("a b c d e f g", False),
        ("", False),
        ("x = " + "0123456789" * 6, True),
        ("我们很高兴" * 5, True),
        ("def f(x):\n    return x\n\n\nprint(f(1))", False),
        ("1 2 3 4 5 6 7 8 9 10", False),
        ("the the end", False),
        ("The answer is 1000000000000", False),
        ("It costs $1,000,000,000,000", False),
        ("It began so. " + SENTENCE * 3, True),
        ("It began so. " + SENTENCE * 3 + SENTENCE[:60], True),
        ("It began so. " + SENTENCE * 2, False),
        ("* so it was\n* then it was otherwise\n" * 3, False),
        ("* so it was\n* then it was otherwise\n" * 4, True),
        ("A third is 0.333333333333333", False),
        ("The end\n--------------", False),
        ("The end\n" + "-" * 40, True),
        ("It costs $1" + ",000" * 12, True),
        ("print(f(1));" * 4, True),
    ],
)
def test_a_text_that_repeats_itself_at_its_end_loops(text: str, expected: bool) -> None:
    assert loops(text) == expected


def test_a_ratio_of_sums_is_scipys() -> None:
    draws = np.random.default_rng(5)
    rounds = draws.integers(1, 40, 60)
    committed = rounds + draws.binomial(rounds * 5, 0.6)
    found = sums_ratio_interval(committed.tolist(), rounds.tolist())

    def ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(above.sum(axis=axis) / below.sum(axis=axis))

    theirs = bootstrap(
        (committed, rounds), ratio, paired=True, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found.value == pytest.approx(committed.sum() / rounds.sum())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)
    # examples without a round say nothing
    assert sums_ratio_interval([*committed.tolist(), 0], [*rounds.tolist(), 0]) == found
    with pytest.raises(ValueError, match="nothing to divide by"):
        sums_ratio_interval([0, 0], [0, 0])


def test_many_ratios_of_sums_are_those_of_each() -> None:
    draws = np.random.default_rng(7)
    below = np.stack([np.ones(90), draws.integers(0, 6, 90), np.zeros(90)], axis=1)
    above = below * draws.normal(2.0, 0.5, below.shape)
    first, second, nothing = sums_ratio_intervals(above, below, seed=4)
    places = np.random.default_rng(4).integers(0, 90, size=(10_000, 90))
    for found, i in ((first, 0), (second, 1)):
        assert found is not None
        ratios = above[places, i].sum(axis=1) / below[places, i].sum(axis=1)
        assert found.value == pytest.approx(above[:, i].sum() / below[:, i].sum())
        assert (found.low, found.high) == pytest.approx(tuple(np.percentile(ratios, [2.5, 97.5])))
    assert nothing is None
    rare = sums_ratio_intervals(np.array([[2.0], *[[0.0]] * 9]), np.array([[4.0], *[[0.0]] * 9]))
    assert rare == [Interval(0.5, 0.5, 0.5)]  # samples without the one that says something say nothing


def test_a_difference_of_ratios_of_sums_is_scipys() -> None:
    draws = np.random.default_rng(8)
    rounds = draws.integers(5, 40, 60)
    other = rounds + draws.integers(0, 6, 60)  # of the same examples, so that both are long together
    a, c = rounds + draws.binomial(rounds * 5, 0.6), other + draws.binomial(other * 5, 0.5)
    found = sums_ratio_difference((a.tolist(), rounds.tolist()), (c.tolist(), other.tolist()))

    def difference(*sums: np.ndarray, axis: int = -1) -> np.ndarray:
        first, below, second, base = (each.sum(axis=axis) for each in sums)
        return np.asarray(first / below - second / base)

    theirs = bootstrap(
        (a, rounds, c, other), difference, paired=True, n_resamples=10_000, method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert found.value == pytest.approx(a.sum() / rounds.sum() - c.sum() / other.sum())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    # the same twice differs by nothing, however few the examples
    same = ([4, 9], [1, 2])
    assert sums_ratio_difference(same, same) == Interval(0.0, 0.0, 0.0)
    # examples without a round of one of them say nothing
    assert sums_ratio_difference(([4, 9, 7], [1, 2, 0]), ([4, 9, 5], [1, 2, 3])) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="nothing to divide by"):
        sums_ratio_difference(([1], [0]), ([1], [1]))
