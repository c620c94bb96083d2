"""Judges draft rows, and has vLLM's own kernels carry the verdicts out.

The rejection sampler's kernels are never replaced. Before they run, the row of an accepted draft token is
changed into one that leaves them no choice, and put back after them, so that log-probabilities are those of
the clean target. All other rows stay what they are: a request with the rule off decodes as without the
plugin, from the same random numbers.

Greedy requests: the rule is asked about the rows whose draft is not the clean token. Sampling requests: about
the rows that vLLM's modified rejection sampling is about to refuse, with the random numbers that it will use.

B requests, N draft rows of theirs, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler as vllm_sampler

from dropmatch.acceptance import get_rule
from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.reporting import Reasons, reasons_of
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.rows import Row, ask, lossy_rows, with_following
from dropmatch.engines.vllm.step import KnownArgmax, Step, forced
from dropmatch.heads import Head, likeliest_and_mass

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own
PLACEHOLDER = -1  # a draft row without a token
_generate_uniform_probs = vllm_sampler.generate_uniform_probs
_rejection_sample = vllm_sampler.rejection_sample


class Verifier:
    """The acceptance rules of all requests of a model runner.

    Args:
        runner: vLLM's V1 model runner.
        head: the target's LM head.
        settings: the requests' settings.
        drafts: the draft's logits; None if the drafter has none.
    """

    active: Verifier | None = None  # the one whose step vLLM's rejection sampler is in
    uniforms: Tensor | None = None  # [N] numbers that rejection sampling is to use, already drawn

    def __init__(self, runner: Any, head: Head, settings: RequestSettings, drafts: DraftLogits | None) -> None:
        self._runner = runner
        self._head = head
        self._settings = settings
        self._drafts = drafts
        self._step: Step | None = None
        self.hidden: Tensor | None = None  # [N + B, d] of the step that is being sampled
        self.grammar = True  # whether a grammar may have masked its logits
        self.report: dict[str, Reasons] = {}

    @contextmanager
    def step(self, metadata: Any, logits: Tensor, sampling: Any) -> Iterator[None]:
        """Around one call of the rejection sampler; a warm-up passes untouched.

        Args:
            metadata: vLLM's `SpecDecodeMetadata`.
            logits: [N + B, V].
            sampling: vLLM's `SamplingMetadata`.
        """
        requests = list(self._runner.input_batch.req_ids)
        if self.hidden is None or not any(metadata.num_draft_tokens):
            yield
            return
        logit_rows = metadata.target_logits_indices.long()
        token_rows = metadata.logits_indices.long()[logit_rows]
        self._step = Step(
            requests=requests,
            all_hidden=self.hidden,
            all_logits=logits,
            all_positions=self._runner.positions[token_rows].long() + 1,
            rows=lossy_rows(requests, metadata.num_draft_tokens, self._settings),
            logit_rows=logit_rows,
            draft_of=self._draft_logits,
            constrained=self.grammar or _has_processors(sampling),
        )
        Verifier.active = self
        try:
            yield
        finally:
            Verifier.active = self._step = None
            if self._drafts is not None:
                self._drafts.forget(requests)

    def note_processed(self, processed: Tensor, sampling: Any) -> None:
        """Keep what temperature is about to overwrite: [N, V] logits after the processors."""
        if self._step is None or sampling.all_greedy or not self._step.constrained:
            return
        self._step.keep_unscaled(processed, _greedy_requests(self._step.requests, sampling))

    def verify(
        self,
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling: Any,
        **more: Any,
    ) -> Tensor:
        """vLLM's `rejection_sample` with the rules' verdicts: [B, max_spec_len + 1] tokens, -1 where there is none.

        Args:
            draft_token_ids: [N] int32.
            num_draft_tokens: [B].
            max_spec_len: L.
            cu_num_draft_tokens: [B].
            draft_probs: [N, V] or None.
            target_logits: [N, V] fp32, after processors, temperature and top-k/p.
            bonus_token_ids: [B, 1].
            sampling: vLLM's `SamplingMetadata`.
            more: passed on.
        """
        step = self._step
        assert step is not None
        greedy = _greedy_requests(step.requests, sampling)
        reasons: dict[int, int] = {}  # of the rows that a rule accepted
        refused: list[int] = []  # exact rows that an eager rule refused
        likeliest: Tensor | None = None  # [N], where all rows were looked at
        placeholders = draft_token_ids < 0
        try:
            if len(greedy) < len(step.requests) and (step.rows or bool(placeholders.any())):
                numbers = _generate_uniform_probs(
                    draft_token_ids.shape[0], num_draft_tokens, sampling.generators, target_logits.device
                )
                # the CPU kernel would read a probability before the row's first for a placeholder
                Verifier.uniforms = numbers.masked_fill(placeholders, torch.inf)
            if step.rows:
                exact, most, likeliest = _exact(
                    draft_token_ids, target_logits, draft_probs, greedy, step.rows, Verifier.uniforms
                )
                step.draft_tokens, step.target_logits = draft_token_ids, target_logits
                reasons, refused = self._ask(step, exact, most, greedy)
            proposed = draft_token_ids
            if refused:
                proposed = draft_token_ids.clone()
                proposed[refused] = PLACEHOLDER
            known: AbstractContextManager[Any] = nullcontext()
            if likeliest is not None:
                lossy = list(reasons)
                likeliest[lossy] = draft_token_ids[lossy].long()
                known = KnownArgmax(target_logits, likeliest)
            with forced(target_logits, draft_token_ids, sorted(reasons), sampling.all_greedy), known:
                tokens = _rejection_sample(
                    proposed,
                    num_draft_tokens,
                    max_spec_len,
                    cu_num_draft_tokens,
                    draft_probs,
                    target_logits,
                    bonus_token_ids,
                    sampling,
                    **more,
                )
        finally:
            Verifier.uniforms = None
            # not kept until the step's context ends: vLLM's `forward` is to free the logits with its own frame
            step.target_logits, step.unscaled = step.target_logits.new_empty(0), None
        self.report = self._reasons(step.requests, num_draft_tokens, tokens, reasons, greedy)
        return tokens

    def _ask(
        self, step: Step, exact: dict[int, bool], most: dict[int, float], greedy: set[str]
    ) -> tuple[dict[int, int], list[int]]:
        """Walk all drafts to their first rejection.

        Args:
            step: the step.
            exact: for each row of `step.rows`, whether lossless decoding accepts it.
            most: for each, an upper bound of its clean probability.
            greedy: the requests that do not sample.

        Returns:
            Reason codes of the rows that a rule accepted, and the exact rows that an eager rule refused (it
            refuses them for greedy requests only: when sampling, that would bend the distribution).
        """
        tokens = step.draft_tokens.tolist()
        queues: dict[str, list[Row]] = {}
        ended: set[str] = set()
        hopeless: list[int] = []  # exact rows that an eager rule's floor refuses
        for row in with_following(step.rows, exact):
            always = row.config.evaluation == "eager" and row.request in greedy
            if row.request in ended or (exact[row.index] and not always):
                continue
            if most[row.index] < row.config.clean_floor(self._head.can_gather):
                hopeless += [row.index] if exact[row.index] else []
                ended.add(row.request)
            elif self._can_judge(step, row, tokens[row.index]):
                queues.setdefault(row.request, []).append(row)
            elif not exact[row.index]:
                ended.add(row.request)

        # some rows behind the first rejection are judged for nothing, which costs less than asking twice
        accepted = ask([row for queue in queues.values() for row in queue], step, self._head)
        reasons: dict[int, int] = {}
        refused = hopeless
        for queue in queues.values():
            for row in queue:
                if row.index not in accepted:
                    refused += [row.index] if exact[row.index] else []
                    break
                if not exact[row.index]:
                    reasons[row.index] = accepted[row.index]
        return reasons, refused

    def _draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """The draft's logits of n rows: [n, V]."""
        assert self._drafts is not None
        return self._drafts.rows([(row.request, row.place) for row in rows])

    def _can_judge(self, step: Step, row: Row, token: int) -> bool:
        """Whether a row has a token that the target knows and, if its rule compares it, the draft's distribution."""
        if not step.can_judge(row, token):
            return False
        if not get_rule(row.config.rule).needs_draft_distribution:
            return True
        if self._drafts is not None and self._drafts.has(row.request, row.place):
            return True
        logger.warning_once(
            "dropmatch: a draft token came without its distribution (near the draft model's longest sequence it "
            "is a filler), so rule '%s' cannot judge it and only an exact match is accepted there",
            row.config.rule,
        )
        return False

    def _reasons(
        self,
        requests: list[str],
        num_draft_tokens: list[int],
        tokens: Tensor,
        reasons: dict[int, int],
        greedy: set[str],
    ) -> dict[str, Reasons]:
        """Why each accepted token was; tokens [B, L + 1] are the kernels' answer, -1 where there is none."""
        lengths = (tokens != PLACEHOLDER).sum(dim=1).tolist()
        report, index = {}, 0
        for request, drafted, length in zip(requests, num_draft_tokens, lengths, strict=True):
            if drafted:
                config = self._settings.of(request)
                report[request] = reasons_of(index, drafted, length, reasons, request in greedy, config)
            index += drafted
        return report


@wraps(_rejection_sample)
def judged_rejection_sample(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for vLLM's `rejection_sample`: [B, L + 1]."""
    if Verifier.active is None:
        return _rejection_sample(*args, **kwargs)
    return Verifier.active.verify(*args, **kwargs)


@wraps(_generate_uniform_probs)
def known_uniform_probs(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for vLLM's `generate_uniform_probs`: the numbers already drawn for this step, if any. [N]."""
    if Verifier.uniforms is not None:
        return Verifier.uniforms
    return _generate_uniform_probs(*args, **kwargs)


def _has_processors(sampling: Any) -> bool:
    """Whether vLLM changes logits before temperature and top-k/p; true where that cannot be told."""
    processors = sampling.logitsprocs.non_argmax_invariant
    return not (
        sampling.no_penalties
        and not sampling.bad_words_token_ids
        and sampling.allowed_token_ids_mask is None
        and all(getattr(processor, "min_toks", None) == {} for processor in processors)
        and (
            sampling.thinking_budget_state_holder is None
            or not sampling.thinking_budget_state_holder.has_tracked_requests()
        )
    )


def _greedy_requests(requests: list[str], sampling: Any) -> set[str]:
    """The requests that do not sample."""
    if sampling.all_greedy:
        return set(requests)
    return {name for name, heat in zip(requests, sampling.temperature.tolist(), strict=False) if heat == 0}


def _exact(
    drafts: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None,
    greedy: set[str],
    rows: list[Row],
    uniforms: Tensor | None,
) -> tuple[dict[int, bool], dict[int, float], Tensor | None]:
    """For each row, whether vLLM's kernels accept it, and an upper bound of its clean probability.

    And the likeliest token of each: [N], None if some rows were not asked about.

    Args:
        drafts: [N].
        target_logits: [N, V].
        draft_probs: [N, V] or None.
        greedy: the requests that do not sample.
        rows: the rows asked about.
        uniforms: [N], None if none samples.
    """
    index = torch.tensor([row.index for row in rows], device=drafts.device)  # [n]
    logits = target_logits if len(rows) == target_logits.shape[0] else target_logits[index]  # [n, V]
    tokens = drafts[index].long()  # [n]
    likeliest, mass = likeliest_and_mass(logits)  # [n], [n]
    accepted = likeliest == tokens
    known = tokens.clamp(0, logits.shape[1] - 1)
    # the margin is for rounding
    most = (logits.gather(1, known[:, None]).squeeze(1) - mass + 1e-3).exp()
    if uniforms is not None:
        p = (logits.gather(1, known[:, None]).squeeze(1) - logits.logsumexp(dim=1)).exp()
        q = torch.ones_like(p) if draft_probs is None else draft_probs[index, known]
        samples = torch.tensor([row.request not in greedy for row in rows], device=drafts.device)
        accepted = torch.where(samples, (tokens >= 0) & (q > 0) & (p / q >= uniforms[index]), accepted)
        most = torch.where(samples, 1.0, most)  # their logits are no longer the clean ones
    places = [row.index for row in rows]
    exact, bounds = (dict(zip(places, values.tolist(), strict=True)) for values in (accepted, most))
    return exact, bounds, likeliest if len(rows) == target_logits.shape[0] else None
