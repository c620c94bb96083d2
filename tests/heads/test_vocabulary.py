"""The likeliest token, found by blocks, is torch's own argmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dropmatch.heads import likeliest_token


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
