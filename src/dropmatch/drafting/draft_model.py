"""Drafts by a smaller model of the same tokenizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmatch.config import DraftConfig
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.sampling import TokenChooser, pick
from dropmatch.drafting.base import Draft
from dropmatch.masks import Stream


class DraftModel:
    """A causal LM as drafter.

    Args:
        model: decoder-only causal LM of transformers.
        token_map: [Vd] int64, the target's id of each draft id, for a draft with a vocabulary of its own (d2t);
            such a drafter offers no distribution to the rules, since its vocabulary cannot hold the target's.

    Raises:
        ModelError: the model is of a kind that cannot be rolled back.
    """

    def __init__(self, model: Any, token_map: Tensor | None = None) -> None:
        self.model, self._cached, self._token_map = model, CachedModel(model), token_map
        self.has_distribution = token_map is None
        self._vocab_size: int | None = None

    def begin(self) -> DraftModel:
        """The same model with an empty cache."""
        return DraftModel(self.model, self._token_map)

    def check(self, prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """Remember the target's vocabulary size; refuse what does not fit the draft's context.

        Raises:
            SettingError: prompt and new tokens exceed the draft's context.
        """
        self._cached.check_room(prompt_tokens + max_tokens, "draft")
        self._vocab_size = vocab_size

    def propose(self, ids: Tensor, length: int, chooser: TokenChooser, config: DraftConfig) -> Draft:
        """Up to `length` tokens after ids [T], one forward each; fewer if the drafter's confidence ends it."""
        if self._cannot_read(ids[self._cached.length :]):
            return Draft(ids[:0])
        threshold = config.draft_stop_probability
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        probabilities: list[Tensor] = []
        sequence = ids
        for _ in range(length):
            row = self._cached.extend(sequence[self._cached.length :], keep=1)  # [1, Vd]
            row = self._process(sequence, row, chooser)
            if chooser.sample:
                distribution = chooser.warp(sequence, row).softmax(dim=-1)  # [1, Vd]
                token = pick(distribution[0], chooser.uniform(Stream.DRAFT_TOKEN, sequence.shape[0]))
                probabilities.append(distribution)
            else:
                token = row[0].argmax()
            tokens.append(token)
            logits.append(row)
            sequence = torch.cat([sequence, token[None]])
            if threshold and float(row[0].softmax(dim=-1)[token]) < threshold:
                break
        scores = torch.cat(logits) if self.has_distribution else None
        return Draft(torch.stack(tokens), scores, torch.cat(probabilities) if probabilities else None)

    def _cannot_read(self, tokens: Tensor) -> bool:
        """Whether a token [n] is beyond the draft's embedding, as the target's padding ids may be."""
        size = self.model.get_input_embeddings().weight.shape[0]
        return (self._vocab_size or 0) > size and bool((tokens >= size).any())

    def _process(self, sequence: Tensor, row: Tensor, chooser: TokenChooser) -> Tensor:
        """The request's processors on [1, Vd] logits: -> [1, min(V, Vd)], or [1, V] with a token map."""
        if self._token_map is not None:
            missing = row.new_full((1, self._vocab_size or 0), -torch.inf)
            return chooser.process(sequence, missing.index_copy(1, self._token_map, row))
        size = row.shape[1]
        if self._vocab_size is not None:
            row = row[:, : self._vocab_size]
            if chooser.processors:  # processors may remember the target's vocabulary size
                row = F.pad(row, (0, self._vocab_size - row.shape[1]), value=-torch.inf)
        return chooser.process(sequence, row)[:, :size]

    def commit(self, ids: Tensor) -> None:
        """Roll back to the sequence ids [T]; its last token is fed by the next proposal."""
        self._cached.rollback(min(self._cached.length, ids.shape[0] - 1))
