"""KV cache: after a rollback it is that of a fresh prefill; room and kinds of models are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dropmatch.decoding.cached_model import CachedModel
from dropmatch.errors import ModelError, SettingError


def layers(cached: CachedModel) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cached._cache.layers]


def assert_same_cache(cached: CachedModel, ids: Tensor) -> None:
    """Keys and values of every layer equal those of one prefill of ids, and the next logits agree."""
    fresh = CachedModel(cached.model)
    fresh.extend(ids, keep=1)
    fresh.rollback(ids.shape[0])
    assert cached.length == fresh.length == ids.shape[0]
    assert len(layers(cached)) == len(layers(fresh)) > 0
    for (keys, values), (fresh_keys, fresh_values) in zip(layers(cached), layers(fresh), strict=True):
        assert keys.shape == fresh_keys.shape
        torch.testing.assert_close(keys, fresh_keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, fresh_values, rtol=1e-4, atol=1e-4)
    assert cached._cache.get_seq_length() == ids.shape[0]


@pytest.fixture
def cached(tiny: Any, family: str) -> CachedModel:
    return CachedModel(tiny.pair(family)[0])


@pytest.mark.parametrize("prompt_length", [1, 5, 7, 8, 9, 30])
@torch.no_grad()
def test_rollback_is_a_fresh_prefill(tiny: Any, cached: CachedModel, prompt_length: int) -> None:
    """Every rejection depth in turn, with prompts below, at and above the sliding window of 8."""
    prompt, other = tiny.prompt(1, prompt_length), tiny.prompt(2, 40)
    ids = prompt
    for step, kept in enumerate([0, 3, 6, 1, 0, 5, 2, 6]):
        block = other[step : step + 6]
        cached.extend(torch.cat([ids, block])[cached.length :], keep=7)
        ids = torch.cat([ids, block[:kept]])
        cached.rollback(ids.shape[0])
        assert_same_cache(cached, ids)
        following = torch.cat([ids, other[30:31]])
        logits = cached.extend(following[-1:], keep=1)
        expected = cached.model(input_ids=following[None], use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        cached.rollback(ids.shape[0])


@torch.no_grad()
def test_several_extensions_before_one_rollback(tiny: Any, cached: CachedModel) -> None:
    """What a draft model does: one token at a time, then back over many."""
    ids = tiny.prompt(3, 9)
    cached.extend(ids, keep=1)
    cached.rollback(9)
    drafted = tiny.prompt(4, 12)
    for i in range(12):
        logits = cached.extend(drafted[i : i + 1], keep=1)
        sequence = torch.cat([ids, drafted[: i + 1]])
        expected = cached.model(input_ids=sequence[None], use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    cached.rollback(10)
    assert_same_cache(cached, torch.cat([ids, drafted[:1]]))


@torch.no_grad()
def test_extend_returns_the_kept_rows(tiny: Any, cached: CachedModel) -> None:
    ids = tiny.prompt(5, 11)
    expected = cached.model(input_ids=ids[None], use_cache=False).logits[0]
    for keep in (1, 4, 11):
        cached = CachedModel(cached.model)
        logits = cached.extend(ids, keep=keep)
        assert logits.shape == (keep, tiny.VOCAB)
        torch.testing.assert_close(logits, expected[-keep:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rollback_of_nothing_before_the_first_extension(cached: CachedModel) -> None:
    """A drafter that was not asked in the first round is still told what was committed."""
    cached.rollback(0)
    assert cached.length == 0


@torch.no_grad()
def test_two_caches_of_one_model(tiny: Any, cached: CachedModel) -> None:
    other = CachedModel(cached.model)
    ids, other_ids = tiny.prompt(6, 15), tiny.prompt(7, 12)
    cached.extend(ids[:10], keep=1)
    other.extend(other_ids, keep=1)
    cached.extend(ids[10:], keep=1)
    cached.rollback(14)
    other.rollback(12)
    assert_same_cache(cached, ids[:14])
    assert_same_cache(other, other_ids)


def test_encoder_decoder_is_refused(tiny: Any) -> None:
    with pytest.raises(ModelError, match="encoder-decoder"):
        CachedModel(tiny.build_model("t5"))


def test_recurrent_state_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="recurrent"):
        CachedModel(model)


def test_room(tiny: Any) -> None:
    cached = CachedModel(tiny.pair("llama")[0])
    cached.check_room(512, "target")
    with pytest.raises(SettingError, match=r"513.*target.*512"):
        cached.check_room(513, "target")
    with pytest.raises(SettingError, match="another draft"):
        cached.check_room(513, "draft")
