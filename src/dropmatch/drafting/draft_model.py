"""Drafts by a smaller model of the same tokenizer."""

from __future__ import annotations

from typing import Any

import torch
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

    Raises:
        ModelError: the model is of a kind that cannot be rolled back.
    """

    has_distribution = True

    def __init__(self, model: Any) -> None:
        self.model, self._cached = model, CachedModel(model)
        self._vocab_size: int | None = None

    def reset(self) -> None:
        """A new sequence begins."""
        self._cached.reset()

    def check(self, prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """Remember the target's vocabulary size; refuse what does not fit the draft's context.

        Raises:
            SettingError: prompt and new tokens exceed the draft's context.
        """
        self._cached.check_room(prompt_tokens + max_tokens, "draft")
        self._vocab_size = vocab_size

    def propose(self, ids: Tensor, length: int, chooser: TokenChooser, config: DraftConfig) -> Draft:
        """Up to `length` tokens after ids [T], one forward each; fewer if the drafter's confidence ends it."""
        threshold = config.draft_stop_probability
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        probabilities: list[Tensor] = []
        sequence = ids
        for _ in range(length):
            row = self._cached.extend(sequence[self._cached.length :], keep=1)  # [1, Vd]
            row = chooser.process(sequence, row[:, : self._vocab_size])  # no token that the target lacks
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
        return Draft(torch.stack(tokens), torch.cat(logits), torch.cat(probabilities) if probabilities else None)

    def commit(self, ids: Tensor) -> None:
        """Roll back to the sequence ids [T]; its last token is fed by the next proposal."""
        self._cached.rollback(min(self._cached.length, ids.shape[0] - 1))
