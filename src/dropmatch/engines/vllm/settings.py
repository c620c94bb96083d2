"""Settings of the engine and of a request, and whether this engine can honour them.

The engine's default comes from vLLM's `additional_config`:

    --additional-config '{"dropmatch": {"rule": "js", "heads": 5, "dropout": 0.3}}'

and a request overrides it by flat keys in `SamplingParams.extra_args` (`vllm_xargs` over HTTP):

    {"dropmatch": "naive", "dropmatch_dropout": 0.1}

Without either the rule is off, and a request decodes as it does without the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dropmatch.acceptance.registry import get_rule, rule_names
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError

KEY = "dropmatch"
PREFIX = "dropmatch_"
OFF = "off"
_OPTIONS = tuple(field.name for field in fields(AcceptanceConfig) if field.name != "rule")


def engine_default(vllm_config: Any) -> AcceptanceConfig | None:
    """The acceptance settings of requests that name none; None is off.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        SettingError: the settings are not valid, or this engine cannot honour them.
    """
    additional = vllm_config.additional_config
    options = additional.get(KEY) if isinstance(additional, Mapping) else None
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise SettingError(
            f'--additional-config: "dropmatch" must hold settings, as in {{"dropmatch": {{"rule": "js"}}}}, '
            f"got {options!r}"
        )
    options = dict(options)
    rule = options.pop("rule", OFF)
    if rule == OFF:
        if options:
            raise SettingError(
                f"--additional-config: dropmatch sets {', '.join(sorted(options))} but no rule; add "
                f'"rule": one of {", ".join(rule_names())}'
            )
        return None
    config = _config(rule, options, None, "--additional-config: dropmatch")
    _check_engine(config, vllm_config)
    return config


def request_config(
    extra_args: Mapping[str, Any] | None, default: AcceptanceConfig | None, vllm_config: Any
) -> AcceptanceConfig | None:
    """The acceptance settings of one request; None is off.

    Args:
        extra_args: `SamplingParams.extra_args`.
        default: the engine's own.
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        SettingError: an unknown key or value, or a setting that this engine cannot honour.
    """
    given = {key: value for key, value in (extra_args or {}).items() if key.startswith(KEY)}
    if not given:
        return default
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key == KEY:
            continue
        name = key.removeprefix(PREFIX)
        if name not in _OPTIONS or not key.startswith(PREFIX):
            known = ", ".join([KEY, *(PREFIX + option for option in _OPTIONS)])
            raise SettingError(f"unknown key {key!r} in vllm_xargs / extra_args; dropmatch knows: {known}")
        options[name] = value
    rule = given.get(KEY)
    if rule == OFF or (rule is None and default is None):
        if options:
            key = PREFIX + next(iter(options))
            raise SettingError(
                f"{key} has no effect while dropmatch is off: also give {KEY!r}, one of {', '.join(rule_names())}"
            )
        return None
    config = _config(rule, options, default, KEY)
    if config != default:
        _check_engine(config, vllm_config)
    return config


def check_rule(rule: object, where: str) -> None:
    """Raises SettingError: neither a rule's name nor "off"."""
    if not isinstance(rule, str) or rule not in (OFF, *rule_names()):
        raise SettingError(f"{where}: unknown rule {rule!r}; the rules are: {OFF}, {', '.join(rule_names())}")


def why_no_lossy_rule(vllm_config: Any) -> str | None:
    """Why this engine can run no lossy rule, with what to change; None if it can."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "this engine drafts nothing: start it with --speculative-config (a draft model, ngram, ...)"
    if vllm_config.use_v2_model_runner:
        parallel = vllm_config.parallel_config
        for name, used in (
            ("watermarking", vllm_config.watermark_config is not None),
            ("enable_batch_sharded_sampling", parallel.enable_batch_sharded_sampling),
            ("enable_adaptive_verification", speculative.enable_adaptive_verification),
        ):
            if used:
                return f"{name} decides about tokens elsewhere in vLLM's V2 model runner: turn it off"
    if speculative.rejection_sample_method != "standard":
        return (
            f"rejection_sample_method={speculative.rejection_sample_method!r} in --speculative-config has an "
            "acceptance of its own: set it to 'standard'"
        )
    if vllm_config.lora_config is not None:
        return "LoRA adapters (--enable-lora) are not supported: heads of an adapted LM head were never checked"
    return None


def why_no_draft_distribution(vllm_config: Any) -> str | None:
    """Why the drafter's distribution cannot be had, for rules that compare it; None if it can."""
    speculative = vllm_config.speculative_config
    if speculative.method != "draft_model":
        return f"the draft method {speculative.method!r} offers no distribution over the target's vocabulary"
    if vllm_config.use_v2_model_runner and speculative.draft_sample_method != "probabilistic":
        return (
            'vLLM\'s V2 model runner keeps the draft\'s logits only with "draft_sample_method": "probabilistic" in '
            "--speculative-config: add it, or set the environment variable VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if speculative.use_heterogeneous_vocab:
        return "the draft model has another vocabulary (use_heterogeneous_vocab)"
    if speculative.parallel_drafting:
        return "parallel drafting makes all tokens of a draft at once, which was never tried"
    if speculative.use_local_argmax_reduction:
        return "use_local_argmax_reduction in --speculative-config keeps the draft's logits apart; set it to false"
    return None


def _config(rule: Any, options: Mapping[str, Any], default: AcceptanceConfig | None, where: str) -> AcceptanceConfig:
    """Settings from a rule and options over a default; errors name where they came from."""
    if rule is not None:
        check_rule(rule, where)
        options = {**options, "rule": rule}
    try:
        if default is None:
            return AcceptanceConfig.from_options(options)
        return default.changed(**options)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None


def _check_engine(config: AcceptanceConfig, vllm_config: Any) -> None:
    rule = get_rule(config.rule)
    if rule.lossless:
        return
    if config.evaluation == "eager" and vllm_config.use_v2_model_runner:
        raise SettingError(
            "evaluation='eager' needs vLLM's V1 model runner: set the environment variable VLLM_USE_V2_MODEL_RUNNER=0"
        )
    reason = why_no_lossy_rule(vllm_config)
    if reason is not None:
        raise SettingError(f"rule {rule.name!r} cannot be used: {reason}")
    if rule.needs_block:
        if vllm_config.use_v2_model_runner:
            raise SettingError(
                f"rule {rule.name!r} looks at the whole draft, which needs vLLM's V1 model runner: set the environment "
                "variable VLLM_USE_V2_MODEL_RUNNER=0"
            )
        rule.check_window(config.window, vllm_config.speculative_config.num_speculative_tokens)
    if rule.needs_draft_distribution:
        reason = why_no_draft_distribution(vllm_config)
        if reason is not None:
            raise SettingError(
                f"rule {rule.name!r} compares distributions, and {reason}: use rule 'naive', or draft with a model "
                "of the target's vocabulary"
            )
