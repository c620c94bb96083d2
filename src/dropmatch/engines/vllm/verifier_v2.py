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
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as vllm_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dropmatch.engines.vllm.reporting import Reasons, reasons_of
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.rows import Row, ask, lossy_rows
from dropmatch.engines.vllm.step import Step, forced
from dropmatch.heads import Head

_rejection_sample = vllm_sampler.rejection_sample


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
        self._step: Step | None = None
        self._all_logits: Tensor | None = None
        self.hidden: Tensor | None = None  # [tokens, d] of the step that is being sampled
        self.logits_indices: Tensor | None = None  # [N] rows of it that have logits
        self.report: dict[str, Reasons] = {}

    def begin(self, logits: Tensor) -> None:
        """A call of the rejection sampler begins: [N, V] raw logits of the whole step."""
        self._all_logits = logits
        self.report = {}

    @contextmanager
    def chunk(
        self, logits: Tensor, draft_logits: Tensor | None, pos: Tensor, slots: Sequence[int], counts: Sequence[int]
    ) -> Iterator[None]:
        """Around the verification of some requests, B of them.

        Args:
            logits: [N, V], a slice of the step's.
            draft_logits: [slots, L, V] before temperature, or None.
            pos: [N] index in its sequence of each row's token, which is the one before the token that it verifies.
            slots: [B] the requests' slots in vLLM's request states.
            counts: [B] draft tokens of each.
        """
        names = self._runner.req_states.index_to_req_id
        known = all(slot in names for slot in slots)
        if self.hidden is None or self.logits_indices is None or self._all_logits is None or not known:
            yield  # a warm-up
            return
        requests = [names[slot] for slot in slots]
        first = (logits.storage_offset() - self._all_logits.storage_offset()) // max(1, logits.stride(0))
        slot_of = dict(zip(requests, slots, strict=True))
        self._step = Step(
            requests=requests,
            all_hidden=self.hidden[self.logits_indices[first : first + logits.shape[0]]],
            all_logits=logits,
            all_positions=pos.long() + 1,
            rows=lossy_rows(requests, counts, self._settings, bonus_rows=True),
            draft_of=None if draft_logits is None else partial(_draft_rows, draft_logits, slot_of),
        )
        VerifierV2.active = self
        try:
            yield
        finally:
            VerifierV2.active = self._step = None

    def note_processed(self, processed: Tensor) -> None:
        """Keep what temperature is about to overwrite: [N, V] logits after the processors."""
        if self._step is None:
            return
        greedy = {row.request for row in self._step.rows if self._is_greedy(row.request)}
        self._step.keep_unscaled(processed, greedy)

    def verify(
        self,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """vLLM's `rejection_sample` with the rules' verdicts: [B, L + 1] tokens, [B] how many of them.

        Args:
            target_logits: [N, V].
            draft_logits: [slots, L, V] before temperature, or None.
            draft_sampled: [N] the token of each row; -1 where there is none.
            cu_num_logits: [B + 1].
            args, kwargs: passed on.
        """
        step = self._step
        assert step is not None

        def kernels() -> tuple[Tensor, Tensor]:
            return _rejection_sample(target_logits, draft_logits, draft_sampled, cu_num_logits, *args, **kwargs)

        sampled, num_sampled = kernels()
        step.draft_tokens = draft_sampled.roll(-1)  # row i verifies the token of row i + 1
        step.target_logits = target_logits
        reasons: dict[int, int] = {}
        waiting = {row.index: row for row in step.rows}
        bounds, tokens = cu_num_logits.tolist(), step.draft_tokens.tolist()
        going = {row.request for row in step.rows}
        with ExitStack() as stack:
            while going:
                lengths = num_sampled.tolist()
                wave = []
                for number, request in enumerate(step.requests):
                    if request not in going:
                        continue
                    refused = waiting.get(bounds[number] + lengths[number] - 1)  # None: nothing was refused
                    if refused is None or refused.request != request or refused.index in reasons:
                        continue
                    if step.can_judge(refused, tokens[refused.index]):
                        wave.append(refused)
                accepted = ask(wave, step, self._head) if wave else {}
                going = {row.request for row in wave if row.index in accepted}
                if not accepted:
                    break
                reasons |= accepted
                stack.enter_context(forced(target_logits, step.draft_tokens, sorted(accepted), greedy=False))
                sampled, num_sampled = kernels()
        self._add_reasons(step.requests, bounds, num_sampled.tolist(), reasons)
        return sampled, num_sampled

    def _is_greedy(self, request: str) -> bool:
        return self._settings.temperature(request) == 0

    def _add_reasons(self, requests: list[str], bounds: list[int], lengths: list[int], reasons: dict[int, int]) -> None:
        for number, request in enumerate(requests):
            first, drafted = bounds[number], bounds[number + 1] - bounds[number] - 1
            if drafted:
                config, greedy = self._settings.of(request), self._is_greedy(request)
                self.report[request] = reasons_of(first, drafted, lengths[number], reasons, greedy, config)


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
        with self.verifier.chunk(logits, draft_logits, pos, idx_mapping_np.tolist(), counts):
            return super()._verify(
                logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, *args, **kwargs
            )


def _draft_rows(draft_logits: Tensor, slot_of: dict[str, int], rows: Sequence[Row]) -> Tensor:
    """The draft's logits of n rows, [n, V], out of those of all slots, [slots, L, V]."""
    return torch.stack([draft_logits[slot_of[row.request], row.place] for row in rows])


@wraps(_rejection_sample)
def judged_rejection_sample(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stands in for vLLM's `rejection_sample`: [B, L + 1], [B]."""
    if VerifierV2.active is None:
        return _rejection_sample(*args, **kwargs)
    return VerifierV2.active.verify(*args, **kwargs)
