"""A causal LM with its KV cache: extend by tokens, roll back to a length."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dropmatch.errors import ModelError, SettingError


class CachedModel:
    """One sequence's view of a transformers causal LM.

    Args:
        model: a decoder-only causal LM.

    Raises:
        ModelError: the model is an encoder-decoder, or keeps a state that cannot be rolled back.
    """

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        if getattr(model.config, "is_encoder_decoder", False):
            raise ModelError(
                f"{type(model).__name__} is an encoder-decoder model: dropmatch decodes decoder-only models"
            )
        default_cache = getattr(model, "_supports_default_dynamic_cache", lambda: True)
        if getattr(model, "_is_stateful", False) or not default_cache():
            raise ModelError(
                f"{type(model).__name__} keeps a recurrent state, or a cache of its own, that cannot be rolled back "
                "after a rejection"
            )
        self.model = model
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._cache.activate_past_recording()
        self.length = 0
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._trims_logits = "logits_to_keep" in parameters

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.device

    @property
    def context_length(self) -> int | None:
        """The most positions that the model was made for; None if its config does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def extend(self, tokens: Tensor, keep: int) -> Tensor:
        """Run the model on the next tokens of the sequence.

        Args:
            tokens: [n] int64, n ≥ 1.
            keep: how many of the last positions need logits, 1 ≤ keep ≤ n.

        Returns:
            [keep, V] logits.
        """
        trim = {"logits_to_keep": keep} if self._trims_logits else {}
        output = self.model(
            input_ids=tokens[None], use_cache=True, return_dict=True, **{self._cache_argument: self._cache}, **trim
        )
        self.length += tokens.shape[0]
        return output.logits[0, -keep:]

    def rollback(self, length: int) -> None:
        """Drop all positions from `length` on; the cache is then that of a fresh prefill.

        Must be called once after the extensions of a round, also when nothing is dropped: sliding-window
        layers keep what is out of the window until then.
        """
        if self.length == 0:  # sliding-window layers cannot be cropped before their first keys
            return
        self._cache.crop(length - self.length)
        self.length = length

    def check_room(self, tokens: int, role: str) -> None:
        """Refuse a request that does not fit the context.

        Args:
            tokens: prompt and new tokens together.
            role: "target" or "draft", for the message.

        Raises:
            SettingError: it does not fit.
        """
        limit = self.context_length
        if limit is not None and tokens > limit:
            raise SettingError(
                f"prompt and max_tokens together are {tokens} tokens, and the {role} model's context is {limit}: "
                "shorten the prompt, lower max_tokens" + (", or use another draft" if role == "draft" else "")
            )
