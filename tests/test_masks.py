"""Masks: the generator, what its numbers are keyed by, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from acceptance import reference
from acceptance.support import devices
from dropmatch import masks
from dropmatch.masks import Stream, dropout_masks, philox4x32, random_words, uniforms

ALL = 0xFFFFFFFF
# published with the generator: kat_vectors of Random123
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEEDS = [0, 1, -1, 2**32, -(2**63), 2**63 - 1, 123456789012345678]
words32 = st.integers(0, ALL)


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@devices
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: str, device: str) -> None:
    answer = philox4x32(
        tuple(ints(c, device=device) for c in counter),  # type: ignore[arg-type]
        tuple(ints(k, device=device) for k in key),  # type: ignore[arg-type]
    )
    assert " ".join(f"{int(w):08x}" for w in answer) == expected


@given(counter=st.tuples(words32, words32, words32, words32), key=st.tuples(words32, words32))
@settings(max_examples=60, deadline=None)
def test_philox_equals_integer_arithmetic(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert [reference.philox(c, k) for c, k, _ in KNOWN_ANSWERS] == [
        [int(w, 16) for w in expected.split()] for *_, expected in KNOWN_ANSWERS
    ]
    answer = philox4x32(tuple(map(ints, counter)), tuple(map(ints, key)))  # type: ignore[arg-type]
    assert [int(w) for w in answer] == reference.philox(counter, key)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**32 - 1),
    units=st.integers(1, 11),
    stream=st.sampled_from(list(Stream)),
)
@settings(max_examples=60, deadline=None)
def test_words_are_keyed_by_the_whole_of_seed_position_head_unit(
    seed: int, position: int, units: int, stream: Stream
) -> None:
    made = random_words(stream, ints(seed), ints(position), 3, units)
    assert made.shape == (1, 3, units)
    expected = [[reference.word(stream, seed, position, i, j) for j in range(units)] for i in range(3)]
    assert made[0].tolist() == expected


def test_keep_is_decided_by_the_word() -> None:
    for p in (0.1, 0.3, 0.5, 0.9):
        made = dropout_masks(ints(7, -7), ints(3, 11), 4, 13, p)
        for n, (seed, position) in enumerate([(7, 3), (-7, 11)]):
            expected = [reference.mask(seed, position, i, 13, p).tolist() for i in range(4)]
            assert made[n].double().tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.8])
def test_keep_rate(seed: int, p: float) -> None:
    heads, units, rows = 16, 1000, 8
    kept = dropout_masks(ints(*[seed] * rows), torch.arange(rows), heads, units, p)
    n = kept.numel()
    tolerance = 4.5 * math.sqrt(p * (1 - p) / n)
    assert abs(kept.double().mean().item() - (1 - p)) < tolerance
    # along every axis, not only on the whole: a mask that repeats a row or a head is no Bernoulli sample
    for axes, size in (((1, 2), heads * units), ((0, 2), rows * units), ((0, 1), rows * heads)):
        rates = kept.double().mean(dim=axes)
        assert (rates - (1 - p)).abs().max().item() < 5 * math.sqrt(p * (1 - p) / size)


def test_neighbouring_units_heads_and_positions_are_uncorrelated() -> None:
    kept = dropout_masks(ints(*[5] * 32), torch.arange(32), 16, 512, 0.3).double() - 0.7  # [32, 16, 512]
    bound = 4.5 / math.sqrt(kept.numel())
    for axis in range(3):
        for lag in (1, 2, 4):
            product = kept.narrow(axis, 0, kept.shape[axis] - lag) * kept.narrow(axis, lag, kept.shape[axis] - lag)
            assert abs(product.mean().item() / (0.3 * 0.7)) < 1.5 * bound, (axis, lag)


def test_nested_in_heads_and_in_units() -> None:
    large = dropout_masks(ints(3, 4), ints(10, 20), 9, 40, 0.4)
    for heads in (1, 2, 5, 8):
        assert torch.equal(dropout_masks(ints(3, 4), ints(10, 20), heads, 40, 0.4), large[:, :heads])
    for units in (1, 3, 4, 5, 39):
        assert torch.equal(dropout_masks(ints(3, 4), ints(10, 20), 9, units, 0.4), large[:, :, :units])


def test_row_depends_neither_on_batch_nor_on_order() -> None:
    seeds, positions = ints(*SEEDS), torch.arange(len(SEEDS)) * 17
    together = dropout_masks(seeds, positions, 5, 33, 0.3)
    order = torch.randperm(len(SEEDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropout_masks(seeds[order], positions[order], 5, 33, 0.3), together[order])
    for n in range(len(SEEDS)):
        assert torch.equal(dropout_masks(seeds[n : n + 1], positions[n : n + 1], 5, 33, 0.3)[0], together[n])


def test_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = dropout_masks(ints(1), ints(2), 3, 8, 0.5)
    torch.manual_seed(2)
    assert torch.equal(dropout_masks(ints(1), ints(2), 3, 8, 0.5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_in_the_key_matters() -> None:
    d = 64
    base = random_words(Stream.DROPOUT, ints(9), ints(4), 2, d)[0]
    assert not torch.equal(base[0], base[1])
    others: dict[str, Callable[[], torch.Tensor]] = {
        "stream": lambda: random_words(Stream.ACCEPT, ints(9), ints(4), 2, d)[0],
        "position": lambda: random_words(Stream.DROPOUT, ints(9), ints(5), 2, d)[0],
        "low half of the seed": lambda: random_words(Stream.DROPOUT, ints(10), ints(4), 2, d)[0],
        "high half of the seed": lambda: random_words(Stream.DROPOUT, ints(9 + 2**32), ints(4), 2, d)[0],
        "sign of the seed": lambda: random_words(Stream.DROPOUT, ints(-9), ints(4), 2, d)[0],
    }
    for name, make in others.items():
        assert (make() == base).double().mean().item() < 0.05, name


def test_streams_are_distinct() -> None:
    assert len({int(s) for s in Stream}) == len(Stream)
    made = torch.stack([random_words(s, ints(1), ints(1), 1, 32)[0, 0] for s in Stream])
    assert len({tuple(row) for row in made.tolist()}) == len(Stream)


def test_no_two_words_of_a_round_are_the_same() -> None:
    made = random_words(Stream.DROPOUT, ints(*range(8)), torch.arange(8), 5, 512).flatten()
    # 20480 words of 32 bits: about 0.05 pairs fall together by chance
    assert made.unique().numel() >= made.numel() - 2
    assert int(made.min()) >= 0
    assert int(made.max()) <= ALL


def test_no_dropout_keeps_all() -> None:
    assert bool(dropout_masks(ints(*SEEDS), torch.arange(len(SEEDS)), 8, 256, 0.0).all())


@devices
def test_uniforms_are_uniform(device: str) -> None:
    n = 20000
    drawn = uniforms(Stream.ACCEPT, ints(*[11] * n, device=device), torch.arange(n, device=device))
    assert drawn.dtype == torch.float64
    values = drawn.cpu().numpy()
    assert values.min() > 0.0
    assert values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    # the low bits too: equal high words would leave a lattice
    assert stats.kstest((values * 2**30) % 1.0, "uniform").pvalue > 1e-3
    across_seeds = uniforms(Stream.ACCEPT, torch.arange(n, device=device), torch.zeros_like(drawn).long())
    assert stats.kstest(across_seeds.cpu().numpy(), "uniform").pvalue > 1e-3
    other = uniforms(Stream.TARGET_TOKEN, ints(*[11] * n, device=device), torch.arange(n, device=device))
    assert abs(stats.pearsonr(values, other.cpu().numpy())[0]) < 0.03


@pytest.mark.parametrize("every_word", [0, 1, ALL - 1, ALL])
def test_uniforms_stay_inside_at_the_extremes(every_word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "random_words", lambda *a: torch.full((1, 1, 2), every_word, dtype=torch.int64))
    drawn = uniforms(Stream.ACCEPT, ints(0), ints(0)).item()
    assert 0.0 < drawn < 1.0


@devices
def test_device_does_not_matter(device: str) -> None:
    here = dropout_masks(ints(*SEEDS), torch.arange(len(SEEDS)), 5, 130, 0.3)
    there = dropout_masks(ints(*SEEDS, device=device), torch.arange(len(SEEDS), device=device), 5, 130, 0.3)
    assert there.device.type == device
    assert torch.equal(here, there.cpu())


def test_empty() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert dropout_masks(none, none, 5, 16, 0.3).shape == (0, 5, 16)
    assert uniforms(Stream.ACCEPT, none, none).shape == (0,)
