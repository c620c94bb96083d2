"""From logits to tokens: processors, temperature and top-k/p, and modified rejection sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropmatch.masks import Stream, uniforms

# a logits processor of transformers: (ids [1, T], scores [1, V]) -> scores [1, V]
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TokenChooser:
    """How a request turns logits into tokens.

    Attributes:
        processors: hard constraints and penalties, applied before temperature and top-k/p; see the prefix.
        warpers: temperature, top-k, top-p; used only when sampling.
        sample: sample, or take the argmax.
        seed: seed of the sequence; with a token's position it keys every random number.
    """

    processors: Sequence[Processor] = ()
    warpers: Sequence[Processor] = ()
    sample: bool = False
    seed: int = 0

    def process(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """Logits after the processors, row i seeing the prefix without its last n - 1 - i tokens.

        Args:
            prefix: [T] the sequence up to and including the token before the last row's.
            logits: [n, V].

        Returns:
            [n, V] fp32.
        """
        scores = logits.float()
        if not self.processors:
            return scores
        rows = []
        for i, row in enumerate(scores):
            ids, row = prefix[: prefix.shape[0] - (scores.shape[0] - 1 - i)][None], row[None].clone()
            for processor in self.processors:
                row = processor(ids, row)
            rows.append(row)
        return torch.cat(rows)

    def warp(self, prefix: Tensor, scores: Tensor) -> Tensor:
        """Scores after temperature and top-k/p: [T], [n, V] -> [n, V]."""
        for warper in self.warpers:
            scores = warper(prefix[None], scores)
        return scores

    def uniform(self, stream: Stream, position: int) -> float:
        """The number in (0, 1) that belongs to a position of this sequence."""
        return float(uniforms(stream, torch.tensor([self.seed]), torch.tensor([position])))


def pick(probabilities: Tensor, uniform: float) -> Tensor:
    """Inverse-CDF sample: [V] non-negative weights, u in (0, 1) -> [] int64 with a positive weight."""
    cumulative = probabilities.double().cumsum(dim=0)  # [V]
    return (
        torch.searchsorted(cumulative, cumulative[-1:] * uniform).squeeze(0).clamp_max(probabilities.nonzero().amax())
    )


def residual(target: Tensor, draft: Tensor | None, token: Tensor) -> Tensor:
    """max(0, p - q), what a rejected position is sampled from.

    Args:
        target: [V] p.
        draft: [Vd] q, or None for a drafter without distribution (all mass on its token).
        token: [] int64 the rejected token.

    Returns:
        [V] weights, not normalised; p itself if nothing is left of it (p = q up to rounding).
    """
    rest = target.clone()
    if draft is None:
        rest[token] = 0.0
    else:
        common = min(rest.shape[0], draft.shape[0])
        rest[:common] = (rest[:common] - draft[:common]).clamp_min(0.0)
    return rest if bool(rest.any()) else target


def rejection_accepts(target: Tensor, draft: Tensor | None, tokens: Tensor, uniform: Tensor) -> Tensor:
    """Modified rejection sampling: accept x with probability min(1, p(x) / q(x)).

    Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023.

    Args:
        target: [n, V] p at each draft position.
        draft: [n, Vd] q, or None for a drafter without distribution.
        tokens: [n] int64 draft tokens.
        uniform: [n] numbers in (0, 1).

    Returns:
        [n] bool.
    """
    p = target.gather(1, tokens[:, None]).squeeze(1).double()
    q = torch.ones_like(p) if draft is None else draft.gather(1, tokens[:, None]).squeeze(1).double()
    return uniform * q < p
