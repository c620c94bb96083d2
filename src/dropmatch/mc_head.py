"""Monte Carlo dropout heads: the LM head on K dropped-out copies of the hidden state (equations 1 to 3).

The heads are evaluated on a *support*: the whole vocabulary, or a shortlist of the likeliest tokens with one
more bucket, the *tail*, that holds the mass of all others. Putting tokens into one bucket can only lower a
Jensen-Shannon divergence (data-processing inequality), and by no more than the tail's mass allows.

N rows, K heads, S tokens in the support, V in the vocabulary, d units in the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.masks import dropout_masks

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence

# bound on the temporaries of one chunk of rows; a row over the full vocabulary takes about 30 bytes a logit
CHUNK_BYTES = 64 << 20
BYTES_PER_LOGIT = 30
DRAFT_SHORTLIST = 256


class Head(Protocol):
    """All that a model does between the hidden state and its logits: head, soft-cap, scale, adapter."""

    vocab_size: int
    can_gather: bool

    def full(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: [n, d] -> [n, V]."""
        ...

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The same logits for some tokens only: [n, K, d], [n, S] int64 -> [n, K, S]."""
        ...


def gathered_logits(hidden: Tensor, token_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a plain linear head for some tokens only.

    Args:
        hidden: [n, K, d].
        token_ids: [n, S] int64.
        weight: [V, d].
        bias: [V] or None.

    Returns:
        [n, K, S].
    """
    if hidden.device.type == "cpu":
        # one row at a time: what is gathered stays in the cache, and a batched product would copy it again
        logits = torch.stack([F.linear(h, weight[ids]) for h, ids in zip(hidden, token_ids, strict=True)])
    else:
        logits = torch.bmm(hidden, F.embedding(token_ids, weight).transpose(1, 2))
    return logits if bias is None else logits + bias[token_ids][:, None]


@dataclass(frozen=True)
class Cluster:
    """K heads, their centroid and the draft on one support.

    Attributes:
        head_logits: [N, K, S] fp32.
        head_tail: [N, K] fp32, log-sum-exp of each head's logits outside the support; None if nothing is.
        centroid_logits: [N, S] fp32, mean of the heads' logits (equation 5).
        centroid_tail: [N] fp32, likewise.
        draft_logits: [N, S] fp32; None if the drafter has no distribution.
        draft_tail: [N] fp32, likewise.
        token_ids: [N, S] int64 ascending, duplicates have logits of -inf; None if the support is 0 .. S-1.
        possible: [N] int64, how many tokens no constraint bans; None if the support holds them all.
    """

    head_logits: Tensor
    head_tail: Tensor | None
    centroid_logits: Tensor
    centroid_tail: Tensor | None
    draft_logits: Tensor | None
    draft_tail: Tensor | None
    token_ids: Tensor | None
    possible: Tensor | None

    def head_log_probs(self) -> Tensor:
        """[N, K, S] (or S + 1 with a tail)."""
        return _log_softmax(self.head_logits, self.head_tail)

    def centroid_log_probs(self) -> Tensor:
        """p̄ of equation 5: [N, S] (or S + 1 with a tail)."""
        return _log_softmax(self.centroid_logits, self.centroid_tail)

    def draft_log_probs(self) -> Tensor:
        """[N, S] (or S + 1 with a tail)."""
        assert self.draft_logits is not None
        return _log_softmax(self.draft_logits, self.draft_tail)

    def uniform_log_probs(self) -> Tensor:
        """The uniform distribution on the same support: [N, S] (or S + 1 with a tail)."""
        present = ~self.centroid_logits.isneginf()  # [N, S]
        uniform = torch.zeros_like(self.centroid_logits).masked_fill(~present, -torch.inf)
        if self.centroid_tail is None:
            return _log_softmax(uniform, None)
        assert self.possible is not None
        outside = (self.possible - present.sum(dim=1)).float().log()  # [N]
        return _log_softmax(uniform, outside)

    def head_tokens(self) -> Tensor:
        """y⁽ⁱ⁾ = argmax p⁽ⁱ⁾, the lowest id on a tie: [N, K] int64."""
        index = self.head_logits.argmax(dim=-1)
        return index if self.token_ids is None else self.token_ids.gather(1, index)

    def majority_tokens(self, head_tokens: Tensor) -> Tensor:
        """Plurality of the heads' tokens [N, K], ties to the higher centroid logit: [N] int64 (equation 7)."""
        votes = (head_tokens[:, :, None] == head_tokens[:, None, :]).sum(dim=2)  # [N, K]
        best = votes == votes.amax(dim=1, keepdim=True)
        logit = self._centroid_logits_of(head_tokens)  # [N, K]
        return head_tokens.gather(1, torch.where(best, logit, -torch.inf).argmax(dim=1, keepdim=True)).squeeze(1)

    def centroid_log_prob_of(self, tokens: Tensor) -> Tensor:
        """log p̄(token) for tokens [N] in the support: [N] fp32."""
        log_z = torch.logsumexp(self.centroid_logits, dim=1)  # [N]
        if self.centroid_tail is not None:
            log_z = torch.logaddexp(log_z, self.centroid_tail)
        return self._centroid_logits_of(tokens[:, None]).squeeze(1) - log_z

    def _centroid_logits_of(self, tokens: Tensor) -> Tensor:
        """[N, n] token ids in the support -> [N, n]."""
        index = tokens if self.token_ids is None else torch.searchsorted(self.token_ids, tokens)
        return self.centroid_logits.gather(1, index)


def build_cluster(evidence: Evidence, config: AcceptanceConfig, head: Head) -> Cluster:
    """Equations 1 to 3 and 5 for the N rows of the evidence.

    Raises:
        SettingError: a shortlist is asked of a head whose rows cannot be gathered.
    """
    dropped = dropped_hidden(evidence, config)  # [N, K, d]
    vocab = common_vocab(evidence)
    if not uses_shortlist(config, head, vocab):
        logits = head.full(dropped.flatten(0, 1))[:, :vocab]  # [N*K, V]
        logits = logits.float().unflatten(0, dropped.shape[:2])  # [N, K, V]
        draft = None if evidence.draft_logits is None else evidence.draft_logits[:, :vocab].float()
        if evidence.bias is not None:
            bias = evidence.bias[:, :vocab]
            logits = logits + bias[:, None]
            draft = None if draft is None else _banned(draft, bias)
        return Cluster(logits, None, logits.mean(dim=1), None, draft, None, None, None)
    return _shortlist_cluster(evidence, config, head, dropped, vocab)


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


def rows_per_chunk(evidence: Evidence, config: AcceptanceConfig, head: Head) -> int:
    """How many rows to judge at once so that the temporaries stay near CHUNK_BYTES."""
    vocab = common_vocab(evidence)
    if uses_shortlist(config, head, vocab):
        size = config.shortlist_size + DRAFT_SHORTLIST
        row = size * (config.heads * BYTES_PER_LOGIT + evidence.hidden.shape[1] * evidence.hidden.element_size())
        row += vocab * 16
    else:
        row = vocab * config.heads * BYTES_PER_LOGIT
    return max(1, CHUNK_BYTES // row)


def common_vocab(evidence: Evidence) -> int:
    """Tokens that target and draft share; vocabularies may differ by padding at their end."""
    size = evidence.clean_logits.shape[1]
    return size if evidence.draft_logits is None else min(size, evidence.draft_logits.shape[1])


def _shortlist_cluster(
    evidence: Evidence, config: AcceptanceConfig, head: Head, dropped: Tensor, vocab: int
) -> Cluster:
    """The cluster on the M likeliest tokens of the clean logits and the draft's likeliest ones.

    dropped: [N, K, d].
    """
    clean = evidence.clean_logits[:, :vocab].float()  # [N, V]
    draft = None if evidence.draft_logits is None else evidence.draft_logits[:, :vocab].float()
    if evidence.bias is not None:
        bias = evidence.bias[:, :vocab]
        clean = clean + bias
        draft = None if draft is None else _banned(draft, bias)

    top = clean.topk(config.shortlist_size, dim=1)  # [N, M]
    parts = [top.indices, evidence.draft_tokens[:, None]]
    if draft is not None:
        parts.append(draft.topk(DRAFT_SHORTLIST, dim=1).indices)
    token_ids = torch.cat(parts, dim=1).sort(dim=1).values  # [N, S]
    repeated = torch.zeros_like(token_ids, dtype=torch.bool)
    repeated[:, 1:] = token_ids[:, 1:] == token_ids[:, :-1]
    excluded = torch.zeros_like(token_ids, dtype=torch.float32).masked_fill(repeated, -torch.inf)  # [N, S]

    clean_support, clean_tail = _split(clean, token_ids, excluded)
    shift = excluded if evidence.bias is None else excluded + evidence.bias[:, :vocab].gather(1, token_ids)
    logits = head.gather(dropped, token_ids).float() + shift[:, None]  # [N, K, S]
    centroid = logits.mean(dim=1)  # [N, S]
    # what dropout does to the tail's mass is read off the shortlist's less likely half
    median = top.values[:, config.shortlist_size // 2, None]  # [N, 1]
    band = torch.zeros_like(clean_support).masked_fill(clean_support > median, -torch.inf)  # [N, S]
    reference = torch.logsumexp(clean_support + band, dim=1)  # [N]

    def tail(values: Tensor) -> Tensor:
        """Estimated log-sum-exp outside the support: [N, n, S] -> [N, n]."""
        moved = torch.logsumexp(values + band[:, None], dim=2) - reference[:, None]
        return torch.where(reference[:, None].isneginf(), -torch.inf, clean_tail[:, None] + moved)

    draft_support, draft_tail = (None, None) if draft is None else _split(draft, token_ids, excluded)
    return Cluster(
        head_logits=logits,
        head_tail=tail(logits),
        centroid_logits=centroid,
        centroid_tail=tail(centroid[:, None]).squeeze(1),
        draft_logits=draft_support,
        draft_tail=draft_tail,
        token_ids=token_ids,
        possible=torch.full_like(repeated[:, 0], vocab, dtype=torch.int64)
        if evidence.bias is None
        else (~clean.isneginf()).sum(dim=1),
    )


def _split(logits: Tensor, token_ids: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """Logits on a support and log-sum-exp of the rest: [N, V], [N, S], [N, S] -> [N, S], [N]."""
    rest = logits.scatter(1, token_ids, -torch.inf)
    return logits.gather(1, token_ids) + excluded, torch.logsumexp(rest, dim=1)


def _log_softmax(logits: Tensor, tail: Tensor | None) -> Tensor:
    """[..., S] and [...] -> [..., S] or, with a tail, [..., S + 1]."""
    if tail is not None:
        logits = torch.cat([logits, tail[..., None]], dim=-1)
    return logits.log_softmax(dim=-1)


def _banned(logits: Tensor, bias: Tensor) -> Tensor:
    """The draft's logits without the tokens that the target's constraints ban: [N, V], [N, V] -> [N, V]."""
    return torch.where(bias.isneginf(), -torch.inf, logits)
