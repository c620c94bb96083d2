"""Monte Carlo dropout heads: the LM head on K dropped-out copies of the hidden state (equations 1 to 3).

They are evaluated on the whole vocabulary, or on a shortlist of the likeliest tokens with a tail.

N rows, K heads, S tokens in the support, V in the vocabulary, d units in the hidden state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads.cluster import Cluster
from dropmatch.heads.head import Head
from dropmatch.heads.support import Distributions, Support, common_vocab, constrained
from dropmatch.masks import dropout_masks

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence

DRAFT_SHORTLIST = 256


def dropout_cluster(evidence: Evidence, config: AcceptanceConfig, head: Head) -> Cluster:
    """Equations 1 to 3 and 5 for the N rows of the evidence.

    Raises:
        SettingError: a shortlist is asked of a head whose rows cannot be gathered.
    """
    dropped = dropped_hidden(evidence, config)  # [N, K, d]
    vocab = common_vocab(evidence)
    if uses_shortlist(config, head, vocab):
        return _shortlist_cluster(evidence, config, head, dropped)
    logits = head.full(dropped.flatten(0, 1))[:, :vocab]  # [N*K, V]
    logits = logits.float().unflatten(0, dropped.shape[:2])  # [N, K, V]
    _, draft, bias = constrained(evidence)
    logits = logits if bias is None else logits + bias[:, None]
    draft = None if draft is None else draft.float()
    return Cluster(logits, None, logits.mean(dim=1), None, draft, None, None, None)


def dropped_hidden(evidence: Evidence, config: AcceptanceConfig) -> Tensor:
    """h⁽ⁱ⁾ = h ⊙ m⁽ⁱ⁾ / (1 - p) (equation 2), in the dtype of the hidden state: [N, K, d]."""
    seeds = evidence.seeds if config.mask_seed is None else torch.full_like(evidence.seeds, config.mask_seed)
    units = evidence.hidden.shape[1]
    keep = dropout_masks(seeds, evidence.positions, config.heads, units, config.dropout)
    hidden = evidence.hidden.float()[:, None] * keep / (1.0 - config.dropout)
    return hidden.to(evidence.hidden.dtype)


def uses_shortlist(config: AcceptanceConfig, head: Head, vocab: int) -> bool:
    """Whether the heads are evaluated on a shortlist.

    Raises:
        SettingError: "shortlist" is asked of a head whose rows cannot be gathered.
    """
    if config.support == "shortlist" and not head.can_gather:
        raise SettingError(
            "support='shortlist' gathers rows of the LM head, which this head (quantised, or wrapped by an "
            "adapter) does not offer: use support='full', or 'auto' to let the head decide"
        )
    small = vocab <= config.shortlist_size + DRAFT_SHORTLIST
    return config.support != "full" and head.can_gather and not small


def _shortlist_cluster(evidence: Evidence, config: AcceptanceConfig, head: Head, dropped: Tensor) -> Cluster:
    """The cluster on the M likeliest tokens of the clean logits and the draft's likeliest ones.

    dropped: [N, K, d].
    """
    distributions = Distributions.of(evidence)
    _, likeliest = distributions.clean.likeliest(config.shortlist_size)  # [N, M]
    parts = [likeliest, evidence.draft_tokens[:, None]]
    if distributions.draft is not None:
        parts.append(distributions.draft.likeliest(DRAFT_SHORTLIST)[1])
    token_ids = torch.cat(parts, dim=1).sort(dim=1).values  # [N, S]
    repeated = torch.zeros_like(token_ids, dtype=torch.bool)
    repeated[:, 1:] = token_ids[:, 1:] == token_ids[:, :-1]
    # the first place of an id, should it stand there twice
    band = torch.searchsorted(token_ids, likeliest[:, config.shortlist_size // 2 :].contiguous())
    support = Support.of(distributions, token_ids, repeated, band)

    shift = support.excluded
    if distributions.bias is not None:
        shift = shift + distributions.bias.gather(1, token_ids)
    logits = head.gather(dropped, token_ids).float() + shift[:, None]  # [N, K, S]
    return Cluster.on(support, logits, distributions.possible)
