"""What one verification of the V1 model runner has to go on.

B requests, N draft rows of theirs, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.rows import Row, with_unscaled


@dataclass
class Step:
    """The material for verdicts on N draft rows.

    Attributes:
        requests: [B] ids.
        all_hidden: [N + B, d] input of the LM head.
        all_logits: [N + B, V] raw, after the grammar's mask.
        all_positions: [N] int64 index in its sequence of each draft token.
        logit_rows: [N] int64 rows of `all_hidden` and `all_logits` that verify the draft tokens.
        rows: those of requests with a lossy rule.
        drafts: the draft's logits.
        constrained: whether a grammar or a processor may have changed the raw logits.
        draft_tokens: [N].
        target_logits: [N, V] as the kernels get them.
        unscaled: [n, V] logits after the processors and before temperature, of the rows in `unscaled_rows`,
            which sample; of the others the target logits are just that.
    """

    requests: list[str]
    all_hidden: Tensor
    all_logits: Tensor
    all_positions: Tensor
    logit_rows: Tensor
    rows: list[Row]
    drafts: DraftLogits | None
    constrained: bool = True
    draft_tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    target_logits: Tensor = field(default_factory=lambda: torch.empty(0))
    unscaled: Tensor | None = None
    unscaled_rows: dict[int, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self.all_logits.device

    def tokens(self, index: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.draft_tokens[index].long()

    def hidden(self, index: Tensor) -> Tensor:
        """[n] -> [n, d]."""
        return self.all_hidden[self.logit_rows[index]]

    def clean(self, index: Tensor) -> Tensor:
        """[n] -> [n, V]."""
        return self.all_logits[self.logit_rows[index]]

    def processed(self, rows: Sequence[Row], index: Tensor) -> Tensor | None:
        """[n] -> [n, V], or None."""
        if not self.constrained:
            return None
        return with_unscaled(self.target_logits[index], rows, self.unscaled, self.unscaled_rows)

    def final(self, index: Tensor, tokens: Tensor) -> Tensor:
        """[n], [n] -> [n]."""
        return self.target_logits[index, tokens]

    def positions(self, index: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.all_positions[index]

    def draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """[n, V]."""
        assert self.drafts is not None
        return self.drafts.rows([(row.request, row.place) for row in rows])
