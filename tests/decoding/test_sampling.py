"""Single steps of sampling: inverse CDF, residual, acceptance, and what a processor sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dropmatch.decoding.sampling import TokenChooser, pick, rejection_accepts, residual
from dropmatch.masks import Stream

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=1, max_size=12).filter(any)
unit = st.floats(2.0**-54, 1.0 - 2.0**-53)  # what `uniforms` can give


@given(values=weights, uniform=unit)
@settings(max_examples=300, deadline=None)
def test_pick_is_the_inverse_cdf(values: list[float], uniform: float) -> None:
    token = int(pick(torch.tensor(values, dtype=torch.float64), uniform))
    assert values[token] > 0, "a token without weight is never picked"
    total = sum(values)
    assert sum(values[:token]) <= uniform * total * (1 + 1e-9)
    assert sum(values[: token + 1]) >= uniform * total * (1 - 1e-9)


def test_pick_at_the_ends() -> None:
    row = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert int(pick(row, 1e-300)) == 1
    assert int(pick(row, 1 - 1e-16)) == 3
    assert int(pick(row * 1e-3, 0.2999)) == 1, "weights need not be normalised"
    assert int(pick(row * 1e-3, 0.3001)) == 3
    assert pick(row, 0.5).shape == ()
    assert pick(row, 0.5).dtype == torch.int64


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.5, 0.2, 0.1])
    torch.testing.assert_close(residual(p, q, torch.tensor(1)), torch.tensor([0.3, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(residual(p, None, torch.tensor(1)), torch.tensor([0.5, 0.0, 0.2, 0.0]))
    torch.testing.assert_close(residual(p, q[:3], torch.tensor(1)), torch.tensor([0.3, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(residual(p[:3], q, torch.tensor(1)), torch.tensor([0.3, 0.0, 0.0]))
    torch.testing.assert_close(residual(p, p, torch.tensor(1)), p)
    assert p.tolist() == torch.tensor([0.5, 0.3, 0.2, 0.0]).tolist(), "the inputs are left alone"


def test_acceptance_probability_is_min_1_p_over_q() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2, 0.0]]), torch.tensor([[0.25, 0.6, 0.05, 0.1]])
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for token, expected in enumerate([1.0, 0.5, 1.0, 0.0]):
        tokens = torch.full((4000,), token)
        share = rejection_accepts(p.expand(4000, 4), q.expand(4000, 4), tokens, uniform).double().mean()
        assert abs(float(share) - expected) <= 1 / 4000
        share = rejection_accepts(p.expand(4000, 4), None, tokens, uniform).double().mean()
        assert abs(float(share) - float(p[0, token])) <= 1 / 4000


def test_a_processor_sees_the_prefix_of_each_row() -> None:
    seen: list[list[int]] = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        seen.append(ids[0].tolist())
        scores[0, 0] = 100.0 * len(seen)  # in place, as some processors do
        return scores

    logits = torch.zeros(3, 4)
    out = TokenChooser(processors=(processor,)).process(torch.tensor([5, 6, 7, 8]), logits)
    assert seen == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert out[:, 0].tolist() == [100.0, 200.0, 300.0]
    assert logits.abs().sum() == 0, "the logits themselves are left alone"


@pytest.mark.parametrize("stream", [Stream.ACCEPT, Stream.TARGET_TOKEN, Stream.DRAFT_TOKEN])
def test_uniform_numbers(stream: Stream) -> None:
    values = torch.tensor([[TokenChooser(seed=s).uniform(stream, i) for i in range(40)] for s in range(-20, 20)])
    assert 0 < float(values.min()) < 0.01
    assert 0.99 < float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 0.03
    assert values.unique().numel() == values.numel()
    assert TokenChooser(seed=3).uniform(stream, 7) == TokenChooser(seed=3).uniform(stream, 7)
    assert len({TokenChooser(seed=3).uniform(s, 7) for s in Stream}) == len(Stream)
