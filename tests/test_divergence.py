"""Jensen-Shannon divergence: scipy's, closed forms and what must hold of any."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from acceptance import reference
from acceptance.support import INF, devices
from dropmatch.divergence import js_divergence

LN2 = math.log(2.0)
logit = st.one_of(st.floats(-30, 30, width=32), st.just(-INF))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 12))
    rows = [draw(st.lists(logit, min_size=size, max_size=size)) for _ in range(2)]
    assume(all(max(row) > -INF for row in rows))
    p, q = (torch.tensor(row, dtype=torch.float32).log_softmax(0) for row in rows)
    return p, q


def close(value: float, expected: float) -> bool:
    return abs(value - expected) < 1e-6 + 1e-5 * expected


@devices
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0, 40.0])
def test_equals_scipy(scale: float, device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    p = (torch.randn(50, 300, generator=generator) * scale).log_softmax(1)
    q = (torch.randn(50, 300, generator=generator) * scale).log_softmax(1)
    made = js_divergence(p.to(device), q.to(device)).cpu().double().numpy()
    expected = jensenshannon(p.double().exp().numpy(), q.double().exp().numpy(), base=math.e, axis=1) ** 2
    np.testing.assert_allclose(made, expected, rtol=2e-5, atol=3e-7)


@given(pair=pairs())
@settings(max_examples=200, deadline=None)
def test_equals_the_sum_by_hand(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q = pair
    made = js_divergence(p, q)
    assert made.dtype == torch.float32
    assert close(made.item(), reference.js(p.double().exp().tolist(), q.double().exp().tolist()))


@given(pair=pairs())
@settings(max_examples=200, deadline=None)
def test_symmetric_and_between_zero_and_ln_two(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q = pair
    there, back = js_divergence(p, q).item(), js_divergence(q, p).item()
    assert abs(there - back) < 1e-6
    assert 0.0 <= there <= LN2 + 1e-6


@given(pair=pairs())
@settings(max_examples=100, deadline=None)
def test_zero_for_equals_only(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q = pair
    assert js_divergence(p, p).item() < 1e-6
    apart = (p.exp() - q.exp()).abs().sum().item()  # Pinsker: JS >= ||p - q||^2 / 8
    assert js_divergence(p, q).item() >= apart**2 / 8 - 1e-6


@given(pair=pairs(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_one_bucket_for_several_tokens_only_lowers_it(
    pair: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    p, q = pair
    inside = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p))), dtype=torch.bool)

    def bucketed(row: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[~inside], row[inside].logsumexp(0, keepdim=True)])

    whole = js_divergence(p, q).item()
    assert js_divergence(bucketed(p), bucketed(q)).item() <= whole + 1e-6
    # and by no more than the mass that went into the bucket
    mass = 0.5 * float(p[inside].exp().sum() + q[inside].exp().sum())
    assert js_divergence(bucketed(p), bucketed(q)).item() >= whole - mass * LN2 - 1e-6


@pytest.mark.parametrize("a", [0.5, 0.1, 1e-3, 1e-6])
def test_closed_form_of_a_shared_token(a: float) -> None:
    """p = (a, 1-a, 0), q = (a, 0, 1-a): JS = (1 - a) ln 2."""
    p = torch.tensor([math.log(a), math.log1p(-a), -INF])
    q = torch.tensor([math.log(a), -INF, math.log1p(-a)])
    assert js_divergence(p, q).item() == pytest.approx((1 - a) * LN2, rel=1e-5)


def test_closed_form_of_a_point_and_a_uniform() -> None:
    """JS(point, uniform over n) = ½ ln(2n/(n+1)) + ½ [1/n ln(2/(n+1)) + (n-1)/n ln 2]."""
    for n in (2, 3, 10, 1000):
        point = torch.full((n,), -INF)
        point[n // 2] = 0.0
        uniform = torch.full((n,), -math.log(n))
        expected = 0.5 * math.log(2 * n / (n + 1)) + 0.5 * (math.log(2 / (n + 1)) / n + (n - 1) / n * LN2)
        assert js_divergence(point, uniform).item() == pytest.approx(expected, rel=1e-5)


def test_disjoint_supports_give_ln_two_and_no_nan() -> None:
    p = torch.tensor([0.0, -INF, -INF])
    q = torch.tensor([-INF, 0.0, -INF])
    assert js_divergence(p, q).item() == pytest.approx(LN2, abs=1e-6)
    assert js_divergence(p, p).item() == 0.0


def test_tiny_divergences_do_not_drown_in_rounding() -> None:
    """At real vocabulary sizes a divergence of 1e-6 must still be told from 0."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50000, generator=generator, dtype=torch.float64) * 2
    other = logits + 3e-3 * torch.randn(50000, generator=generator, dtype=torch.float64)
    p, q = logits.log_softmax(0), other.log_softmax(0)
    expected = float(jensenshannon(p.exp().numpy(), q.exp().numpy(), base=math.e)) ** 2
    assert 5e-7 < expected < 2e-6
    assert js_divergence(p.float(), q.float()).item() == pytest.approx(expected, abs=2e-7)
    assert js_divergence(p.float(), p.float()).item() < 1e-6


def test_broadcasts_heads_against_a_centroid() -> None:
    generator = torch.Generator().manual_seed(6)
    heads = torch.randn(4, 5, 20, generator=generator).log_softmax(-1)
    centroid = torch.randn(4, 20, generator=generator).log_softmax(-1)
    made = js_divergence(heads, centroid[:, None])
    assert made.shape == (4, 5)
    for n in range(4):
        for k in range(5):
            assert made[n, k].item() == pytest.approx(js_divergence(heads[n, k], centroid[n]).item(), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_works_in_fp32_whatever_comes_in(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    p = torch.randn(30, 200, generator=generator).log_softmax(1).to(dtype)
    q = torch.randn(30, 200, generator=generator).log_softmax(1).to(dtype)
    made = js_divergence(p, q)
    assert made.dtype == torch.float32
    assert torch.equal(made, js_divergence(p.float(), q.float()))
