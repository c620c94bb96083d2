"""Shared fixtures: tiny random causal LMs in fp32, drafts made from them by noise, and tiny tokenizers.

The weights are large, so that attention matters (a wrong KV cache changes the output) and distributions are
peaked; everything is seeded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

# what takes long on a machine that is shared is no fault of what is tested
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

EOS = 1
VOCAB = 120
FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "mistral", "granite", "cohere", "gpt2")
SLIDING = ("gemma2", "gemma3", "mistral")  # windows of 8 tokens


def build_model(family: str = "llama", *, seed: int = 0, peak: float = 3.0, **overrides: Any) -> Any:
    """A tiny model of the family; `peak` is about the spread of its logits, `overrides` go to its config."""
    import transformers as tf

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    sliding = {**common, "sliding_window": 8, "head_dim": 12}
    gemma = {**sliding, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}
    gpt2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512, "eos_token_id": EOS}
    kinds = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, common),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, common),
        "gemma2": (tf.Gemma2Config, tf.Gemma2ForCausalLM, {**gemma, "final_logit_softcapping": 6.0}),
        "gemma3": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, gemma),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM, sliding),
        "granite": (tf.GraniteConfig, tf.GraniteForCausalLM, {**common, "logits_scaling": 4.0}),
        "cohere": (tf.CohereConfig, tf.CohereForCausalLM, {**common, "logit_scale": 0.25}),
        "gpt2": (tf.GPT2Config, tf.GPT2LMHeadModel, {**gpt2, "bos_token_id": None, "tie_word_embeddings": False}),
        "t5": (tf.T5Config, tf.T5ForConditionalGeneration, {"vocab_size": VOCAB, "d_model": 32, "num_layers": 1}),
    }
    config_class, model_class, defaults = kinds[family]
    config = config_class(**{**defaults, **overrides})
    generator = torch.Generator().manual_seed(1000 * list(kinds).index(family) + seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.2
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        head = model.get_output_embeddings()
        if family != "t5":
            # what follows the head (a soft-cap, a scale) is undone, so that all families are equally peaked
            scale = getattr(config, "logits_scaling", None) or 1 / (getattr(config, "logit_scale", None) or 1.0)
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
            head.weight.mul_(peak * scale / head.weight.shape[1] ** 0.5)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return model


def perturb(model: Any, noise: float, *, seed: int = 7) -> Any:
    """A draft: the same model with noise on its weights, relative to their spread."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * noise)
    return draft


def make_prompt(seed: int = 0, length: int = 12, vocab: int = VOCAB) -> Tensor:
    """Random ids [T] without special tokens."""
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def plain_generate(model: Any, prompt: Tensor, max_new_tokens: int = 40, **options: Any) -> list[int]:
    """What transformers itself generates after the prompt [T]."""
    ids = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=max_new_tokens,
        do_sample=False, **options,
    )  # fmt: skip
    return ids[0, prompt.shape[0] :].tolist()


@torch.no_grad()
def full_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of one forward without a cache."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


class ScriptedDrafter:
    """Proposes what a function of the sequence says: ids -> tokens, with logits of its own if it has some."""

    def __init__(self, script: Callable[[list[int]], list[int]], logits: Callable[..., Tensor] | None = None) -> None:
        self.script, self.logits = script, logits
        self.has_distribution = logits is not None
        self.proposed: list[list[int]] = []
        self.committed: list[list[int]] = []

    def begin(self) -> ScriptedDrafter:
        self.proposed, self.committed = [], []
        return self

    def check(self, prompt_tokens: int, max_tokens: int, vocab_size: int) -> None: ...

    def propose(self, ids: Tensor, length: int, chooser: Any, config: Any) -> Any:
        from dropmatch.drafting import Draft

        tokens = self.script(ids.tolist())[:length]
        self.proposed.append(tokens)
        logits = None if self.logits is None or not tokens else self.logits(ids.tolist(), tokens)
        return Draft(torch.tensor(tokens, dtype=torch.int64), logits)

    def commit(self, ids: Tensor) -> None:
        self.committed.append(ids.tolist())


def oracle(model: Any, prompt: Tensor, length: int = 60) -> list[int]:
    """The greedy continuation of the prompt, past any end-of-sequence token."""
    ids = prompt.tolist()
    for _ in range(length):
        ids.append(int(full_logits(model, ids)[-1].argmax()))
    return ids[prompt.shape[0] :]


def build_word_tokenizer(size: int = VOCAB, renamed: dict[int, str] | None = None) -> Any:
    """One word a token: <pad>, </s>, <unk>, w3, w4, ..., but for those that are renamed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *((renamed or {}).get(i, f"w{i}") for i in range(3, size))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_byte_tokenizer() -> Any:
    """Byte-level BPE without merges but a few: 256 bytes and specials, so that characters span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "</s>", "<unk>", *alphabet, "th", "the", "Ġthe"]
    inner = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("t", "h"), ("th", "e"), ("Ġ", "the")], unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


torch.set_num_threads(1)  # the models are too small for more


class Tiny:
    """The builders of this file, as one fixture; pairs of models are built once."""

    EOS, VOCAB, FAMILIES, SLIDING = EOS, VOCAB, FAMILIES, SLIDING
    ScriptedDrafter = ScriptedDrafter
    build_model = staticmethod(build_model)
    perturb = staticmethod(perturb)
    prompt = staticmethod(make_prompt)
    plain_generate = staticmethod(plain_generate)
    full_logits = staticmethod(full_logits)
    oracle = staticmethod(oracle)
    word_tokenizer = staticmethod(build_word_tokenizer)
    byte_tokenizer = staticmethod(build_byte_tokenizer)

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Any, Any]] = {}

    def pair(self, family: str) -> tuple[Any, Any]:
        """A target and a draft that it accepts about half of."""
        if family not in self._pairs:
            target = build_model(family)
            self._pairs[family] = (target, perturb(target, 0.03 if family in ("granite", "cohere") else 0.05))
        return self._pairs[family]

    def engine(self, family: str = "llama", drafter: Any = "model") -> Any:
        """An engine of that family; the drafter is the draft model, prompt lookup or a given one."""
        from dropmatch import Engine
        from dropmatch.drafting import DraftModel, PromptLookup

        target, draft = self.pair(family)
        if drafter == "model":
            drafter = DraftModel(draft)
        elif drafter == "lookup":
            drafter = PromptLookup()
        return Engine(target, build_word_tokenizer(), drafter)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """Builders and cached pairs of tiny models."""
    return Tiny()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every model family in turn."""
    return request.param
