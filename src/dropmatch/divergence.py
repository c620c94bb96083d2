"""Jensen-Shannon divergence."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def js_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """JS(p ‖ q) = ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½ (p + q): natural logarithm, in [0, ln 2].

    Args:
        log_p: [..., S] log-probabilities; -inf is a probability of zero.
        log_q: [..., S], broadcastable against log_p.

    Returns:
        [...] fp32, clamped at 0 (rounding can make the sum of a tiny divergence negative).
    """
    log_p, log_q = log_p.float(), log_q.float()
    # summed element by element: p log(p/m) and q log(q/m) cancel there, not between two large sums
    total = _relative(log_p, log_q) + _relative(log_q, log_p)
    return (0.5 * total.sum(dim=-1)).clamp_min(0.0)


def _relative(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / m) = p (ln 2 - log(1 + q/p)), element by element; 0 where p is 0. [..., S], [..., S] -> [..., S]."""
    terms = log_p.exp() * (math.log(2.0) - F.softplus(log_q - log_p))
    return terms.masked_fill(log_p.isneginf(), 0.0)
