"""Settings of the engine and of requests: what is read from where, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dropmatch import AcceptanceConfig, SettingError
from dropmatch.engines.vllm.settings import engine_default, request_config


def vllm_config(**changes: Any) -> Any:
    """As much of a VllmConfig as the settings look at."""
    speculative = SimpleNamespace(
        method=changes.pop("method", "draft_model"),
        rejection_sample_method=changes.pop("rejection_sample_method", "standard"),
        use_heterogeneous_vocab=changes.pop("use_heterogeneous_vocab", False),
        use_local_argmax_reduction=changes.pop("use_local_argmax_reduction", False),
        parallel_drafting=changes.pop("parallel_drafting", False),
        draft_sample_method=changes.pop("draft_sample_method", "greedy"),
        enable_adaptive_verification=changes.pop("enable_adaptive_verification", False),
    )
    sharded = changes.pop("enable_batch_sharded_sampling", False)
    return SimpleNamespace(
        **{
            "speculative_config": speculative,
            "additional_config": {},
            "use_v2_model_runner": False,
            "lora_config": None,
            "watermark_config": None,
            "parallel_config": SimpleNamespace(enable_batch_sharded_sampling=sharded),
            **changes,
        }
    )


NO_DRAFTS = vllm_config(speculative_config=None)


@pytest.mark.parametrize("additional", [{}, {"other": 1}, {"dropmatch": {}}, {"dropmatch": {"rule": "off"}}, "opaque"])
def test_the_rule_is_off_unless_the_engine_names_one(additional: Any) -> None:
    assert engine_default(vllm_config(additional_config=additional)) is None


def test_the_engine_names_a_rule_and_its_settings() -> None:
    additional = {"dropmatch": {"rule": "js", "heads": 7, "dropout": 0.1}}
    assert engine_default(vllm_config(additional_config=additional)) == AcceptanceConfig("js", heads=7, dropout=0.1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("js", "must hold settings"),
        ({"rule": "nope"}, "unknown rule 'nope'; the rules are: off, ensemble, fly, fuzzy, js, margin, naive, strict"),
        ({"heads": 5}, "sets heads but no rule"),
        ({"rule": "js", "heads": 0}, "heads"),
        ({"rule": "js", "dropout": 1.0}, "dropout"),
        ({"rule": "js", "haeds": 5}, "haeds"),
        ({"rule": "js", "dropout": {"p": 0.1}}, "dropout must be a single value"),
    ],
)
def test_a_bad_engine_setting_is_refused_by_name_case_28(options: Any, named: str) -> None:
    with pytest.raises(SettingError, match=named) as error:
        engine_default(vllm_config(additional_config={"dropmatch": options}))
    assert "--additional-config" in str(error.value)


def test_a_request_without_keys_takes_the_engines_default() -> None:
    default = AcceptanceConfig("naive")
    for extra in (None, {}, {"kv_transfer_params": {"a": 1}}):
        assert request_config(extra, default, vllm_config()) is default
        assert request_config(extra, None, vllm_config()) is None


def test_a_requests_keys_override_the_default_one_by_one() -> None:
    default = AcceptanceConfig("js", heads=9, dropout=0.2)
    found = request_config({"dropmatch_dropout": 0.1, "dropmatch_mask_seed": 3}, default, vllm_config())
    assert found == AcceptanceConfig("js", heads=9, dropout=0.1, mask_seed=3)
    assert request_config({"dropmatch": "naive"}, default, vllm_config()) == AcceptanceConfig("naive", 9, 0.2)
    assert request_config({"dropmatch": "off"}, default, vllm_config()) is None


def test_a_request_names_a_rule_where_the_engine_has_none() -> None:
    found = request_config({"dropmatch": "js", "dropmatch_heads": 3}, None, vllm_config())
    assert found == AcceptanceConfig("js", heads=3)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (
            {"dropmatch": "nope"},
            "unknown rule 'nope'; the rules are: off, ensemble, fly, fuzzy, js, margin, naive, strict",
        ),
        ({"dropmatch": 3}, "unknown rule 3"),
        ({"dropmatch": True}, "unknown rule True"),
        ({"dropmatch": "js", "dropmatch_heads": 0}, "heads"),
        ({"dropmatch": "js", "dropmatch_heads": "5"}, "heads"),
        ({"dropmatch": "js", "dropmatch_heads": 2.5}, "heads"),
        ({"dropmatch": "js", "dropmatch_dropout": 1}, "dropout"),
        ({"dropmatch": "js", "dropmatch_dropout": -0.1}, "dropout"),
        ({"dropmatch": "js", "dropmatch_dropout": [0.1]}, "dropout must be a single value"),
        ({"dropmatch": "js", "dropmatch_dropout": {"p": 0.1}}, "dropout must be a single value"),
        ({"dropmatch": {"rule": "js"}}, "unknown rule"),
        ({"dropmatch": "js", "dropmatch_foo": 1}, "unknown key 'dropmatch_foo'.*dropmatch_heads"),
        ({"dropmatch": "js", "dropmatch_rule": "js"}, "unknown key 'dropmatch_rule'"),
        ({"dropmatchheads": 1}, "unknown key 'dropmatchheads'"),
        (
            {"dropmatch": "js", "dropmatch_verdict": "sampled", "dropmatch_strictness": 0.7},
            "strictness has a meaning for verdict='denoised' only",
        ),
        ({"dropmatch": "js", "dropmatch_verdict": "denoised", "dropmatch_mask_seed": 1}, "mask_seed has no meaning"),
        ({"dropmatch": "js", "dropmatch_verdict": "often"}, "verdict must be one of"),
        ({"dropmatch_heads": 5}, "dropmatch_heads has no effect"),
        ({"dropmatch": "off", "dropmatch_heads": 5}, "dropmatch_heads has no effect"),
    ],
)
def test_a_bad_key_or_value_of_a_request_is_refused_by_name_case_28(extra: Any, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        request_config(extra, None, vllm_config())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_config": None}, "drafts nothing"),
        ({"use_v2_model_runner": True, "enable_adaptive_verification": True}, "enable_adaptive_verification"),
        ({"use_v2_model_runner": True, "enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling"),
        ({"use_v2_model_runner": True, "watermark_config": object()}, "watermarking"),
        ({"rejection_sample_method": "block"}, "'standard'"),
        ({"lora_config": object()}, "LoRA"),
    ],
)
@pytest.mark.parametrize("rule", ["js", "naive"])
def test_an_engine_that_cannot_run_a_lossy_rule_refuses_it(changes: Any, named: str, rule: str) -> None:
    config = vllm_config(**changes)
    with pytest.raises(SettingError, match=named):
        request_config({"dropmatch": rule}, None, config)
    config.additional_config = {"dropmatch": {"rule": rule}}
    with pytest.raises(SettingError, match=named):
        engine_default(config)
    for lossless in ("off", "strict"):
        request_config({"dropmatch": lossless}, None, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ngram"},
        {"method": "eagle3"},
        {"use_heterogeneous_vocab": True},
        {"use_local_argmax_reduction": True},
        {"parallel_drafting": True},
    ],
)
def test_js_is_refused_where_the_draft_has_no_distribution_and_naive_is_not_case_7(changes: Any) -> None:
    config = vllm_config(**changes)
    with pytest.raises(SettingError, match="use rule 'naive'"):
        request_config({"dropmatch": "js"}, None, config)
    assert request_config({"dropmatch": "naive"}, None, config) == AcceptanceConfig("naive")
    with pytest.raises(SettingError, match="use rule 'naive'"):
        request_config({"dropmatch": "js"}, AcceptanceConfig("naive"), config)


def test_on_the_v2_runner_js_needs_drafts_that_keep_their_logits() -> None:
    with pytest.raises(SettingError, match=r"draft_sample_method.*VLLM_USE_V2_MODEL_RUNNER=0"):
        request_config({"dropmatch": "js"}, None, vllm_config(use_v2_model_runner=True))
    kept = vllm_config(use_v2_model_runner=True, draft_sample_method="probabilistic")
    assert request_config({"dropmatch": "js"}, None, kept) == AcceptanceConfig("js")
    with pytest.raises(SettingError, match=r"eager.*VLLM_USE_V2_MODEL_RUNNER=0"):
        request_config({"dropmatch": "js", "dropmatch_evaluation": "eager"}, None, kept)
