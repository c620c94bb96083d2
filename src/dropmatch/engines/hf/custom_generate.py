"""`model.generate(**inputs, assistant_model=draft, custom_generate=dropmatch.generate, rule="js", …)`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.loop import Request, decode
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.stopping import StopRules
from dropmatch.drafting import Drafter, DraftModel, PromptLookup
from dropmatch.engines.hf.engine import check_acceptance, warn_if_noisy
from dropmatch.engines.hf.head import ModelHead
from dropmatch.errors import SettingError

# what transformers' GenerationConfig says when nobody chose
TRANSFORMERS_DRAFT_LENGTH = 20

_EXTRACT = "_extract_generation_mode_kwargs"


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    assistant_model: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    rule: str = "js",
    heads: int = 5,
    dropout: float = 0.3,
    verdict: str = AcceptanceConfig.verdict,
    strictness: float = AcceptanceConfig.strictness,
    heads_mode: str = AcceptanceConfig.heads_mode,
    gaussian_tokens: int = AcceptanceConfig.gaussian_tokens,
    token_floor: float | None = None,
    support: str = "auto",
    shortlist_size: int = 2048,
    evaluation: str = "lazy",
    mask_seed: int | None = None,
    threshold: float | None = None,
    delta: float | None = None,
    window: int | None = None,
    weight: float | None = None,
    candidates: int | None = None,
    draft_length: int | None = None,
    draft_stop_probability: float = 0.0,
    seed: int | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decode for `transformers`; pass it as `custom_generate`, not by itself.

    Length, sampling, stop strings, constraints and the streamer come from the usual arguments of
    `model.generate`; the rest are fields of `AcceptanceConfig` and `DraftConfig`.

    Args:
        model: the target.
        input_ids: [1, T].
        logits_processor: as `model.generate` prepared them, temperature and top-k/p included.
        stopping_criteria: likewise, length and end-of-sequence included.
        generation_config: likewise.
        assistant_model: the draft model; without one, `prompt_lookup_num_tokens` in the generation config
            drafts by prompt lookup.
        streamer: receives the tokens of each round.
        tokenizer: needed by transformers for `stop_strings`.
        assistant_tokenizer: refused: the draft must share the target's tokenizer.
        draft_length: L; None takes `num_assistant_tokens` of the draft's generation config if it is set to
            other than transformers' default, else 5.
        seed: seed of every random number; None draws one from torch's generator.
        synced_gpus: refused.
        **model_kwargs: inputs of the model; what cannot be honoured is refused.

    Returns:
        [1, T + n] token ids, or with `return_dict_in_generate` a GenerateDecoderOnlyOutput with `sequences`
        and the extra attribute `dropmatch`, the statistics as a dictionary.

    Raises:
        SettingError: something asked for cannot be honoured; nothing was generated.
    """
    acceptance = AcceptanceConfig(
        rule=rule,
        heads=heads,
        dropout=dropout,
        verdict=verdict,
        strictness=strictness,
        heads_mode=heads_mode,
        gaussian_tokens=gaussian_tokens,
        token_floor=token_floor,
        support=support,
        shortlist_size=shortlist_size,
        evaluation=evaluation,
        mask_seed=mask_seed,
        threshold=threshold,
        delta=delta,
        window=window,
        weight=weight,
        candidates=candidates,
    )
    if not _handed_over:
        raise SettingError(
            "this version of transformers prepares custom_generate in a way that dropmatch does not know, so that "
            "assistant_model and streamer would be lost: use dropmatch.load, or transformers 5.19 to 5.24"
        )
    _refuse_unsupported(input_ids, generation_config, model_kwargs, assistant_tokenizer, synced_gpus)
    lookup = getattr(generation_config, "prompt_lookup_num_tokens", None)
    drafter: Drafter
    if assistant_model is not None:
        drafter = DraftModel(assistant_model)
        configured = getattr(assistant_model.generation_config, "num_assistant_tokens", None)
        if draft_length is None and configured not in (None, TRANSFORMERS_DRAFT_LENGTH):
            draft_length = configured
    elif lookup:
        drafter, draft_length = PromptLookup(), lookup if draft_length is None else draft_length
    else:
        raise SettingError("there is no drafter: pass assistant_model=<draft>, or set prompt_lookup_num_tokens")
    draft = DraftConfig(
        draft_length=5 if draft_length is None else draft_length, draft_stop_probability=draft_stop_probability
    )

    target = CachedModel(model)
    head = ModelHead.of(model)
    check_acceptance(acceptance, draft, drafter, head)
    budget = generation_config.max_length - input_ids.shape[1]
    target.check_room(input_ids.shape[1] + budget, "target")
    drafter.check(input_ids.shape[1], budget, head.vocab_size)

    processors, warpers = _split_processors(logits_processor or [])
    seed = SamplingConfig(seed=int(torch.randint(2**31, ())) if seed is None else seed).seed
    request = Request(
        prompt=input_ids[0].to(model.device),
        chooser=TokenChooser(processors, warpers, bool(generation_config.do_sample), seed),
        stop=StopRules(max_tokens=budget, criteria=tuple(stopping_criteria or ())),
        acceptance=acceptance,
        draft=draft,
    )
    statistics = Statistics()
    ids = input_ids
    for block in decode(target, head, drafter, request, statistics):
        new = torch.tensor([block.tokens], device=ids.device)
        if streamer is not None:
            for token in new[0].cpu():  # streamers take one token, or a batch of them, not a block
                streamer.put(token[None])
        ids = torch.cat([ids, new], dim=1)
    if streamer is not None:
        streamer.end()
    warn_if_noisy(statistics, acceptance)
    if not getattr(generation_config, "return_dict_in_generate", False):
        return ids
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    output = GenerateDecoderOnlyOutput(sequences=ids)
    output.dropmatch = statistics.as_dict()
    return output


def _split_processors(processors: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Constraints and penalties first, then temperature and top-k/p, as the acceptance core wants them.

    Raises:
        SettingError: a constraint comes after a warper, so that the two cannot be separated.
    """
    from transformers.generation import logits_process

    names = ("Temperature", "TopK", "TopP", "MinP", "TopH", "Typical", "Epsilon", "Eta")
    kinds = [getattr(logits_process, f"{name}LogitsWarper", None) for name in names]
    warpers = (logits_process.LogitNormalization, *(kind for kind in kinds if kind is not None))
    is_warper = [isinstance(processor, warpers) for processor in processors]
    first = is_warper.index(True) if True in is_warper else len(is_warper)
    if not all(is_warper[first:]):
        late = type(processors[first + is_warper[first:].index(False)]).__name__
        raise SettingError(
            f"{late} comes after temperature or top-k/p, where a rule could not tell its bans from theirs: "
            "put constraints first, or leave it out"
        )
    stateful = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
    for processor in processors:
        if type(processor).__name__ in stateful:
            raise SettingError(
                f"{type(processor).__name__} keeps a state from step to step, which a block of draft tokens cannot "
                "do: leave out guidance_scale and SynthID watermarking"
            )
    return tuple(processors[:first]), tuple(processors[first:])


def _refuse_unsupported(
    input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], assistant_tokenizer: Any, synced_gpus: bool
) -> None:
    """input_ids: [B, T]."""
    if config is None:
        raise SettingError("pass it to transformers: model.generate(..., custom_generate=dropmatch.generate)")
    if (config.num_beams or 1) > 1:
        raise SettingError("beam search cannot be combined with speculative decoding: set num_beams=1")
    if (config.num_return_sequences or 1) > 1 or input_ids.shape[0] > 1:
        raise SettingError(
            "one sequence at a time: got a batch of prompts, or num_return_sequences > 1; call generate for each"
        )
    if input_ids.shape[1] == 0:
        raise SettingError("the prompt is empty: give at least one token")
    if config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        raise SettingError(
            f"cache_implementation={config.cache_implementation!r} is not supported: leave it out (a dynamic cache)"
        )
    if config.use_cache is False:
        raise SettingError("use_cache=False cannot be combined with speculative decoding")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise SettingError("a cache that already holds tokens is not supported: pass the whole prompt")
    if cache is not None and type(cache).__name__ != "DynamicCache":
        raise SettingError(f"a {type(cache).__name__} is not supported: leave the cache out")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise SettingError("a padded prompt is not supported: pass one prompt without padding")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.flatten().tolist() != list(range(input_ids.shape[1])):
        raise SettingError("position_ids other than 0, 1, 2, ... are not supported: leave them out")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise SettingError(f"{name}=True is not supported by dropmatch.generate")
    if assistant_tokenizer is not None:
        raise SettingError("assistant_tokenizer: the draft must share the target's tokenizer")
    if synced_gpus:
        raise SettingError("synced_gpus is not supported")
    known = {
        "cache", "past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position",
    }  # fmt: skip
    unknown = sorted(name for name, value in model_kwargs.items() if name not in known and value is not None)
    if unknown:
        raise SettingError(f"model input {unknown[0]!r} is not supported: dropmatch decodes text only")


def install() -> bool:
    """Let `model.generate` hand assistant, streamer and tokenizer to this function.

    transformers drops these three for a callable `custom_generate` (5.24 rebuilds the keyword arguments of the
    decoding method from names that are no parameters of its own). Only calls with this function change.

    Returns:
        Whether they are handed over; False where the method is not the one that is known.
    """
    from transformers import GenerationMixin

    original = getattr(GenerationMixin, _EXTRACT, None)
    if getattr(original, "_dropmatch", False):
        return True
    if original is None:
        return False
    if list(inspect.signature(original).parameters) != [
        "self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer",
    ]:  # fmt: skip
        return False

    @functools.wraps(original)
    def extract(
        self: Any, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        lost = {"tokenizer": kwargs.get("tokenizer"), "assistant_tokenizer": kwargs.get("assistant_tokenizer")}
        lost |= {"assistant_model": assistant_model, "streamer": streamer}
        extracted = original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        if getattr(custom_generate, "func", custom_generate) is generate:  # also a functools.partial of it
            extracted.update({name: value for name, value in lost.items() if value is not None})
        return extracted

    extract._dropmatch = True  # type: ignore[attr-defined]
    setattr(GenerationMixin, _EXTRACT, extract)
    return True


_handed_over = install()
