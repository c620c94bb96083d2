"""Which tokens heads are evaluated on, and the mass of all others.

What has the size of the vocabulary is read in as few passes as can be: they are most of what a verdict costs.

N rows, K heads, S tokens in the support, V in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence


BLOCK = 64  # tokens whose maximum is looked at first when the likeliest are searched


class Vocabulary:
    """One distribution over the vocabulary for N rows.

    Args:
        logits: [N, V].
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        # on a CPU row by row: what is larger comes from the system anew each time, which takes longer than the sums
        self._size = 1 if logits.device.type == "cpu" else max(1, logits.shape[0])
        self._parts = [part.float() for part in logits.split(self._size)]  # [n, V] each
        self._blocks, self._rest = divmod(logits.shape[1], BLOCK)

    @cached_property
    def _peaks(self) -> Tensor:
        """The largest logit of each block of BLOCK tokens: [N, blocks]."""
        body = self._blocks * BLOCK
        return torch.cat([part[:, :body].unflatten(1, (self._blocks, BLOCK)).amax(dim=2) for part in self._parts])

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids of the likeliest tokens, first to last, the lower id first on a tie: [N, m] fp32, [N, m]."""
        ids = self._candidates(count)
        values = self._at(ids)
        if ids.shape[1] > count:
            # the lower id first needs a stable sort by value of ids in order; of the few that are left only
            best = values.topk(count, dim=1, sorted=False).indices
            ids = ids.gather(1, best).sort(dim=1).values
            values = self._at(ids)
        values, order = values.sort(dim=1, descending=True, stable=True)
        return values, ids.gather(1, order)

    def split(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits on a support, and log-sum-exp of the rest: [N, S] -> [N, S], [N], both fp32."""
        peak = self.logits.amax(dim=1) if self._blocks == 0 else self._peaks.amax(dim=1)  # [N]
        if self._blocks and self._rest:
            peak = torch.maximum(peak, self.logits[:, -self._rest :].amax(dim=1))
        peak = torch.where(peak.isneginf(), 0.0, peak.float())[:, None]
        sums = []
        for part, top, ids in zip(self._parts, peak.split(self._size), token_ids.split(self._size), strict=True):
            mass = (part - top).exp_()  # [n, V]: the one temporary of that size
            sums.append(mass.scatter_(1, ids, 0.0).sum(dim=1))
        return self._at(token_ids), torch.cat(sums).log() + peak.squeeze(1)

    def _candidates(self, count: int) -> Tensor:
        """Ids among which the likeliest are; in order if they are m: [N, m or more].

        The m blocks of the largest maxima hold them, so that most of the vocabulary is read only once.
        """
        vocab, device = self.logits.shape[1], self.logits.device
        if self._blocks <= 2 * count:
            return torch.arange(vocab, device=device).expand(self.logits.shape[0], -1)
        chosen = self._peaks.topk(count, dim=1, sorted=False).indices  # [N, m]
        ids = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)  # [N, m * BLOCK]
        if self._rest:
            last = torch.arange(vocab - self._rest, vocab, device=device).expand(self.logits.shape[0], -1)
            ids = torch.cat([ids, last], dim=1)
        return ids

    def _at(self, token_ids: Tensor) -> Tensor:
        """[N, n] -> [N, n] fp32."""
        return self.logits.gather(1, token_ids).float()


@dataclass(frozen=True)
class Distributions:
    """Target and draft on the vocabulary that they share, with the constraints of the request.

    Attributes:
        clean: of N rows.
        draft: likewise, or None.
        bias: [N, V], or None.
        possible: [N] int64, how many tokens no constraint bans.
    """

    clean: Vocabulary
    draft: Vocabulary | None
    bias: Tensor | None
    possible: Tensor

    @staticmethod
    def of(evidence: Evidence) -> Distributions:
        """From the evidence of N rows."""
        clean, draft, bias = constrained(evidence)
        if bias is None:
            possible = torch.full_like(evidence.positions, clean.shape[1])
        else:
            possible = (~clean.isneginf()).sum(dim=1)
        return Distributions(Vocabulary(clean), None if draft is None else Vocabulary(draft), bias, possible)


@dataclass(frozen=True)
class Support:
    """Some tokens, and what lies outside them.

    Attributes:
        token_ids: [N, S] int64.
        excluded: [N, S] fp32: -inf where an id stands for the second time, else 0.
        clean: [N, S] fp32, with -inf where excluded.
        clean_tail: [N] fp32 log-sum-exp of the clean logits outside.
        draft, draft_tail: likewise, or None.
        band: [N, B] int64 places of the tokens that the tail's fate is read off: the less likely half of the
            target's likeliest.
    """

    token_ids: Tensor
    excluded: Tensor
    clean: Tensor
    clean_tail: Tensor
    draft: Tensor | None
    draft_tail: Tensor | None
    band: Tensor

    @staticmethod
    def of(distributions: Distributions, token_ids: Tensor, repeated: Tensor, band: Tensor) -> Support:
        """The support of N rows: [N, S] int64, [N, S] bool (an id stands there for the second time), [N, B]."""
        excluded = torch.zeros_like(token_ids, dtype=torch.float32).masked_fill(repeated, -torch.inf)
        clean, clean_tail = distributions.clean.split(token_ids)
        draft, draft_tail = None, None
        if distributions.draft is not None:
            draft, draft_tail = distributions.draft.split(token_ids)
            draft = draft + excluded
        return Support(token_ids, excluded, clean + excluded, clean_tail, draft, draft_tail, band)

    def tail(self, values: Tensor) -> Tensor:
        """Estimated log-sum-exp outside: what happened to the less likely half of the target's likeliest.

        Args:
            values: [N, n, S] logits on the support.

        Returns:
            [N, n].
        """
        reference = torch.logsumexp(self.clean.gather(1, self.band), dim=1)[:, None]  # [N, 1]
        there = values.gather(2, self.band[:, None].expand(-1, values.shape[1], -1))  # [N, n, B]
        moved = torch.logsumexp(there, dim=2) - reference  # [N, n]
        return torch.where(reference.isneginf(), -torch.inf, self.clean_tail[:, None] + moved)


def common_vocab(evidence: Evidence) -> int:
    """Tokens that target and draft share; vocabularies may differ by padding at their end."""
    size = evidence.clean_logits.shape[1]
    return size if evidence.draft_logits is None else min(size, evidence.draft_logits.shape[1])


def constrained(evidence: Evidence) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Clean and draft logits and the bias on the common vocabulary; what is banned is so in all: [N, V] each."""
    vocab = common_vocab(evidence)
    clean = evidence.clean_logits[:, :vocab]
    draft = None if evidence.draft_logits is None else evidence.draft_logits[:, :vocab]
    if evidence.bias is None:
        return clean, draft, None
    bias = evidence.bias[:, :vocab]
    draft = None if draft is None else torch.where(bias.isneginf(), -torch.inf, draft.float())
    return clean.float() + bias, draft, bias
