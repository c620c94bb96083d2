"""Jensen-Shannon divergence."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

LOWEST = -80.0


def js_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """JS(p ‖ q) = ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½ (p + q): natural logarithm, in [0, ln 2].

    Args:
        log_p: [..., S] log-probabilities; -inf is a probability of zero.
        log_q: [..., S], broadcastable against log_p.

    Returns:
        [...] fp32, clamped at 0 (rounding can make the sum of a tiny divergence negative).
    """
    # what a probability of e^-80 adds is lost in fp32; without infinities nothing need be masked, and the exponential
    # of what is not a normal number is slow
    log_p, log_q = log_p.float().clamp_min(LOWEST), log_q.float().clamp_min(LOWEST)
    # With r = log(q/p): p log(p/m) = p (ln 2 - log(1 + e^r)), q log(q/m) = q (ln 2 - log(1 + e^-r)), and
    # log(1 + e^±r) = max(±r, 0) + log(1 + e^-|r|). Summed element by element, since they cancel there;
    # in place, since these are the largest tensors of a verdict.
    ratio = log_q - log_p
    share = F.softplus(ratio.abs().neg_()).neg_().add_(math.log(2.0))
    total = ratio.clamp_min(0.0).neg_().add_(share).mul_(log_p.exp_())
    total += share.add_(ratio.clamp_max_(0.0)).mul_(log_q.exp_())
    return total.sum(dim=-1).mul_(0.5).clamp_min_(0.0)
