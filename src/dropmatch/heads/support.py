"""Which tokens heads are evaluated on, and the mass of all others.

N rows, K heads, S tokens in the support, V in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence


@dataclass(frozen=True)
class Distributions:
    """Target and draft on the vocabulary that they share, with the constraints of the request.

    Attributes:
        clean: [N, V].
        draft: [N, V], or None.
        bias: [N, V], or None.
    """

    clean: Tensor
    draft: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(evidence: Evidence) -> Distributions:
        """From the evidence of N rows."""
        vocab = common_vocab(evidence)
        clean = evidence.clean_logits[:, :vocab]
        draft = None if evidence.draft_logits is None else evidence.draft_logits[:, :vocab]
        if evidence.bias is None:
            return Distributions(clean, draft, None)
        bias = evidence.bias[:, :vocab]
        draft = None if draft is None else torch.where(bias.isneginf(), -torch.inf, draft.float())
        return Distributions(clean.float() + bias, draft, bias)

    @property
    def possible(self) -> Tensor:
        """How many tokens no constraint bans: [N] int64."""
        if self.bias is None:
            return torch.full_like(self.clean[:, 0], self.clean.shape[1], dtype=torch.int64)
        return (~self.clean.isneginf()).sum(dim=1)


@dataclass(frozen=True)
class Support:
    """Some tokens, and what lies outside them.

    Attributes:
        token_ids: [N, S] int64.
        excluded: [N, S] fp32: -inf where an id stands for the second time, else 0.
        clean: [N, S] fp32, with -inf where excluded.
        clean_tail: [N] fp32 log-sum-exp of the clean logits outside.
        draft, draft_tail: likewise, or None.
        band: [N, S] fp32: 0 for the tokens that the tail's fate is read off, else -inf.
    """

    token_ids: Tensor
    excluded: Tensor
    clean: Tensor
    clean_tail: Tensor
    draft: Tensor | None
    draft_tail: Tensor | None
    band: Tensor

    @staticmethod
    def of(distributions: Distributions, token_ids: Tensor, repeated: Tensor, median: Tensor) -> Support:
        """The support of N rows.

        Args:
            distributions: of target and draft.
            token_ids: [N, S].
            repeated: [N, S] bool, where an id stands for the second time.
            median: [N] clean logit up to which a token counts as one of the less likely.
        """
        excluded = torch.zeros_like(token_ids, dtype=torch.float32).masked_fill(repeated, -torch.inf)
        clean, clean_tail = _split(distributions.clean, token_ids, excluded)
        draft, draft_tail = None, None
        if distributions.draft is not None:
            draft, draft_tail = _split(distributions.draft, token_ids, excluded)
        band = torch.zeros_like(clean).masked_fill(clean > median[:, None], -torch.inf)
        return Support(token_ids, excluded, clean, clean_tail, draft, draft_tail, band)

    def tail(self, values: Tensor) -> Tensor:
        """Estimated log-sum-exp outside: what happened to the support's less likely half happened there too.

        Args:
            values: [N, n, S] logits on the support.

        Returns:
            [N, n].
        """
        reference = torch.logsumexp(self.clean + self.band, dim=1)[:, None]  # [N, 1]
        moved = torch.logsumexp(values + self.band[:, None], dim=2) - reference  # [N, n]
        return torch.where(reference.isneginf(), -torch.inf, self.clean_tail[:, None] + moved)


def common_vocab(evidence: Evidence) -> int:
    """Tokens that target and draft share; vocabularies may differ by padding at their end."""
    size = evidence.clean_logits.shape[1]
    return size if evidence.draft_logits is None else min(size, evidence.draft_logits.shape[1])


def _split(logits: Tensor, token_ids: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """Logits on a support and log-sum-exp of the rest: [N, V], [N, S], [N, S] -> [N, S], [N], both fp32."""
    inside = logits.gather(1, token_ids) + excluded
    if logits.device.type != "cpu":
        return inside, _log_sum_exp_outside(logits, token_ids)
    # one row at a time: what is larger comes from the system anew each time, and that takes longer than the sums
    rows = [_log_sum_exp_outside(logits[i : i + 1], token_ids[i : i + 1]) for i in range(logits.shape[0])]
    return inside, torch.cat(rows)


def _log_sum_exp_outside(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[N, V], [N, S] -> [N] fp32."""
    peak = logits.amax(dim=1, keepdim=True).float()  # [N, 1]
    peak = torch.where(peak.isneginf(), 0.0, peak)
    mass = (logits - peak).exp_()  # [N, V] fp32: the one temporary of that size
    mass.scatter_(1, token_ids, 0.0)
    return mass.sum(dim=1).log() + peak.squeeze(1)
