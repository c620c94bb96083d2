"""When a sequence ends, asked token by token, so that a block is cut where plain decoding would stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# a stopping criterion of transformers: (ids [1, T], scores) -> bool or [1] bool
Criterion = Callable[..., Any]


@dataclass(frozen=True)
class StopRules:
    """What ends a sequence.

    Attributes:
        max_tokens: the most tokens to generate.
        eos_token_ids: tokens that end it; the token itself is kept.
        stop_strings: texts that end it; the token that completes one is kept.
        decode: token ids -> text; needed for stop strings.
        criteria: further criteria, asked after each token.
    """

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: Sequence[str] = ()
    decode: Callable[[list[int]], str] | None = None
    criteria: Sequence[Criterion] = ()

    def reason(self, prompt: Tensor, generated: list[int]) -> tuple[str, str | int | None] | None:
        """Why the sequence ends with its last token, or None if it goes on.

        Args:
            prompt: [T] prompt ids.
            generated: ids generated so far, at least one.

        Returns:
            finish reason "stop" or "length" as in the OpenAI API, and what matched (token id or string).
        """
        last = generated[-1]
        if last in self.eos_token_ids:
            return "stop", last
        if self.stop_strings and self.decode is not None:
            text = self._tail(generated)
            for stop in self.stop_strings:
                if stop in text:
                    return "stop", stop
        if self.criteria:
            ids = torch.cat([prompt, torch.tensor(generated, device=prompt.device)])[None]
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria):
                return "stop", None
        return ("length", None) if len(generated) >= self.max_tokens else None

    def _tail(self, generated: list[int]) -> str:
        """Text of the last tokens, enough of them for the longest stop string (some tokens have no text)."""
        assert self.decode is not None
        # a stop string may end anywhere in the last token's text
        enough = max(len(text) for text in self.stop_strings) + 4 + len(self.decode(generated[-1:]))
        reach = enough
        while len(text := self.decode(generated[-reach:])) < enough and reach < len(generated):
            reach *= 2
        return text
