"""Drafts copied from earlier in the sequence (prompt lookup, n-gram): no model, no distribution."""

from __future__ import annotations

from torch import Tensor

from dropmatch.config import DraftConfig
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.drafting.base import Draft


class PromptLookup:
    """Finds the last earlier occurrence of the sequence's ending and proposes what followed it.

    The longest ending is looked for first, `max_ngram` down to `min_ngram` tokens.
    """

    has_distribution = False

    def __init__(self) -> None:
        self._vocab_size = 0

    def begin(self) -> PromptLookup:
        """Another one: nothing is kept between rounds but the target's vocabulary size."""
        return PromptLookup()

    def check(self, prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """Any request fits; remember the target's vocabulary size."""
        self._vocab_size = vocab_size

    def propose(self, ids: Tensor, length: int, chooser: TokenChooser, config: DraftConfig) -> Draft:
        """Up to `length` tokens after ids [T]; none if its ending never occurred before."""
        for size in range(min(config.max_ngram, ids.shape[0] - 1), config.min_ngram - 1, -1):
            windows = ids.unfold(0, size, 1)[:-1]  # [T - size, size], all but the ending itself
            found = (windows == ids[-size:]).all(dim=1).nonzero()
            if found.numel():
                start = int(found[-1]) + size
                tokens = ids[start : start + length]
                known = (tokens < self._vocab_size).long().cumprod(dim=0).sum()
                return Draft(tokens[: int(known)])
        return Draft(ids[:0])

    def commit(self, ids: Tensor) -> None:
        """Nothing is kept between rounds."""
