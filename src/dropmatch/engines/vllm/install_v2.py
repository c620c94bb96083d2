"""Puts the parts into a worker with vLLM's V2 model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as vllm_sampler

from dropmatch.engines.vllm import hooks
from dropmatch.engines.vllm.head import VllmHead
from dropmatch.engines.vllm.reporting import put_on_output
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.settings import engine_default
from dropmatch.engines.vllm.verifier_v2 import JudgedSamplerV2, VerifierV2, judged_rejection_sample

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


def install(runner: Any) -> VerifierV2:
    """Give a V2 model runner, whose models are loaded, the acceptance rules.

    Args:
        runner: vLLM's V2 model runner of the last pipeline rank.

    Returns:
        What judges its drafts.

    Raises:
        UnsupportedVLLM: this vLLM is not as expected.
        SettingError: the engine's default cannot be honoured.
        ModelError: the target's logits cannot be had on this rank.
    """
    hooks.check_worker_v2()
    default = engine_default(runner.vllm_config)
    settings = RequestSettings(_requests_of(runner), default, runner.vllm_config)
    verifier = VerifierV2(runner, VllmHead.of(runner), settings)
    vllm_sampler.rejection_sample = judged_rejection_sample
    runner.rejection_sampler = JudgedSamplerV2(verifier, runner.sampler, runner.speculative_config, runner.device)
    _watch_sampling(runner, verifier)
    logger.info("dropmatch: installed for the V2 model runner; rule %s", "off" if default is None else default.rule)
    return verifier


def _requests_of(runner: Any) -> Any:
    """Requests by id with their parameters, as the V1 runner keeps them and the V2 runner does not."""
    requests: dict[str, Any] = {}
    add_requests = runner.add_requests

    def remembering(scheduler_output: Any) -> None:
        add_requests(scheduler_output)
        alive = runner.req_states.req_id_to_index
        for gone in [name for name in requests if name not in alive]:
            del requests[gone]
        for new in scheduler_output.scheduled_new_reqs:
            requests[new.req_id] = SimpleNamespace(sampling_params=new.sampling_params)

    runner.add_requests = remembering
    return SimpleNamespace(requests=requests)


def _watch_sampling(runner: Any, verifier: VerifierV2) -> None:
    """Show the verifier each step's hidden states and logits, and have its output carry the reasons."""
    sample, sample_tokens = runner.sample, runner.sample_tokens
    states = runner.sampler.sampling_states
    apply_temperature = states.apply_temperature

    def watched_sample(hidden_states: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        verifier.hidden, verifier.logits_indices = hidden_states, input_batch.logits_indices
        try:
            return sample(hidden_states, input_batch, *args, **kwargs)
        finally:
            verifier.hidden = verifier.logits_indices = None

    def watched_temperature(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        verifier.note_processed(logits)
        apply_temperature(logits, *args, **kwargs)

    def watched_sample_tokens(*args: Any, **kwargs: Any) -> Any:
        verifier.report = {}
        output = sample_tokens(*args, **kwargs)
        put_on_output(output, verifier.report)
        return output

    runner.sample, states.apply_temperature = watched_sample, watched_temperature
    runner.sample_tokens = watched_sample_tokens
