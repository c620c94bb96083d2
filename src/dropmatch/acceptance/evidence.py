"""What a rule is given and what it answers: flat rows, one per draft position that needs a verdict.

N rows come from any number of sequences; V is the target's vocabulary, Vd the drafter's (they may differ by
padding), d the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

REJECTED, EXACT, SAMPLED = 0, 1, 2
LOSSLESS_REASONS = ("exact", "sampled")
_reasons: list[str] = ["rejected", *LOSSLESS_REASONS]


def reason_code(name: str) -> int:
    """The code that stands for a reason in `Verdict.reason`; a new name gets a new code."""
    if name not in _reasons:
        _reasons.append(name)
    return _reasons.index(name)


def reason_count() -> int:
    """One more than the largest code."""
    return len(_reasons)


def reason_name(code: int) -> str:
    """The reason behind a code: "rejected", "exact", "sampled", "js", "majority", "naive", ..."""
    return _reasons[code]


@dataclass(frozen=True)
class Evidence:
    """What is known about N draft tokens.

    Attributes:
        hidden: [N, d] input of the LM head, after the final norm.
        clean_logits: [N, V] the target's logits without dropout, as its head gives them.
        draft_tokens: [N] int64.
        clean_tokens: [N] int64: argmax of the processed clean logits, or the sample drawn from them.
        seeds: [N] int64: seed of each row's sequence.
        positions: [N] int64: index of the draft token in its sequence, prompt included.
        draft_logits: [N, Vd], processed, before temperature and top-k/p; None if the drafter has no distribution.
        bias: [N, V] what logits processors add to the clean logits: -inf bans a token (grammar, bad words,
            min_tokens). It is added to the heads; what it bans is taken from the draft too, and never
            accepted. None adds nothing.
        allowed: [N] bool: False where the draft token is ruled out by the request's top-k/p or a hard
            constraint; such a token is never accepted. None allows all.
        followed: [N] int64: how many draft tokens right behind this one lossless decoding would accept, this one
            being accepted.
        remaining: [N] int64: how many draft tokens stand behind this one. Both only for rules that look at them.
        clean_entropy: [N] fp32 entropy of the clean distribution in nats, and
        draft_distance: [N] fp32 JS(draft ‖ clean), both over the whole vocabulary, where the logits above know it in
            part only (recorded rounds). None has them computed from the logits.
    """

    hidden: Tensor
    clean_logits: Tensor
    draft_tokens: Tensor
    clean_tokens: Tensor
    seeds: Tensor
    positions: Tensor
    draft_logits: Tensor | None = None
    bias: Tensor | None = None
    allowed: Tensor | None = None
    followed: Tensor | None = None
    remaining: Tensor | None = None
    clean_entropy: Tensor | None = None
    draft_distance: Tensor | None = None

    def __len__(self) -> int:
        return self.draft_tokens.shape[0]

    def repeated(self, times: int) -> Evidence:
        """Each row `times` times in a row, [N * times], without what has the size of the vocabulary or of d.

        For rules that are asked about many sets of heads: of the evidence they then see tokens, seeds and positions.
        """
        if times == 1:
            return self
        big = ("hidden", "clean_logits", "draft_logits", "bias")
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {
            name: None if value is None or name in big else value[:, None].expand(-1, times).flatten()
            for name, value in values.items()
        }
        nothing = self.hidden.new_empty(len(self) * times, 0)
        return Evidence(**(small | {"hidden": nothing, "clean_logits": nothing}))  # type: ignore[arg-type]

    def rows(self, index: Tensor | slice) -> Evidence:
        """The evidence of some rows: a slice, or an index tensor [n] (bool or int64)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[index] for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class Verdict:
    """What a rule says about N rows, and the numbers behind it.

    Attributes:
        accept: [N] bool.
        reason: [N] int64 codes; see `reason_name`.
        distance: [N] fp32 JS(draft ‖ centroid), or JS(draft ‖ clean) of a rule without heads; NaN where the rule does
            not look at it.
        radius: [N] fp32 largest JS(head ‖ centroid); NaN likewise.
        votes: [N] int64 how many heads chose the draft token; -1 likewise.
        probability: [N] fp32 what the centroid gives the draft token, or the clean distribution where a rule looks at
            no heads; NaN likewise.
        uniform_passes: [N] bool: radius so large that even a uniform draft would pass.
        frequency: [N] fp32 share of the sets of heads that accept; NaN where there is one set, or none. Of a denoised
            verdict the numbers above are means over the sets (votes rounded, `uniform_passes` by the majority). Where
            the floor refuses a row before heads are made `probability` is the clean distribution's, and no other
            number is known.
    """

    accept: Tensor
    reason: Tensor
    distance: Tensor
    radius: Tensor
    votes: Tensor
    probability: Tensor
    uniform_passes: Tensor
    frequency: Tensor

    @staticmethod
    def blank(accept: Tensor, reason: str) -> Verdict:
        """A verdict [N] bool with one reason for what it accepts and no numbers."""
        number = torch.full(accept.shape, float("nan"), dtype=torch.float32, device=accept.device)
        return Verdict(
            accept=accept,
            reason=torch.where(accept, reason_code(reason), REJECTED),
            distance=number,
            radius=number,
            votes=torch.full(accept.shape, -1, dtype=torch.int64, device=accept.device),
            probability=number,
            uniform_passes=torch.zeros_like(accept),
            frequency=number,
        )

    @staticmethod
    def join(parts: list[Verdict]) -> Verdict:
        """Verdicts of consecutive rows as one."""
        if len(parts) == 1:
            return parts[0]
        return Verdict(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Verdict)})

    def with_numbers(self, **numbers: Tensor) -> Verdict:
        """The same verdict with some of the numbers behind it, each [N]."""
        return replace(self, **numbers)

    def where(self, mask: Tensor, other: Verdict) -> Verdict:
        """The same verdict but for the rows of mask [N] bool, which another one has, of as many rows."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(Verdict))
        return Verdict(**{name: torch.where(mask, theirs, ours) for name, ours, theirs in pairs})

    def only(self, mask: Tensor) -> Verdict:
        """The same verdict with acceptance taken back where mask [N] bool is False."""
        accept = self.accept & mask
        return replace(self, accept=accept, reason=torch.where(accept, self.reason, REJECTED))
