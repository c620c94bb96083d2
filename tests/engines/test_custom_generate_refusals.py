"""What dropmatch.generate cannot honour is refused before the first token; other callables are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dropmatch
from dropmatch.drafting import DraftModel
from dropmatch.errors import DropMatchError, ModelError, SettingError


def call(tiny: Any, **options: Any) -> Any:
    target, draft = tiny.pair("llama")
    prompt = options.pop("input_ids", tiny.prompt(1)[None])
    options = {"max_new_tokens": 10, "rule": "strict", "assistant_model": draft, "do_sample": False, **options}
    options = {"attention_mask": torch.ones_like(prompt), **options}
    return target.generate(prompt, custom_generate=dropmatch.generate, **options)


class Untouched:
    """A streamer that fails the test when a generated token arrives."""

    def __init__(self) -> None:
        self.puts = 0

    def put(self, value: Any) -> None:
        self.puts += 1
        assert self.puts == 1, "only the prompt may be streamed"

    def end(self) -> None: ...


def padded(tiny: Any) -> dict[str, Any]:
    prompt = torch.cat([torch.zeros(3, dtype=torch.int64), tiny.prompt(1)])[None]
    return {"input_ids": prompt, "attention_mask": (prompt != 0).long()}


REFUSED: dict[str, tuple[Any, str]] = {
    "case 26: beams": (lambda tiny: {"num_beams": 2}, "beam"),
    "two sequences": (lambda tiny: {"num_return_sequences": 2, "do_sample": True}, "one sequence|has to be 1"),
    "case 24: batch": (lambda tiny: {"input_ids": torch.stack([tiny.prompt(1), tiny.prompt(2)])}, "one sequence"),
    "padding": (padded, "padd"),
    "case 19: static cache": (lambda tiny: {"cache_implementation": "static"}, "static"),
    "offloaded cache": (lambda tiny: {"cache_implementation": "offloaded"}, "offloaded"),
    "no cache": (lambda tiny: {"use_cache": False}, "use_cache"),
    "scores": (lambda tiny: {"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": (lambda tiny: {"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "hidden": (lambda tiny: {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "embeddings": (
        lambda tiny: {"inputs_embeds": torch.zeros(1, 4, 48), "input_ids": torch.zeros(1, 0, dtype=torch.int64)},
        "empty|inputs_embeds",
    ),
    "assistant tokenizer": (
        lambda tiny: {"assistant_tokenizer": tiny.word_tokenizer(), "tokenizer": tiny.word_tokenizer()},
        "assistant_tokenizer",
    ),
    "no drafter": (lambda tiny: {"assistant_model": None}, "no drafter"),
    "js with prompt lookup": (
        lambda tiny: {"assistant_model": None, "prompt_lookup_num_tokens": 3, "rule": "js"}, "js.*distribution",
    ),
    "case 28: rule": (lambda tiny: {"rule": "best"}, "unknown rule 'best'.*strict"),
    "case 28: heads": (lambda tiny: {"rule": "js", "heads": 0}, "heads"),
    "case 28: dropout": (lambda tiny: {"rule": "js", "dropout": 1.0}, "dropout"),
    "draft length": (lambda tiny: {"draft_length": -2}, "draft_length"),
    "context": (lambda tiny: {"max_new_tokens": 600}, "context is 512"),
    "draft's context": (
        lambda tiny: {"assistant_model": tiny.build_model("llama", max_position_embeddings=16)}, "draft.*16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_token(tiny: Any, name: str) -> None:
    options, words = REFUSED[name]
    options = options(tiny)
    if "num_beams" not in options and "streamer" not in options:
        options["streamer"] = Untouched()
    with pytest.raises(ValueError, match=words):  # a few are refused by transformers itself
        call(tiny, **options)


def test_case_19_a_static_cache_object_is_refused(tiny: Any) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=tiny.pair("llama")[0].config, max_cache_len=64)
    with pytest.raises(SettingError, match="StaticCache"):
        call(tiny, past_key_values=cache)


def test_a_cache_with_tokens_is_refused(tiny: Any) -> None:
    from transformers import DynamicCache

    target, prompt = tiny.pair("llama")[0], tiny.prompt(1)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=prompt[None, :5], past_key_values=cache)
    with pytest.raises(SettingError, match="holds tokens"):
        call(tiny, past_key_values=cache)


def test_unknown_arguments_are_refused_by_transformers_or_dropmatch(tiny: Any) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        call(tiny, nonsense=3)
    with pytest.raises(ValueError, match="token_type_ids"):
        call(tiny, token_type_ids=torch.zeros(1, 12, dtype=torch.int64))


def test_positions_of_ones_own_are_refused_or_honoured(tiny: Any) -> None:
    """Positions other than 0, 1, 2, ... change what the target says; they must not be dropped silently."""
    positions = torch.arange(12).flip(0)[None]
    target = tiny.pair("llama")[0]
    with torch.no_grad():
        rows = target(input_ids=tiny.prompt(1)[None], position_ids=positions).logits[0, -1]
    assert int(rows.argmax()) != tiny.plain_generate(target, tiny.prompt(1), 1)[0]
    try:
        ids = call(tiny, position_ids=positions)
    except SettingError:
        return
    assert int(ids[0, 12]) == int(rows.argmax())


def test_an_encoder_decoder_is_refused(tiny: Any) -> None:
    model = tiny.build_model("t5")
    model.generation_config.decoder_start_token_id = 0
    with pytest.raises(DropMatchError, match=r"(?i)encoder"):
        model.generate(
            tiny.prompt(1)[None], custom_generate=dropmatch.generate, assistant_model=model, max_new_tokens=5
        )


def test_called_by_itself(tiny: Any) -> None:
    with pytest.raises(SettingError, match="custom_generate"):
        dropmatch.generate(tiny.pair("llama")[0], tiny.prompt(1)[None])


def test_the_same_refusals_do_not_poison_the_next_call(tiny: Any) -> None:
    with pytest.raises(SettingError):
        call(tiny, num_beams=2)
    assert call(tiny)[0, 12:].tolist() == tiny.plain_generate(tiny.pair("llama")[0], tiny.prompt(1), 10)


def test_other_custom_generate_callables_are_left_alone(tiny: Any) -> None:
    """transformers drops assistant, streamer and tokenizer for a callable; only dropmatch.generate gets them."""
    dropmatch.generate  # noqa: B018 (installs the adapter)
    seen: dict[str, Any] = {}

    def mine(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
             assistant_model: Any = None, streamer: Any = None, extra: int = 0, **kwargs: Any) -> Any:  # fmt: skip
        seen.update(assistant_model=assistant_model, streamer=streamer, extra=extra)
        return input_ids

    target, draft = tiny.pair("llama")
    prompt = tiny.prompt(1)[None]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 3, "extra": 7, "assistant_model": draft}
    ids = target.generate(prompt, custom_generate=mine, **options)
    assert torch.equal(ids, prompt)
    assert seen == {"assistant_model": None, "streamer": None, "extra": 7}


def test_transformers_own_assisted_generation_still_works(tiny: Any) -> None:
    dropmatch.generate  # noqa: B018
    target, draft = tiny.pair("llama")
    plain = tiny.plain_generate(target, tiny.prompt(1), 20)
    assert tiny.plain_generate(target, tiny.prompt(1), 20, assistant_model=draft) == plain
    assert tiny.plain_generate(target, tiny.prompt(1), 20, prompt_lookup_num_tokens=3) == plain


def test_installing_twice_changes_nothing() -> None:
    from transformers import GenerationMixin

    from dropmatch.engines.hf import custom_generate

    before = GenerationMixin._extract_generation_mode_kwargs
    custom_generate.install()
    assert GenerationMixin._extract_generation_mode_kwargs is before


def test_different_tokenizers_are_refused(tiny: Any) -> None:
    from dropmatch.engines.hf.load import check_same_tokenizer

    check_same_tokenizer(tiny.word_tokenizer(), tiny.word_tokenizer())
    for other in (tiny.word_tokenizer(119), tiny.word_tokenizer(renamed={9: "nine"}), tiny.byte_tokenizer()):
        with pytest.raises(ModelError, match="different tokenizers"):
            check_same_tokenizer(tiny.word_tokenizer(), other)
    swapped = tiny.word_tokenizer(renamed={9: "w8", 8: "w9"})
    with pytest.raises(ModelError, match="2 of the draft's"):
        check_same_tokenizer(tiny.word_tokenizer(), swapped)


def test_a_stateful_draft_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="recurrent"):
        DraftModel(model)
