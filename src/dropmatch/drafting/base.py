"""What a drafter is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dropmatch.config import DraftConfig
from dropmatch.decoding.sampling import TokenChooser


@dataclass(frozen=True)
class Draft:
    """A chain of n proposed tokens, n ≥ 0.

    Attributes:
        tokens: [n] int64.
        logits: [n, Vd] fp32 after the request's processors, before temperature and top-k/p; None if the
            drafter has no distribution.
        probabilities: [n, Vd] that the tokens were drawn from; None when greedy or without distribution.
    """

    tokens: Tensor
    logits: Tensor | None = None
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens; is told what was committed."""

    has_distribution: bool

    def begin(self) -> Drafter:
        """A drafter like this one for a new sequence, with a state of its own."""
        ...

    def check(self, prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """Refuse a request that cannot be honoured, before its first token.

        Raises:
            SettingError: the request does not fit.
        """
        ...

    def propose(self, ids: Tensor, length: int, chooser: TokenChooser, config: DraftConfig) -> Draft:
        """Propose up to `length` ≥ 1 tokens after the sequence ids [T]."""
        ...

    def commit(self, ids: Tensor) -> None:
        """The sequence is now ids [T]: drop what was drafted beyond it."""
        ...
