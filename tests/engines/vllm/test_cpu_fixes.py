"""The expansion of values to tokens that vLLM's CPU build gets wrong, and its probe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm.v1.sample import rejection_sampler as vllm_sampler

from dropmatch.engines.vllm import cpu_fixes


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 7])), min_size=1, max_size=6),
       st.sampled_from([torch.float32, torch.int32, torch.int64]), st.integers(0, 2), st.integers(0, 9))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_expand_repeats_each_requests_value_for_its_tokens(
    rows: list[tuple[int, int]], dtype: torch.dtype, old: int, new: int
) -> None:
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    values = torch.tensor([value for _, value in rows], dtype=dtype)
    wanted = [new if value == old else value for count, value in rows for _ in range(count)]
    before = values.clone()
    found = cpu_fixes.expand(values, counts.cumsum(0).int(), len(wanted), replace_from=old, replace_to=new)
    assert found.dtype == dtype
    assert found.tolist() == wanted
    assert torch.equal(values, before)
    plain = cpu_fixes.expand(values, counts.cumsum(0).int(), len(wanted))
    assert plain.tolist() == [value for count, value in rows for _ in range(count)]


def test_the_probe_passes_a_good_function_and_refuses_broken_ones() -> None:
    good = cpu_fixes.expand

    def only_integers(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = good(x, *args, **kwargs)
        return found if x.dtype == torch.int32 else torch.zeros_like(found)

    def only_floats(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = good(x, *args, **kwargs)
        return found if x.dtype == torch.float32 else torch.zeros_like(found)

    def replaces_nothing(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return good(x, ends, n)

    def uninitialised(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return x.new_full((n,), 3)

    def ignores_empty(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return good(x, torch.tensor([2, 4, 5]), n, **kwargs)

    assert cpu_fixes.expands(good)
    for broken in (only_integers, only_floats, replaces_nothing, uninitialised, ignores_empty):
        assert not cpu_fixes.expands(broken), broken.__name__


def test_mending_replaces_a_broken_expansion_and_leaves_a_good_one_alone() -> None:
    def broken(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return x.new_zeros(n)

    def fine(*args: Any, **kwargs: Any) -> Tensor:
        return cpu_fixes.expand(*args, **kwargs)

    module = SimpleNamespace(expand_batch_to_tokens=broken)
    assert cpu_fixes.mend_expansion(module)
    assert module.expand_batch_to_tokens is cpu_fixes.expand
    assert not cpu_fixes.mend_expansion(module)
    module = SimpleNamespace(expand_batch_to_tokens=fine)
    assert not cpu_fixes.mend_expansion(module)
    assert module.expand_batch_to_tokens is fine


def test_vllms_own_expansion_is_found_right_or_mended() -> None:
    """Whatever this vLLM does, sampling with drafts is right afterwards."""
    with patch.object(vllm_sampler, "expand_batch_to_tokens", vllm_sampler.expand_batch_to_tokens):
        cpu_fixes.mend_expansion(vllm_sampler)
        assert cpu_fixes.expands(vllm_sampler.expand_batch_to_tokens)
