"""What a model's LM head must offer to the acceptance core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Head(Protocol):
    """All that a model does between the hidden state and its logits: head, soft-cap, scale, adapter.

    `gather`, `rows` and `finish` are there where `can_gather` is true.
    """

    vocab_size: int
    can_gather: bool

    def full(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: [n, d] -> [n, V]."""
        ...

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The same logits for some tokens only: [n, K, d], [n, S] int64 -> [n, K, S]."""
        ...

    def rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights and, if there is one, bias of some tokens: [n, S] int64 -> [n, S, d], [n, S]."""
        ...

    def finish(self, logits: Tensor) -> Tensor:
        """What comes after the linear layer (a soft-cap, a scale), element by element: any shape."""
        ...


@dataclass(frozen=True)
class Finish:
    """What a model does to the output of its LM head, element by element.

    Attributes:
        scale: factor.
        cap: soft-cap, cap * tanh(x / cap), after it; None is none.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Any shape."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def gathered_logits(hidden: Tensor, token_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a plain linear head for some tokens only.

    Args:
        hidden: [n, K, d].
        token_ids: [n, S] int64.
        weight: [V, d].
        bias: [V] or None.

    Returns:
        [n, K, S].
    """
    if hidden.device.type == "cpu":
        # one row at a time: what is gathered stays in the cache, and a batched product would copy it again
        logits = torch.stack([F.linear(h, weight[ids]) for h, ids in zip(hidden, token_ids, strict=True)])
    else:
        logits = torch.bmm(hidden, F.embedding(token_ids, weight).transpose(1, 2))
    return logits if bias is None else logits + bias[token_ids][:, None]
