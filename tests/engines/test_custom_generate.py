"""`model.generate(..., custom_generate=dropmatch.generate)` against the same call without it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import dropmatch


def call(tiny: Any, family: str = "llama", prompt: Tensor | None = None, **options: Any) -> Any:
    """model.generate with dropmatch."""
    target, draft = tiny.pair(family)
    prompt = tiny.prompt(1) if prompt is None else prompt
    options = {"max_new_tokens": 30, "rule": "strict", "do_sample": False, "assistant_model": draft, **options}
    return target.generate(**inputs(prompt), custom_generate=dropmatch.generate, **options)


def plain(tiny: Any, family: str = "llama", prompt: Tensor | None = None, **options: Any) -> Any:
    """model.generate without."""
    prompt = tiny.prompt(1) if prompt is None else prompt
    return tiny.pair(family)[0].generate(**inputs(prompt), **{"max_new_tokens": 30, "do_sample": False, **options})


def inputs(prompt: Tensor) -> dict[str, Tensor]:
    return {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}


def test_strict_is_generate(tiny: Any, family: str) -> None:
    for seed in range(3):
        prompt = tiny.prompt(seed)
        ids = call(tiny, family, prompt)
        assert torch.equal(ids, plain(tiny, family, prompt))
        assert torch.equal(ids[0, :12], prompt)


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_without_dropout_is_generate(tiny: Any, rule: str) -> None:
    assert torch.equal(call(tiny, rule=rule, dropout=0.0), plain(tiny))


def first_of(tiny: Any, count: int) -> list[int]:
    return plain(tiny, max_new_tokens=count)[0, 12:].tolist()


CONSTRAINTS: dict[str, Any] = {
    "bad_words": lambda tiny: {"bad_words_ids": [[t] for t in first_of(tiny, 4)]},
    "bad_phrase": lambda tiny: {"bad_words_ids": [first_of(tiny, 2)]},
    "repetition_penalty": lambda tiny: {"repetition_penalty": 1.7},
    "no_repeat_ngram": lambda tiny: {"no_repeat_ngram_size": 2},
    "min_new_tokens": lambda tiny: {"eos_token_id": first_of(tiny, 5), "min_new_tokens": 9},
    "min_length": lambda tiny: {"eos_token_id": first_of(tiny, 5), "min_length": 22},
    "suppress": lambda tiny: {"suppress_tokens": first_of(tiny, 6)},
    "begin_suppress": lambda tiny: {"begin_suppress_tokens": first_of(tiny, 1)},
    "sequence_bias": lambda tiny: {"sequence_bias": [[first_of(tiny, 2), -20.0], [[9], 6.0]]},
    "forced_eos": lambda tiny: {"forced_eos_token_id": 1, "max_new_tokens": 17},
    "decay": lambda tiny: {"exponential_decay_length_penalty": (3, 2.5)},
    "renormalize": lambda tiny: {"renormalize_logits": True},
    "prefix_allowed": lambda tiny: {
        "prefix_allowed_tokens_fn": lambda batch, ids: list(range(3 + int(ids[-1]) % 5, tiny.VOCAB, 5))
    },
    "eos": lambda tiny: {"eos_token_id": first_of(tiny, 8)[-1]},
    "eos_list": lambda tiny: {"eos_token_id": [first_of(tiny, 3)[-1], 7]},
    "max_length": lambda tiny: {"max_new_tokens": None, "max_length": 21},
    "one_token": lambda tiny: {"max_new_tokens": 1},
    "guidance": lambda tiny: {"guidance_scale": 1.6},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("rule", ["strict", "naive"])
def test_options_of_generate(tiny: Any, name: str, rule: str) -> None:
    """Honoured exactly, or refused; naive without dropout must be greedy as well."""
    options = CONSTRAINTS[name](tiny)
    expected = plain(tiny, **options)
    try:
        ids = call(tiny, rule=rule, dropout=0.0, **options)
    except dropmatch.SettingError as error:
        assert name == "guidance", error  # noqa: PT017 (a processor with a state of its own may be refused)
        return
    assert ids.tolist() == expected.tolist()
    if name not in ("renormalize", "eos", "eos_list", "max_length", "one_token", "forced_eos"):
        assert expected.tolist() != plain(tiny).tolist(), "the option changes nothing here"


def test_custom_processors_and_criteria(tiny: Any) -> None:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    def odd_after_even(ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.arange(scores.shape[1]) % 2 != int(ids[0, -1]) % 2
        return scores.masked_fill(~allowed, -torch.inf)

    def ninth(ids: Tensor, scores: Any) -> Tensor:
        return torch.full((ids.shape[0],), bool(ids.shape[1] >= 21))

    options = {
        "logits_processor": LogitsProcessorList([odd_after_even]),
        "stopping_criteria": StoppingCriteriaList([ninth]),
    }
    ids = call(tiny, **options)
    assert ids.shape == (1, 21)
    assert torch.equal(ids, plain(tiny, **options))
    lossy = call(tiny, rule="naive", dropout=0.5, **options)[0, 11:].tolist()
    assert all((a + b) % 2 for a, b in itertools.pairwise(lossy))


def test_a_constraint_behind_a_warper_still_holds(tiny: Any) -> None:
    """A user's own list may have a temperature before a ban, in greedy decoding too."""
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

    chain = [TemperatureLogitsWarper(0.7), SuppressTokensLogitsProcessor(first_of(tiny, 4))]
    options = {"logits_processor": LogitsProcessorList(chain)}
    expected = plain(tiny, **options)
    assert expected.tolist() != plain(tiny).tolist()
    try:
        ids = call(tiny, **options)
    except dropmatch.SettingError:
        return
    assert ids.tolist() == expected.tolist()


def test_watermarking_when_sampling_marks_every_token(tiny: Any) -> None:
    """The watermark comes after the warpers and looks at the token before: refused, or right in every row."""
    from transformers import WatermarkingConfig

    config = WatermarkingConfig(bias=40.0, greenlist_ratio=0.5, context_width=1)
    processor = config.construct_processor(tiny.VOCAB, "cpu")
    marked = []
    for seed in range(3):
        try:
            ids = call(tiny, do_sample=True, temperature=1.2, seed=seed, watermarking_config=config)[0]
        except dropmatch.SettingError:
            return
        for i in range(12, ids.shape[0]):
            green = processor(ids[None, :i], torch.zeros(1, tiny.VOCAB))[0] > 0
            marked.append(bool(green[ids[i]]))
    assert sum(marked) == len(marked)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 0, "temperature": 0.001}, {"top_k": 50, "top_p": 0.001}])
def test_sampling_without_choice_is_greedy(tiny: Any, options: dict[str, Any]) -> None:
    assert torch.equal(call(tiny, do_sample=True, seed=3, **options), plain(tiny))


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
def test_sampling_obeys_top_k_and_seed(tiny: Any, rule: str) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 3, "rule": rule, "max_new_tokens": 40}
    runs = [call(tiny, seed=seed, **options)[0] for seed in (1, 2, 1)]
    assert torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[1])
    for ids in runs:
        rows = tiny.full_logits(tiny.pair("llama")[0], ids.tolist())[11:-1]
        allowed = rows.topk(3).indices
        assert bool((allowed == ids[12:, None]).any(dim=1).all())


def test_sampling_is_seeded_by_torch(tiny: Any) -> None:
    runs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        runs.append(call(tiny, do_sample=True, temperature=1.5, top_k=0).tolist())
    assert runs[0] == runs[2] != runs[1]


def test_sampling_matches_the_targets_distribution(tiny: Any) -> None:
    """First token over many seeds, draft model and temperature included."""
    from scipy.stats import chisquare

    options = {"do_sample": True, "temperature": 1.4, "top_k": 8, "max_new_tokens": 2, "draft_length": 1}
    counts = torch.zeros(tiny.VOCAB)
    for seed in range(600):
        counts[call(tiny, seed=seed, **options)[0, 12]] += 1
    row = tiny.full_logits(tiny.pair("llama")[0], tiny.prompt(1).tolist())[-1] / 1.4
    row[row < row.topk(8).values[-1]] = -torch.inf
    expected = row.softmax(dim=-1)
    assert float(counts[expected == 0].sum()) == 0
    large = expected * 600 >= 5
    assert int((expected > 0).sum()) == int(large.sum()) == 8
    observed, expected = counts[large].numpy(), expected[large].double().numpy()
    assert chisquare(observed, expected * 600 / expected.sum()).pvalue > 1e-4


def test_prompt_lookup(tiny: Any) -> None:
    prompt = tiny.prompt(4).repeat(2)
    for seed_prompt in (prompt, tiny.prompt(1)):
        ids = call(tiny, prompt=seed_prompt, assistant_model=None, prompt_lookup_num_tokens=4)
        assert torch.equal(ids, plain(tiny, prompt=seed_prompt))


def test_stop_strings(tiny: Any) -> None:
    tokenizer = tiny.byte_tokenizer()
    target = tiny.build_model("llama", vocab_size=len(tokenizer))
    draft, prompt = tiny.perturb(target, 0.05), tokenizer("the cat")["input_ids"]
    options = {"max_new_tokens": 30, "do_sample": False, "tokenizer": tokenizer}
    ids = torch.tensor([prompt])
    whole = target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
    pieces = tokenizer.convert_ids_to_tokens(whole.tolist())
    printable = [i for i, piece in enumerate(pieces[:-1]) if piece.isascii() and pieces[i + 1].isascii()]
    assert printable, "no two printable bytes in a row"
    for stop in (tokenizer.decode(whole[i : i + 2]) for i in printable[:3]):
        options |= {"stop_strings": [stop], "attention_mask": torch.ones_like(ids)}
        expected = target.generate(ids, **options)
        assert expected.shape[1] < 30 + len(prompt)
        got = target.generate(
            ids, custom_generate=dropmatch.generate, assistant_model=draft, rule="strict", draft_length=9, **options
        )
        assert torch.equal(got, expected)


def test_return_dict(tiny: Any) -> None:
    output = call(tiny, return_dict_in_generate=True, rule="naive")
    counts = output.dropmatch
    assert output.sequences.shape[1] == 12 + counts["generated"]
    assert counts["acceptance_length"] == 1 + counts["accepted"] / counts["rounds"]
    assert torch.equal(output.sequences, call(tiny, rule="naive", seed=0)) or counts["lossy"] > 0


def test_the_streamer_receives_every_token_and_no_more(tiny: Any) -> None:
    from transformers import TextIteratorStreamer

    first = first_of(tiny, 8)
    for options in ({}, {"eos_token_id": first[-1]}, {"max_new_tokens": 7}):
        expected = plain(tiny, **options)[0]
        streamer = Recorder()
        ids = call(tiny, streamer=streamer, **options)[0]
        assert torch.equal(ids, expected)
        assert streamer.ids == ids.tolist()
        assert streamer.ends == 1
    tokenizer = tiny.word_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=call, args=(tiny,), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain(tiny)[0, 12:])


class Recorder:
    """A streamer that keeps what it is given: the prompt, then tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert value.dim() == 1 or value.shape[0] == 1
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def test_settings_reach_the_rule(tiny: Any) -> None:
    options = {"rule": "naive", "heads": 3, "dropout": 0.4, "mask_seed": 11, "draft_length": 4, "seed": 5}
    ids = call(tiny, **options)[0, 12:].tolist()
    result = tiny.engine().generate(tiny.prompt(1), max_tokens=30, **options)
    assert ids == result.token_ids
    assert result.statistics.lossy > 0


def test_draft_length_from_the_drafts_generation_config(tiny: Any) -> None:
    """As documented: `num_assistant_tokens` of the draft, if it is other than transformers' default."""
    target, draft = tiny.pair("llama")
    own = tiny.perturb(draft, 0.0)
    options = {"return_dict_in_generate": True, "max_new_tokens": 30, "rule": "strict", "do_sample": False}

    def proposed(**more: Any) -> Any:
        output = target.generate(
            **inputs(tiny.prompt(1)), custom_generate=dropmatch.generate, assistant_model=own, **options, **more
        )
        return {name: output.dropmatch[name] for name in ("rounds", "proposed", "accepted")}

    five, two = proposed(draft_length=5), proposed(draft_length=2)
    assert five != two
    assert proposed() == five
    own.generation_config.num_assistant_tokens = 2
    assert proposed() == two
    assert proposed(draft_length=5) == five
