"""The same for vLLM's V2 model runner.

Its rejection kernels draw from counter-based random numbers, so that they may be asked twice. They are: each
time they refuse a draft token that a rule then accepts, that token's row is replaced by one that leaves them
no choice, and they are asked again. What they refuse at the end stays refused, and their own numbers and
recovered tokens are used throughout.

B requests, N rows of theirs: each request's draft rows and, after them, the row of its bonus token. Row i
verifies the token of row i + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as vllm_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dropmatch.acceptance import EXACT, SAMPLED, get_rule, reason_name
from dropmatch.engines.vllm.reporting import Reasons
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.rows import Row, ask, lossy_rows, with_unscaled
from dropmatch.heads import Head

_rejection_sample = vllm_sampler.rejection_sample


@dataclass
class _Chunk:
    """Some of a step's requests; the material for verdicts on their N rows.

    Attributes:
        requests: [B] ids.
        all_hidden: [N, d] input of the LM head.
        all_logits: [N, V] raw, after the grammar's mask.
        rows: those of requests with a lossy rule.
        states: the slot in vLLM's request states of each request.
        draft_tokens: [N] the token of each row; -1 where there is none.
        target_logits: [N, V] as the kernels get them.
        input_positions: [N] index in its sequence of each row's token.
        all_draft_logits: [slots, L, V] or None.
        unscaled: as in `verifier`.
    """

    requests: list[str]
    all_hidden: Tensor
    all_logits: Tensor
    rows: list[Row]
    states: dict[str, int]
    draft_tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    target_logits: Tensor = field(default_factory=lambda: torch.empty(0))
    input_positions: Tensor = field(default_factory=lambda: torch.empty(0))
    all_draft_logits: Tensor | None = None
    unscaled: Tensor | None = None
    unscaled_rows: dict[int, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self.all_logits.device

    def tokens(self, index: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.draft_tokens[index + 1].long()

    def hidden(self, index: Tensor) -> Tensor:
        """[n] -> [n, d]."""
        return self.all_hidden[index]

    def clean(self, index: Tensor) -> Tensor:
        """[n] -> [n, V]."""
        return self.all_logits[index]

    def processed(self, rows: Sequence[Row], index: Tensor) -> Tensor | None:
        """[n] -> [n, V]."""
        return with_unscaled(self.target_logits[index], rows, self.unscaled, self.unscaled_rows)

    def final(self, index: Tensor, tokens: Tensor) -> Tensor:
        """[n], [n] -> [n]."""
        return self.target_logits[index, tokens]

    def positions(self, index: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.input_positions[index].long() + 1

    def draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """[n, V]."""
        assert self.all_draft_logits is not None
        return torch.stack([self.all_draft_logits[self.states[row.request], row.place] for row in rows])


class VerifierV2:
    """The acceptance rules of all requests of a V2 model runner.

    Args:
        runner: vLLM's V2 model runner.
        head: the target's LM head.
        settings: the requests' settings.
    """

    active: VerifierV2 | None = None

    def __init__(self, runner: Any, head: Head, settings: RequestSettings) -> None:
        self._runner = runner
        self._head = head
        self._settings = settings
        self._chunk: _Chunk | None = None
        self._all_logits: Tensor | None = None
        self.hidden: Tensor | None = None  # [tokens, d] of the step that is being sampled
        self.logits_indices: Tensor | None = None  # [N] rows of it that have logits
        self.report: dict[str, Reasons] = {}

    def begin(self, logits: Tensor) -> None:
        """A call of the rejection sampler begins: [N, V] raw logits of the whole step."""
        self._all_logits = logits
        self.report = {}

    @contextmanager
    def chunk(self, logits: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Around the verification of some requests.

        Args:
            logits: [n, V], a slice of the step's.
            slots: the requests' slots in vLLM's request states.
            counts: draft tokens of each.
        """
        names = self._runner.req_states.index_to_req_id
        known = all(slot in names for slot in slots)
        if self.hidden is None or self.logits_indices is None or self._all_logits is None or not known:
            yield  # a warm-up
            return
        requests = [names[slot] for slot in slots]
        first = (logits.storage_offset() - self._all_logits.storage_offset()) // max(1, logits.stride(0))
        self._chunk = _Chunk(
            requests=requests,
            all_hidden=self.hidden[self.logits_indices[first : first + logits.shape[0]]],
            all_logits=logits,
            rows=lossy_rows(requests, counts, self._settings, bonus_rows=True),
            states=dict(zip(requests, slots, strict=True)),
        )
        VerifierV2.active = self
        try:
            yield
        finally:
            VerifierV2.active = self._chunk = None

    def note_processed(self, processed: Tensor) -> None:
        """Keep what temperature is about to overwrite: [N, V] logits after the processors."""
        if self._chunk is None:
            return
        index = [row.index for row in self._chunk.rows if not self._is_greedy(row.request)]
        if index:
            self._chunk.unscaled = processed[index]  # a copy
            self._chunk.unscaled_rows = {row: i for i, row in enumerate(index)}

    def verify(
        self,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """vLLM's `rejection_sample` with the rules' verdicts: [B, L + 1] tokens, [B] how many of them.

        Args:
            target_logits: [N, V].
            draft_logits: [slots, L, V] before temperature, or None.
            draft_sampled: [N].
            cu_num_logits: [B + 1].
            pos: [N].
            args, kwargs: passed on.
        """
        chunk = self._chunk
        assert chunk is not None

        def kernels() -> tuple[Tensor, Tensor]:
            return _rejection_sample(target_logits, draft_logits, draft_sampled, cu_num_logits, pos, *args, **kwargs)

        sampled, num_sampled = kernels()
        chunk.draft_tokens, chunk.target_logits = draft_sampled, target_logits
        chunk.input_positions, chunk.all_draft_logits = pos, draft_logits
        reasons: dict[int, int] = {}
        kept: dict[int, Tensor] = {}
        waiting = {row.index: row for row in chunk.rows}
        bounds, tokens = cu_num_logits.tolist(), draft_sampled.tolist()
        going = {row.request for row in chunk.rows}
        try:
            while going:
                lengths = num_sampled.tolist()
                wave = []
                for number, request in enumerate(chunk.requests):
                    if request not in going:
                        continue
                    refused = waiting.get(bounds[number] + lengths[number] - 1)  # None: nothing was refused
                    if refused is None or refused.request != request or refused.index in reasons:
                        continue
                    if self._can_judge(refused, tokens):
                        wave.append(refused)
                accepted = ask(wave, chunk, self._head) if wave else {}
                going = {row.request for row in wave if row.index in accepted}
                if not accepted:
                    break
                for index, reason in accepted.items():
                    reasons[index] = reason
                    kept[index] = target_logits[index].clone()
                    target_logits[index] = -torch.inf
                    target_logits[index, tokens[index + 1]] = 0.0
                sampled, num_sampled = kernels()
        finally:
            for index, row_logits in kept.items():
                target_logits[index] = row_logits
        self._add_reasons(chunk, bounds, num_sampled.tolist(), reasons)
        return sampled, num_sampled

    def _can_judge(self, row: Row, tokens: list[int]) -> bool:
        assert self._chunk is not None
        known = 0 <= tokens[row.index + 1] < self._chunk.target_logits.shape[1]
        compares = get_rule(row.config.rule).needs_draft_distribution
        return known and not (compares and self._chunk.all_draft_logits is None)

    def _is_greedy(self, request: str) -> bool:
        return self._settings.temperature(request) == 0

    def _add_reasons(self, chunk: _Chunk, bounds: list[int], lengths: list[int], reasons: dict[int, int]) -> None:
        for number, request in enumerate(chunk.requests):
            first, drafted = bounds[number], bounds[number + 1] - bounds[number] - 1
            if drafted:
                own = EXACT if self._is_greedy(request) else SAMPLED
                config = self._settings.of(request)
                codes = [reasons.get(first + place, own) for place in range(min(drafted, lengths[number] - 1))]
                self.report[request] = Reasons(
                    rule="off" if config is None else config.rule,
                    drafted=drafted,
                    accepted=[reason_name(code) for code in codes],
                )


class JudgedSamplerV2(RejectionSampler):
    """vLLM's rejection sampler, with the requests' acceptance rules.

    Args:
        verifier: the rules.
        sampler, spec_config, device: as vLLM's.
    """

    def __init__(self, verifier: VerifierV2, sampler: Any, spec_config: Any, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)
        self.verifier = verifier

    def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: logits [N, V]."""
        self.verifier.begin(logits)
        return super().__call__(logits, input_batch, *args, **kwargs)

    def _verify(
        self, logits: Tensor, draft_logits: Any, draft_sampled: Tensor, pos: Tensor, cu_num_logits: Tensor,
        idx_mapping: Tensor, idx_mapping_np: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        counts = (torch.diff(cu_num_logits) - 1).tolist()
        with self.verifier.chunk(logits, idx_mapping_np.tolist(), counts):
            return super()._verify(
                logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, *args, **kwargs
            )


@wraps(_rejection_sample)
def judged_rejection_sample(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stands in for vLLM's `rejection_sample`: [B, L + 1], [B]."""
    if VerifierV2.active is None:
        return _rejection_sample(*args, **kwargs)
    return VerifierV2.active.verify(*args, **kwargs)
