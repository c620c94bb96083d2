"""The draft model's logits, kept from the moment it proposes until its tokens are verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class DraftLogits:
    """Logits behind the draft tokens that wait to be verified, by request.

    vLLM keeps draft probabilities only for probabilistic drafts, and never for greedy batches. So while the
    proposer samples, the logits that its model makes are kept: the model's own output, copied only where vLLM
    goes on to divide it by the temperature in place. A request that sits out a step keeps its draft, and its
    logits stay with it.

    Args:
        wanted: whether any request of the batch has a rule that compares distributions.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._kept: dict[str, tuple[list[Tensor], int]] = {}  # request -> L x [B, V] and its row
        self._steps: list[Tensor] | None = None  # being recorded
        self._copy = False

    def attach(self, runner: Any) -> None:
        """Watch a model runner and the draft model of its proposer."""
        drafter = runner.drafter
        propose, compute = runner.propose_draft_token_ids, drafter.model.compute_logits
        sample = drafter._sample_draft_tokens

        def compute_logits(*args: Any, **kwargs: Any) -> Tensor:
            logits = compute(*args, **kwargs)
            if self._steps is not None:
                self._steps.append(logits.clone() if self._copy else logits)
            return logits

        def sample_draft_tokens(hidden_states: Tensor, sampling_metadata: Any) -> Any:
            self._copy = drafter._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
            return sample(hidden_states, sampling_metadata)

        def propose_draft_token_ids(*args: Any, **kwargs: Any) -> Any:
            requests = list(runner.input_batch.req_ids)
            self.forget(requests)
            self.forget([name for name in self._kept if name not in runner.requests])
            if not self._wanted():
                return propose(*args, **kwargs)
            steps: list[Tensor] = []
            self._steps = steps
            try:
                proposed = propose(*args, **kwargs)
            finally:
                self._steps = None
            self._kept.update((name, (steps, row)) for row, name in enumerate(requests))
            return proposed

        drafter.model.compute_logits = compute_logits
        drafter._sample_draft_tokens = sample_draft_tokens
        runner.propose_draft_token_ids = propose_draft_token_ids

    def forget(self, requests: Iterable[str]) -> None:
        """Drop what is kept for some requests."""
        for name in requests:
            self._kept.pop(name, None)

    def has(self, request: str, place: int) -> bool:
        """Whether the logits behind a token of a request's draft are kept."""
        steps, _ = self._kept.get(request, ([], 0))
        return place < len(steps)

    def rows(self, places: Sequence[tuple[str, int]]) -> Tensor:
        """Logits behind some draft tokens: n pairs (request, place in its draft) that are kept -> [n, V]."""
        found = []
        for request, place in places:
            steps, row = self._kept[request]
            found.append(steps[place][row])
        return torch.stack(found)
