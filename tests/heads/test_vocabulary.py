"""The vocabulary in one pass: the likeliest token, and the mass of a support and of all else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dropmatch.heads import likeliest_and_mass, likeliest_token
from dropmatch.heads.vocabulary import Vocabulary


@given(
    rows=st.integers(0, 4),
    vocab=st.integers(1, 400),
    levels=st.integers(1, 30),
    banned=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_it_is_argmax_with_ties_and_bans(
    rows: int, vocab: int, levels: int, banned: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab), generator=generator).to(dtype)  # few values, so that many are equal
    logits[torch.rand(rows, vocab, generator=generator) < banned] = -torch.inf
    assert torch.equal(likeliest_token(logits), logits.argmax(dim=1))
    token, mass = likeliest_and_mass(logits)
    assert torch.equal(token, logits.argmax(dim=1))
    assert bool((mass.double() <= logits.double().logsumexp(dim=1) + 1e-5).all())
    assert bool((mass >= logits.amax(dim=1)).all())


@pytest.mark.parametrize("place", [0, 63, 64, 151_871, 151_935])
def test_a_real_vocabulary_to_its_last_token(place: int) -> None:
    logits = torch.randn(3, 151_936)
    logits[1, place] = 50.0
    logits[2, place] = torch.inf
    wanted = logits.argmax(dim=1)
    assert wanted[1] == wanted[2] == place
    assert torch.equal(likeliest_token(logits), wanted)
    assert torch.equal(likeliest_token(logits[:, ::2]), logits[:, ::2].argmax(dim=1))
    logits[1, place // 2] = torch.nan
    assert likeliest_token(logits)[1] == place // 2 == logits.argmax(dim=1)[1]


@given(
    rows=st.integers(1, 5),
    vocab=st.integers(2, 400),
    size=st.integers(1, 8),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    banned=st.sampled_from([0.0, 0.5, 0.98]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_a_support_and_its_tail_are_the_whole(
    rows: int, vocab: int, size: int, spread: float, banned: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    logits[:, 1:][torch.rand(rows, vocab - 1, generator=generator) < banned] = -torch.inf
    ids = torch.randint(vocab, (rows, size), generator=generator)
    ids = torch.cat([ids, logits.argmax(dim=1, keepdim=True), ids[:, :1]], dim=1)  # one stands there twice
    values, tail = Vocabulary(logits).split(ids)
    exact = logits.double()
    assert torch.equal(values, logits.float().gather(1, ids))
    outside = exact.scatter(1, ids, -torch.inf).logsumexp(dim=1)
    whole = exact.logsumexp(dim=1)
    # a mass below what fp32 can say beside the largest probability is as good as none
    torch.testing.assert_close((tail.double() - whole).exp(), (outside - whole).exp(), rtol=1e-4, atol=1e-30)
    token = ids[:, 0]
    wanted = exact.softmax(dim=1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(Vocabulary(logits).probability(token).double(), wanted, rtol=1e-4, atol=1e-30)


def test_nothing_is_allowed_or_nothing_is_asked() -> None:
    banned = torch.full((2, 100), -torch.inf)
    ids = torch.tensor([[0, 5], [3, 3]])
    values, tail = Vocabulary(banned).split(ids)
    assert bool(values.isneginf().all())
    assert bool(tail.isneginf().all())
    # all within the support
    assert bool(Vocabulary(torch.tensor([[1.0, 2.0]])).split(torch.tensor([[1, 0]]))[1].isneginf().all())


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_row_is_what_it_is_alone(rows: int) -> None:
    """To the last bit, in a vocabulary that is large enough for sums to be split over threads."""
    logits = torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(rows)).bfloat16() * 3
    ids = Vocabulary(logits).likeliest(32)[1]
    values, tail = Vocabulary(logits).split(ids)
    for n in range(rows):
        alone = Vocabulary(logits[n : n + 1]).split(ids[n : n + 1])
        assert torch.equal(alone[0][0], values[n])
        assert torch.equal(alone[1][0], tail[n])
