"""Which tokens heads are evaluated on, and the mass of all others.

N rows, K heads, S tokens in the support, V in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.heads.vocabulary import Vocabulary

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence


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
