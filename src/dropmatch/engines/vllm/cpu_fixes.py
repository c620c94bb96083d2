"""Sampling with drafts on a CPU: found broken by trying it, mended where it is.

vLLM 0.32.0 expands a request's temperature, top-k and top-p to its draft rows by a kernel whose CPU version
writes into a copy of its output and drops it (vllm issue 55005), so that what it returns is uninitialised
memory. The probe asks the function itself; a vLLM that has mended it is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mend_expansion(module: Any) -> bool:
    """Replace `expand_batch_to_tokens` of vLLM's rejection sampler if it answers wrongly on a CPU.

    Args:
        module: `vllm.v1.sample.rejection_sampler`.

    Returns:
        Whether it was replaced.
    """
    if expands(module.expand_batch_to_tokens):
        return False
    module.expand_batch_to_tokens = expand
    return True


def expands(function: Any) -> bool:
    """Whether a function expands values of requests to their tokens, in the dtypes that vLLM uses."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32):
        values = torch.tensor([3, 7, 0], dtype=dtype)
        wanted = torch.tensor([3, 3, 1, 1, 1], dtype=dtype)
        if not torch.equal(function(values, ends, 5, replace_from=0, replace_to=1), wanted):
            return False
    return True


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """A value per request to a value per token: [B], [B] ends of the requests' tokens -> [num_tokens]."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)
