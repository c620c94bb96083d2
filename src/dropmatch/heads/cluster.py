"""K heads, their centroid and the draft on one support, ready for a rule.

A *support* is the whole vocabulary, or some of its tokens with one more bucket, the *tail*, that holds the mass
of all others. Putting tokens into one bucket can only lower a Jensen-Shannon divergence (data-processing
inequality), and by no more than the tail's mass allows.

N rows, K heads, S tokens in the support, V in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dropmatch.heads.support import Support


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
        token_ids: [N, S] int64; where an id stands for the second time its logits are -inf. None if the support
            is 0 .. S-1.
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

    @staticmethod
    def on(support: Support, head_logits: Tensor, possible: Tensor, sets: int = 1) -> Cluster:
        """From logits of G sets of K heads on a support: a cluster of N * G rows, those of one support together.

        Args:
            support: [N, S].
            head_logits: [N, G * K, S].
            possible: [N].
            sets: G.
        """
        centroid = head_logits.unflatten(1, (sets, -1)).mean(dim=2)  # [N, G, S]

        def each(tensor: Tensor | None) -> Tensor | None:
            """[N, ...] -> [N * G, ...]."""
            if tensor is None or sets == 1:
                return tensor
            return tensor[:, None].expand(-1, sets, *tensor.shape[1:]).flatten(0, 1)

        return Cluster(
            head_logits=head_logits.unflatten(1, (sets, -1)).flatten(0, 1),
            head_tail=support.tail(head_logits).unflatten(1, (sets, -1)).flatten(0, 1),
            centroid_logits=centroid.flatten(0, 1),
            centroid_tail=support.tail(centroid).flatten(0, 1),
            draft_logits=each(support.draft),
            draft_tail=each(support.draft_tail),
            token_ids=each(support.token_ids),
            possible=each(possible),
        )

    def head_log_probs(self) -> Tensor:
        """[N, K, S] (or S + 1 with a tail)."""
        return _log_softmax(self.head_logits, self.head_tail)

    @cached_property
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
        logit = self.centroid_logits.gather(1, self._places(head_tokens))  # [N, K]
        return head_tokens.gather(1, torch.where(best, logit, -torch.inf).argmax(dim=1, keepdim=True)).squeeze(1)

    def centroid_log_prob_of(self, tokens: Tensor) -> Tensor:
        """log p̄(token) for tokens [N] in the support: [N] fp32."""
        return self.centroid_log_probs.gather(1, self._places(tokens[:, None])).squeeze(1)

    def _places(self, tokens: Tensor) -> Tensor:
        """Where token ids stand in the support: [N, n] -> [N, n]."""
        if self.token_ids is None:
            return tokens
        here = self.token_ids[:, None, :] == tokens[:, :, None]  # [N, n, S]
        return here.int().argmax(dim=2)


def _log_softmax(logits: Tensor, tail: Tensor | None) -> Tensor:
    """[..., S] and [...] -> [..., S] or, with a tail, [..., S + 1]."""
    if tail is not None:
        logits = torch.cat([logits, tail[..., None]], dim=-1)
    return logits.log_softmax(dim=-1)
