"""Gaussian heads: dropout heads without the dropout, drawn for the likeliest tokens only.

Dropping units of the input of a linear head with probability p and scaling the others by 1 / (1 - p) gives
logits of mean l (the clean ones) and covariance

    Cov(l_u, l_v) = s² Σ_j h_j² w_uj w_vj,    s² = p / (1 - p),

and since each is a sum over many units, they are nearly Gaussian. With A = W_S ⊙ h for the S tokens of the
support, heads are l + s L z with L Lᵀ = A Aᵀ (Cholesky) and z standard normal: no pass over the vocabulary, and
hundreds of heads for the price of a few. What follows the linear layer (a soft-cap, a scale) is applied to what
was drawn.

The support is the m likeliest tokens of the clean logits, likeliest first, then the draft's likeliest. So a
token's noise depends on likelier tokens only, and hardly on m.

N rows, G sets of K heads, S tokens in the support, V in the vocabulary, d units in the hidden state.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig
from dropmatch.heads.cluster import Cluster
from dropmatch.heads.head import Head
from dropmatch.heads.support import Distributions, Support, common_vocab
from dropmatch.masks import Stream, normals

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence

DRAFT_TOKENS = 8  # how many of the draft's likeliest tokens are in the support too
JITTER = 1e-5  # of the largest variance: what keeps the factor real when two tokens have (nearly) the same row


def gaussian_cluster(evidence: Evidence, config: AcceptanceConfig, head: Head) -> Cluster:
    """K Gaussian heads a row, keyed by seed and position: a cluster of N rows."""
    seeds = evidence.seeds if config.mask_seed is None else torch.full_like(evidence.seeds, config.mask_seed)
    distributions = Distributions.of(evidence)
    support = _support(evidence, distributions, config)
    noise = normals(Stream.GAUSSIAN, seeds, evidence.positions, config.heads, support.token_ids.shape[1])  # [N, K, S]
    logits = _drawn(evidence, config, head, support, noise)
    return Cluster.on(support, logits, distributions.possible)


def gaussian_sets(
    evidence: Evidence, distributions: Distributions, config: AcceptanceConfig, head: Head, sets: int
) -> Cluster:
    """G sets of K Gaussian heads, the same normal numbers for every row: a cluster of N * G rows."""
    support = _support(evidence, distributions, config)
    noise = _fixed_normals(sets, config.heads, support.token_ids.shape[1], evidence.hidden.device)  # [G * K, S]
    logits = _drawn(evidence, config, head, support, noise)  # [N, G * K, S]
    return Cluster.on(support, logits, distributions.possible, sets)


def logit_covariance(hidden: Tensor, rows: Tensor, dropout: float) -> Tensor:
    """Covariance of the logits under dropout of the head's input, before what follows the linear layer.

    Args:
        hidden: [N, d].
        rows: [N, S, d] the tokens' rows of the head.
        dropout: p in [0, 1).

    Returns:
        [N, S, S] fp32: p / (1 - p) Σ_j h_j² w_uj w_vj.
    """
    weighted = _weighted(hidden, rows)
    return dropout / (1.0 - dropout) * torch.bmm(weighted, weighted.transpose(1, 2))


def _drawn(evidence: Evidence, config: AcceptanceConfig, head: Head, support: Support, noise: Tensor) -> Tensor:
    """Logits of heads from standard normal numbers: [N, H, S] or [H, S] -> [N, H, S]."""
    rows, bias = head.rows(support.token_ids)  # [N, S, d], [N, S]
    weighted = _weighted(evidence.hidden, rows)
    products = torch.bmm(weighted, weighted.transpose(1, 2))  # A Aᵀ
    # the tiny constant is for a hidden state of zeros
    jitter = (JITTER * products.diagonal(dim1=1, dim2=2).amax(dim=1)).clamp_min(1e-30)  # [N]
    products.diagonal(dim1=1, dim2=2).add_(jitter[:, None])
    factor = torch.linalg.cholesky_ex(products).L  # [N, S, S]
    s = math.sqrt(config.dropout / (1.0 - config.dropout))
    moved = s * torch.matmul(noise, factor.transpose(1, 2))  # [N, H, S]

    raw = weighted.sum(dim=2) if bias is None else weighted.sum(dim=2) + bias  # [N, S]
    # as a difference, so that without dropout the heads are the clean logits to the last bit
    return support.clean[:, None] + (head.finish(raw[:, None] + moved) - head.finish(raw)[:, None])


def _weighted(hidden: Tensor, rows: Tensor) -> Tensor:
    """A = W_S ⊙ h: [N, d], [N, S, d] -> [N, S, d] fp32."""
    return rows * hidden.float()[:, None]


def _support(evidence: Evidence, distributions: Distributions, config: AcceptanceConfig) -> Support:
    """The likeliest tokens, first to last, and the draft's."""
    count = min(config.gaussian_tokens, common_vocab(evidence))
    _, ids = distributions.clean.likeliest(count)  # [N, m]
    parts = [ids, evidence.draft_tokens[:, None]]
    if distributions.draft is not None:
        parts.append(distributions.draft.likeliest(min(DRAFT_TOKENS, common_vocab(evidence)))[1])
    token_ids = torch.cat(parts, dim=1)  # [N, S]
    place = torch.arange(token_ids.shape[1], device=ids.device)
    # the first place of an id is not its own where it stands for the second time
    first = (token_ids[:, :, None] == token_ids[:, None, :]).int().argmax(dim=2)  # [N, S]
    band = place[count // 2 : count].expand(len(evidence), -1)
    return Support.of(distributions, token_ids, first != place, band)


@lru_cache(maxsize=16)
def _fixed_normals(sets: int, heads: int, tokens: int, device: torch.device) -> Tensor:
    """The normal numbers of all denoised verdicts: [G * K, S]; set g has the seed g, at position 0."""
    seeds = torch.arange(sets, device=device)
    return normals(Stream.GAUSSIAN, seeds, torch.zeros_like(seeds), heads, tokens).flatten(0, 1)
