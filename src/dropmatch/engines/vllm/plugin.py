"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

from functools import wraps
from typing import Any

from dropmatch.engines.vllm import hooks, reporting
from dropmatch.engines.vllm.settings import engine_default, request_config, why_no_lossy_rule
from dropmatch.errors import SettingError

_MARK = "_dropmatch"


def register() -> None:
    """Wrap what admits requests, what hands out their tokens, and what starts workers. Harmless when repeated.

    Raises:
        UnsupportedVLLM: this vLLM is not as expected.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, _MARK):
        return
    hooks.check_version()
    hooks.check_front_end()
    InputProcessor.__init__ = _checks_default(InputProcessor.__init__)
    InputProcessor._validate_params = _checks_request(InputProcessor._validate_params)
    AsyncLLM.generate = _checks_before_streaming(AsyncLLM.generate)
    Scheduler.update_from_output = reporting.pass_on(Scheduler.update_from_output)
    OutputProcessor.process_outputs = reporting.take_off_and_count(OutputProcessor.process_outputs)
    WorkerBase.__init__ = _installs(WorkerBase.__init__)
    setattr(WorkerBase, _MARK, True)


def _checks_default(init: Any) -> Any:
    """Front end: refuse an engine default that cannot be honoured, before any model is loaded."""

    @wraps(init)
    def wrapper(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.dropmatch_default = engine_default(vllm_config)
        init(self, vllm_config, *args, **kwargs)

    return wrapper


def _checks_request(validate: Any) -> Any:
    """Front end: refuse a request whose keys cannot be honoured, as vLLM refuses its own (a 400 over HTTP)."""

    @wraps(validate)
    def wrapper(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        result = validate(self, params, *args, **kwargs)
        _check(params, self)
        return result

    return wrapper


def _checks_before_streaming(generate: Any) -> Any:
    """Front end: the same before a stream has begun, when it is too late for a 400."""

    @wraps(generate)
    def wrapper(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        _check(sampling_params, self.input_processor)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    return wrapper


def _check(params: Any, processor: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    extra_args = getattr(params, "extra_args", None)
    if extra_args:
        try:
            request_config(extra_args, processor.dropmatch_default, processor.vllm_config)
        except SettingError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _installs(init: Any) -> Any:
    """Worker: install into its model runner once that has loaded its models."""

    @wraps(init)
    def wrapper(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        engine_default(vllm_config)  # raises before any weight is read
        init(self, vllm_config, *args, **kwargs)
        if why_no_lossy_rule(vllm_config) is None:
            (hooks.check_worker_v2 if vllm_config.use_v2_model_runner else hooks.check_worker)()
            self.load_model = _then_install(self, self.load_model)

    return wrapper


def _then_install(worker: Any, load_model: Any) -> Any:
    @wraps(load_model)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_pp_group

        result = load_model(*args, **kwargs)
        if get_pp_group().is_last_rank:
            if worker.vllm_config.use_v2_model_runner:
                from dropmatch.engines.vllm.install_v2 import install
            else:
                from dropmatch.engines.vllm.install import install  # type: ignore[assignment]
            install(worker.model_runner)
        return result

    return wrapper
