"""vLLM's V2 model runner on a CPU: its Triton kernels run in Triton's interpreter, which vLLM does not offer.

So the interpreter is switched on, vLLM is told that there is a Triton backend, and two things that the
interpreter lacks are supplied. All of it happens before vLLM is imported.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder


class _AlwaysActive:
    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = SimpleNamespace(driver=_AlwaysActive)


def _with_bool_mask(method: Any, place: int) -> Any:
    """The interpreter's loads and stores want masks of bool, and kernels give them masks of int1."""

    def wrapper(self: Any, *args: Any) -> Any:
        args[place].data = args[place].data.astype(bool)
        return method(self, *args)

    return wrapper


InterpreterBuilder.create_masked_load = _with_bool_mask(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _with_bool_mask(InterpreterBuilder.create_masked_store, 2)

import triton.language as tl  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils  # noqa: E402

# a function of the GPU's device library
rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
