"""Seeded sampling and sampling with drafts on a CPU: found broken by trying it, mended where it is.

vLLM 0.32.0 expands a request's temperature, top-k and top-p to its draft rows by a kernel whose CPU version
writes into a copy of its output and drops it (vllm issue 55005), so that what it returns is uninitialised
memory. The probe asks the function itself; a vLLM that has mended it is left alone.

It also turns back the generator of a seeded request whose prompt is not yet through, since the token sampled
there is dropped; a CPU's generators cannot be turned back, and the engine dies. So they are set aside before
such a step instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def can_turn_back() -> bool:
    """Whether a CPU's generator knows its offset, as vLLM assumes."""
    generator = torch.Generator()
    try:
        generator.set_offset(generator.get_offset())
    except RuntimeError:
        return False
    return True


@contextmanager
def unused_generators_aside(runner: Any) -> Iterator[None]:
    """While active, requests whose sampled token is dropped have no generator of their own.

    Args:
        runner: vLLM's V1 model runner, between a forward and its sampling.
    """
    batch = runner.input_batch
    dropped = [i for i in range(batch.num_reqs) if runner.discard_request_mask.np[i]]
    aside = {i: batch.generators.pop(i) for i in dropped if i in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(aside)
