"""Arguments as users and other programs pass them: taken as meant, or refused with the option's name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import dropmatch
from dropmatch.engines.hf.engine import NoisyHeadsWarning
from dropmatch.errors import ModelError, SettingError


def test_no_stop_strings_may_be_none(tiny: Any) -> None:
    """OpenAI clients send null."""
    engine, prompt = tiny.engine(), tiny.prompt(1)
    assert engine.generate(prompt, stop=None, max_tokens=9).token_ids == engine.generate(prompt, max_tokens=9).token_ids


def test_ids_may_be_a_numpy_array(tiny: Any) -> None:
    engine, prompt = tiny.engine(), tiny.prompt(1)
    expected = engine.generate(prompt, max_tokens=9).token_ids
    assert engine.generate(prompt.numpy(), max_tokens=9).token_ids == expected
    assert engine.generate(prompt.numpy()[None], max_tokens=9).token_ids == expected
    with pytest.raises(SettingError, match="one prompt at a time"):
        engine.generate(np.stack([prompt, prompt]), max_tokens=9)


@pytest.mark.parametrize("bad", [-1, 10**6, 1.5])
def test_ids_outside_the_vocabulary_are_refused(tiny: Any, bad: float) -> None:
    with pytest.raises(SettingError, match="token ids must be integers from 0 to"):
        tiny.engine().generate([5, bad, 7], max_tokens=3)


def test_a_temperature_that_overflows_is_refused(tiny: Any) -> None:
    with pytest.raises(SettingError, match=r"temperature must be 0 \(greedy\) or at least"):
        tiny.engine().generate(tiny.prompt(1), temperature=1e-40)


def test_custom_generate_may_be_a_partial(tiny: Any) -> None:
    target, draft = tiny.pair("llama")
    prompt = tiny.prompt(1)[None]
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    strict = functools.partial(dropmatch.generate, rule="strict")
    ids = target.generate(prompt, assistant_model=draft, custom_generate=strict, **options)
    assert torch.equal(ids, target.generate(prompt, **options))


def test_lookup_with_a_draft_length_of_zero_drafts_nothing(tiny: Any) -> None:
    target = tiny.pair("llama")[0]
    prompt = tiny.prompt(1)[None]
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        custom_generate=dropmatch.generate,
        rule="strict",
        prompt_lookup_num_tokens=3,
        draft_length=0,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.dropmatch["proposed"] == 0


def test_a_seed_out_of_range_is_refused_by_custom_generate(tiny: Any) -> None:
    target, draft = tiny.pair("llama")
    with pytest.raises(SettingError, match="seed must be an integer"):
        target.generate(
            tiny.prompt(1)[None],
            assistant_model=draft,
            custom_generate=dropmatch.generate,
            seed=2**70,
            max_new_tokens=3,
            do_sample=True,
        )


def test_unknown_draft_weights_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SettingError, match="draft_weights must be one of: auto, dense, int4"):
        dropmatch.load("/no/such/folder", draft_weights="int2")


def test_a_missing_folder_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="no/such/folder"):
        dropmatch.load("/no/such/folder")


@pytest.mark.parametrize("draft", ["prompt-lookup", "none"])
def test_int4_without_a_draft_model_is_refused(draft: str) -> None:
    with pytest.raises(SettingError, match="needs a draft model"):
        dropmatch.load("/no/such/folder", draft, draft_weights="int4")


def test_custom_generate_warns_of_noisy_heads(tiny: Any) -> None:
    target = tiny.build_model("llama", peak=2.0)
    with pytest.warns(NoisyHeadsWarning) as caught:
        target.generate(
            tiny.prompt(1)[None],
            assistant_model=tiny.perturb(target, 0.4),
            custom_generate=dropmatch.generate,
            rule="js",
            dropout=0.9,
            token_floor=0.0,
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=None,
        )
    assert any(warning.category is NoisyHeadsWarning for warning in caught)


def test_custom_generate_refuses_a_transformers_that_loses_the_assistant(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmatch.engines.hf.custom_generate._handed_over", False)
    target, draft = tiny.pair("llama")
    with pytest.raises(SettingError, match=r"use dropmatch\.load"):
        target.generate(tiny.prompt(1)[None], assistant_model=draft, custom_generate=dropmatch.generate)
