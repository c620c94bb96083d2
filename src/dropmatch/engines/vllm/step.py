"""What one verification has to go on, and how its verdicts are carried out; the same for both model runners.

B requests, N rows of theirs, V tokens in the vocabulary. The V1 runner's rows are the draft rows. The V2 runner's
have each request's bonus row after its draft rows; nothing is asked about those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dropmatch.acceptance import get_rule
from dropmatch.engines.vllm.rows import Row


@dataclass
class Step:
    """The material for verdicts on draft rows, out of N rows.

    Attributes:
        requests: [B] ids.
        all_hidden: [M, d] input of the LM head; M is N + B with the V1 runner and N with the V2 runner.
        all_logits: [M, V] raw, after the grammar's mask.
        all_positions: [N] int64 index in its sequence of each draft token.
        rows: those of requests with a lossy rule.
        logit_rows: [N] int64 rows of `all_hidden` and `all_logits` that verify the draft tokens; None if M is N.
        draft_of: gives the draft's logits of n rows, [n, V]; None if the drafter has none.
        constrained: whether a grammar or a processor may have changed the raw logits.
        draft_tokens: [N] the token that each row verifies; negative where there is none.
        target_logits: [N, V] as the kernels get them.
        unscaled: [n, V] logits after the processors and before temperature, of the rows in `unscaled_rows`,
            which sample; of the others the target logits are just that.
        unscaled_rows: where in `unscaled` a row stands, by its index.
    """

    requests: list[str]
    all_hidden: Tensor
    all_logits: Tensor
    all_positions: Tensor
    rows: list[Row]
    logit_rows: Tensor | None = None
    draft_of: Callable[[Sequence[Row]], Tensor] | None = None
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
        return self.all_hidden[self._at(index)]

    def clean(self, index: Tensor) -> Tensor:
        """[n] -> [n, V]."""
        return self.all_logits[self._at(index)]

    def processed(self, rows: Sequence[Row], index: Tensor) -> Tensor | None:
        """[n] -> [n, V], or None."""
        if not self.constrained:
            return None
        logits = self.target_logits[index]  # a copy
        if self.unscaled is not None:
            for i, row in enumerate(rows):
                if row.index in self.unscaled_rows:
                    logits[i] = self.unscaled[self.unscaled_rows[row.index]]
        return logits

    def final(self, index: Tensor, tokens: Tensor) -> Tensor:
        """[n], [n] -> [n]."""
        return self.target_logits[index, tokens]

    def positions(self, index: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.all_positions[index]

    def draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """[n, V]."""
        assert self.draft_of is not None
        return self.draft_of(rows)

    def keep_unscaled(self, processed: Tensor, greedy: set[str]) -> None:
        """Keep what temperature is about to overwrite.

        Args:
            processed: [N, V] logits after the processors.
            greedy: the requests that do not sample; temperature leaves theirs as they are.
        """
        index = [row.index for row in self.rows if row.request not in greedy]
        if index:
            self.unscaled = processed[index]  # a copy
            self.unscaled_rows = {row: i for i, row in enumerate(index)}

    def can_judge(self, row: Row, token: int) -> bool:
        """Whether the target knows a row's token and, if its rule compares distributions, the drafter has them."""
        known = 0 <= token < self.target_logits.shape[1]
        return known and (self.draft_of is not None or not get_rule(row.config.rule).needs_draft_distribution)

    def _at(self, index: Tensor) -> Tensor:
        """Where rows [n] stand in `all_hidden` and `all_logits`: [n]."""
        return index if self.logit_rows is None else self.logit_rows[index]


@contextmanager
def forced(target_logits: Tensor, draft_tokens: Tensor, rows: list[int], greedy: bool) -> Iterator[None]:
    """While active, some rows of the target's logits [N, V] leave no choice but their draft token [N].

    Where all requests are greedy the token need only be the likeliest; else the rows are those of a distribution.
    """
    if not rows:
        yield
        return
    index = torch.tensor(rows, dtype=torch.int64, device=target_logits.device)
    tokens = draft_tokens[index].long()
    where = (index, tokens) if greedy else (index,)
    kept = target_logits[where]  # a copy
    if not greedy:
        target_logits[index] = -torch.inf
    target_logits[index, tokens] = torch.inf if greedy else 0.0
    try:
        yield
    finally:
        target_logits[where] = kept


class KnownArgmax(TorchFunctionMode):
    """While active, the argmax of some logits is answered without another pass over them.

    vLLM takes it of all rows to find greedy mismatches, which the rules needed to know already.

    Args:
        logits: [N, V].
        tokens: [N] int64, their argmax along the vocabulary.
    """

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        super().__init__()
        self._logits, self._tokens = logits, tokens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As torch's: answers `logits.argmax(dim=-1)`."""
        if func is torch.Tensor.argmax and args and args[0] is self._logits and kwargs == {"dim": -1}:
            return self._tokens
        return func(*args, **(kwargs or {}))
