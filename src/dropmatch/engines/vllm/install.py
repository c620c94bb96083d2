"""Puts the parts into a worker: V1 model runners only."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler as vllm_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler

from dropmatch.engines.vllm import cpu_fixes, hooks
from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.head import VllmHead
from dropmatch.engines.vllm.reporting import put_on_output
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.settings import engine_default, why_no_draft_distribution
from dropmatch.engines.vllm.verifier import Verifier, judged_rejection_sample, known_uniform_probs

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


class JudgedSampler(RejectionSampler):
    """vLLM's rejection sampler, with the requests' acceptance rules.

    Args:
        verifier: the rules.
        sampler, spec_config, device: as vLLM's.
    """

    def __init__(self, verifier: Verifier, sampler: Any, spec_config: Any, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)
        self.verifier = verifier

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """As vLLM's: draft_probs [N, V] or None, logits [N + B, V]."""
        top_k_only = sampling_metadata.top_k is not None and sampling_metadata.top_p is None
        if top_k_only and logits.device.type == "cpu" and not any(metadata.num_draft_tokens):
            # vLLM would take the largest k of no draft rows
            return self.sampler(logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata)
        with self.verifier.step(metadata, logits, sampling_metadata):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def apply_logits_processors(self, logits: torch.Tensor, sampling_metadata: Any, metadata: Any) -> torch.Tensor:
        """As vLLM's: [N, V] -> [N, V]."""
        processed = super().apply_logits_processors(logits, sampling_metadata, metadata)
        self.verifier.note_processed(processed, sampling_metadata)
        return processed


def install(runner: Any) -> Verifier:
    """Give a model runner, whose models are loaded, the acceptance rules.

    Args:
        runner: vLLM's V1 model runner of the last pipeline rank.

    Returns:
        What judges its drafts.

    Raises:
        UnsupportedVLLM: this vLLM is not as expected.
        SettingError: the engine's default cannot be honoured.
        ModelError: the target's logits cannot be had on this rank.
    """
    hooks.check_worker()
    vllm_config = runner.vllm_config
    if runner.device.type == "cpu" and cpu_fixes.mend_expansion(vllm_sampler):
        logger.info("dropmatch: mended this vLLM's sampling with drafts on a CPU (expand_batch_to_tokens)")
    vllm_sampler.rejection_sample = judged_rejection_sample
    vllm_sampler.generate_uniform_probs = known_uniform_probs

    head = VllmHead.of(runner)
    default = engine_default(vllm_config)
    settings = RequestSettings(runner, default, vllm_config)
    drafts = None
    if why_no_draft_distribution(vllm_config) is None:
        drafts = DraftLogits(settings.any_compares)
        drafts.attach(runner)
    verifier = Verifier(runner, head, settings, drafts)
    runner.rejection_sampler = JudgedSampler(verifier, runner.sampler, runner.speculative_config, runner.device)
    _watch_sampling(runner, verifier)
    logger.info(
        "dropmatch: installed; rule %s by default, heads over %s",
        "off" if default is None else default.rule,
        "a shortlist" if head.can_gather else "the whole vocabulary (this LM head cannot be gathered from)",
    )
    return verifier


def _watch_sampling(runner: Any, verifier: Verifier) -> None:
    """Show the verifier the hidden states of each step, and have its output carry the reasons."""
    sample_tokens = runner.sample_tokens
    set_aside = runner.device.type == "cpu" and not cpu_fixes.can_turn_back()

    def watched(grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        verifier.grammar = grammar_output is not None
        verifier.hidden = None if state is None else state.sample_hidden_states
        verifier.report = {}
        try:
            with cpu_fixes.unused_generators_aside(runner) if set_aside else nullcontext():
                output = sample_tokens(grammar_output, *args, **kwargs)
        finally:
            verifier.hidden = None
        put_on_output(output, verifier.report)
        return output

    runner.sample_tokens = watched
