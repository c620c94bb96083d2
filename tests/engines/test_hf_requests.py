"""Requests to the Hugging Face engine: constraints, budgets, stops, seeds, log-probabilities, refusals."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmatch import Engine
from dropmatch.drafting import DraftModel, PromptLookup
from dropmatch.errors import SettingError

RULES = ["strict", "naive", "js"]
TEMPERATURES = [0.0, 1.0]


@pytest.mark.parametrize("budget", range(1, 13))
def test_case_4_exactly_max_tokens(tiny: Any, budget: int) -> None:
    engine = tiny.engine()
    for rule in RULES:
        result = engine.generate(tiny.prompt(1), rule=rule, max_tokens=budget, ignore_eos=True)
        assert len(result.token_ids) == len(result.tokens) == result.statistics.generated == budget
        assert (result.finish_reason, result.stop_reason) == ("length", None)
        assert result.prompt_tokens == 12


def block_scene(tiny: Any) -> tuple[Engine, Tensor, list[int]]:
    """An engine whose draft is always right, and what it generates."""
    model, prompt = tiny.pair("llama")[0], tiny.prompt(3)
    clean = tiny.oracle(model, prompt, 40)
    drafter = tiny.ScriptedDrafter(lambda ids: clean[len(ids) - prompt.shape[0] :])
    return Engine(model, tiny.word_tokenizer(), drafter), prompt, clean


def test_case_2_stop_string_completed_inside_a_block(tiny: Any) -> None:
    """Text, ids, log-probabilities and statistics all end with the token that completes it."""
    engine, prompt, clean = block_scene(tiny)
    stop = f"w{clean[0]} w{clean[1]}"
    result = engine.generate(prompt, rule="strict", stop=stop, logprobs=True, trace=True)
    assert result.token_ids == clean[:2]
    assert result.text == stop
    assert result.logprobs is not None
    assert len(result.logprobs) == 2
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert (result.statistics.proposed, result.statistics.accepted, result.statistics.generated) == (2, 2, 2)


@pytest.mark.parametrize("at", range(1, 9))
def test_stop_strings_anywhere(tiny: Any, at: int) -> None:
    engine, prompt, clean = block_scene(tiny)
    end = f"w{clean[at - 1]} w{clean[at]}"[1:-1]  # from the middle of one word to the middle of the next
    text = engine.tokenizer.decode(clean)
    expected = next(i for i in range(1, 40) if end in engine.tokenizer.decode(clean[:i]))
    result = engine.generate(prompt, rule="strict", stop=["never", end], max_tokens=39, ignore_eos=True)
    assert result.token_ids == clean[:expected]
    assert result.stop_reason == end
    assert text.startswith(result.text)


def test_stop_strings_match_the_text_that_is_returned(tiny: Any) -> None:
    """Also where the tokenizer would clean spaces up by default: what the text contains has stopped it."""
    engine, prompt, clean = block_scene(tiny)
    tokenizer = tiny.word_tokenizer(renamed={clean[3]: ","})
    tokenizer.clean_up_tokenization_spaces = True
    result = Engine(engine.model, tokenizer, engine.drafter).generate(prompt, rule="strict", stop=" ,", max_tokens=20)
    assert " ," in result.text
    assert result.stop_reason == " ,"


def test_a_stop_string_in_the_prompt_does_not_stop(tiny: Any) -> None:
    engine, prompt, clean = block_scene(tiny)
    word = next(f"w{i}" for i in prompt.tolist() if i not in clean[:10])
    assert engine.generate(prompt, rule="strict", stop=word + " ", max_tokens=10).token_ids == clean[:10]


def test_a_special_token_as_stop_string(tiny: Any) -> None:
    engine, prompt, _ = block_scene(tiny)

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        wanted = [5, 6, 1, 7][min(3, ids.shape[1] - prompt.shape[0])]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([wanted]), 0.0)

    result = engine.generate(
        prompt, rule="strict", stop="</s>", max_tokens=10, ignore_eos=True, logits_processors=[force]
    )
    assert result.token_ids == [5, 6, 1]
    assert result.stop_reason == "</s>"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_case_5_min_tokens(tiny: Any, rule: str, temperature: float) -> None:
    """The draft proposes EOS all the time, and the target likes it; it comes at min_tokens, no earlier."""
    target, draft = tiny.pair("llama")
    model, eager = tiny.perturb(target, 0.0), tiny.perturb(draft, 0.0)
    for each in (model, eager):
        each.lm_head.bias = torch.nn.Parameter(torch.zeros(tiny.VOCAB))
        each.lm_head.bias.data[tiny.EOS] = 30.0
    engine = Engine(model, tiny.word_tokenizer(), DraftModel(eager))
    for seed in range(3):
        options = {"rule": rule, "temperature": temperature, "seed": seed, "dropout": 0.5}
        result = engine.generate(tiny.prompt(seed), min_tokens=8, max_tokens=20, **options)
        assert len(result.token_ids) == 9
        assert result.token_ids.index(tiny.EOS) == 8
        assert result.stop_reason == tiny.EOS
        result = engine.generate(tiny.prompt(seed), max_tokens=20, **options)
        assert result.token_ids == [tiny.EOS]
        assert result.text == ""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_case_5_banned_tokens(tiny: Any, rule: str, temperature: float, drafter: str) -> None:
    """The twenty tokens that the model would use most are banned, one that it would use is proposed."""
    if rule == "js" and drafter == "lookup":
        pytest.skip("js needs a distribution")
    engine, prompt = tiny.engine("llama", drafter), tiny.prompt(5).repeat(3)
    options = {"rule": rule, "temperature": temperature, "max_tokens": 30, "dropout": 0.5, "ignore_eos": True}
    favourites = set(engine.generate(prompt, **options).token_ids) | set(prompt.tolist()[::2])

    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(sorted(favourites)), -torch.inf)

    result = engine.generate(prompt, logits_processors=[ban], **options)
    assert not set(result.token_ids) & favourites
    assert len(result.token_ids) == 30


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("target_size", "draft_size"), [(112, 100), (100, 112)])
def test_case_6_vocabularies_that_differ_by_padding(
    tiny: Any, rule: str, temperature: float, target_size: int, draft_size: int
) -> None:
    target = tiny.build_model("llama", vocab_size=target_size)
    draft = tiny.build_model("llama", vocab_size=draft_size)
    with torch.no_grad():
        for theirs, ours in zip(draft.parameters(), target.parameters(), strict=True):
            common = tuple(slice(0, min(a, b)) for a, b in zip(theirs.shape, ours.shape, strict=True))
            theirs[common] = ours[common]
    engine = Engine(target, tiny.word_tokenizer(100), DraftModel(tiny.perturb(draft, 0.05)))
    never = torch.arange(100, 112)

    def real_tokens(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, never[never < scores.shape[1]], -torch.inf)

    accepted = 0
    for seed in range(3):
        prompt = tiny.prompt(seed, vocab=100)
        options = {"rule": rule, "temperature": temperature, "seed": seed, "max_tokens": 30, "ignore_eos": True}
        result = engine.generate(prompt, logits_processors=[real_tokens], **options)
        assert len(result.token_ids) == 30
        assert max(result.token_ids) < 100
        accepted += result.statistics.accepted
    assert accepted > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", ["target", "draft"])
def test_case_6_a_mask_as_wide_as_the_vocabulary_of_the_target(tiny: Any, rule: str, width: str) -> None:
    """Grammar masks are as wide as the target's logits; they must reach a narrower draft as well."""
    target, draft = tiny.build_model("llama", vocab_size=112), tiny.build_model("llama", vocab_size=100)
    engine = Engine(target, tiny.word_tokenizer(100), DraftModel(draft))
    mask = torch.zeros(112)
    mask[100:] = -torch.inf
    mask[3:50] = -torch.inf
    result = engine.generate(
        tiny.prompt(0, vocab=100), rule=rule, max_tokens=20, logits_processors=[lambda ids, scores: scores + mask]
    )
    assert all(token in (0, 1, 2, *range(50, 100)) for token in result.token_ids)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_case_6_a_draft_in_love_with_its_padding(tiny: Any, rule: str, temperature: float) -> None:
    """Ids that the target lacks are never proposed, however likely the draft finds them."""
    target, draft = tiny.build_model("llama", vocab_size=100), tiny.build_model("llama", vocab_size=112)
    draft.lm_head.bias = torch.nn.Parameter(torch.zeros(112).index_fill(0, torch.arange(100, 112), 20.0))
    engine = Engine(target, tiny.word_tokenizer(100), DraftModel(draft))
    options = {"rule": rule, "temperature": temperature, "dropout": 0.0, "max_tokens": 20, "trace": True}
    result = engine.generate(tiny.prompt(0, vocab=100), **options)
    assert all(entry.token < 100 for entries in result.trace for entry in entries)
    if not temperature:
        assert result.token_ids == tiny.plain_generate(target, tiny.prompt(0, vocab=100), 20)


def test_case_6_a_token_that_only_the_target_has(tiny: Any) -> None:
    """A padded id in prompt or output is beyond the draft's embedding: nothing to draft, no crash."""
    target, draft = tiny.build_model("llama", vocab_size=112), tiny.build_model("llama", vocab_size=100)
    engine = Engine(target, tiny.word_tokenizer(100), DraftModel(draft))
    prompt = torch.cat([tiny.prompt(0, vocab=100), torch.tensor([105])])
    result = engine.generate(prompt, rule="strict", max_tokens=20)
    assert result.token_ids == tiny.plain_generate(target, prompt, 20)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_case_8_a_grammar_is_always_obeyed(tiny: Any, rule: str, temperature: float) -> None:
    """What may come depends on the token before: id modulo 3 counts up, and the mask knows the prefix."""
    engine = tiny.engine()

    def grammar(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        allowed = torch.arange(scores.shape[1]) % 3 == (int(ids[0, -1]) + 1) % 3
        return torch.where(allowed, scores, -torch.inf)

    lossy = accepted = 0
    for seed in range(4):
        prompt = tiny.prompt(seed)
        result = engine.generate(
            prompt, rule=rule, temperature=temperature, seed=seed, max_tokens=40, dropout=0.4,
            logits_processors=[grammar], ignore_eos=True,
        )  # fmt: skip
        ids = [int(prompt[-1]), *result.token_ids]
        assert all(b % 3 == (a + 1) % 3 for a, b in itertools.pairwise(ids))
        lossy += result.statistics.lossy
        accepted += result.statistics.accepted
    assert accepted > 0
    assert (lossy > 0) == (rule != "strict")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_case_10_a_seed_is_a_text(tiny: Any, rule: str, temperature: float) -> None:
    """Whatever was generated before or in between, in whatever order."""
    engine = tiny.engine()
    jobs = [(tiny.prompt(i), seed) for i in range(2) for seed in (1, 2)]

    def run(prompt: Tensor, seed: int) -> list[int]:
        return engine.generate(prompt, rule=rule, temperature=temperature, seed=seed, max_tokens=25).token_ids

    first = [run(*job) for job in jobs]
    order = list(range(4))
    random.Random(0).shuffle(order)
    for i in order:
        torch.manual_seed(i)
        engine.generate(tiny.prompt(9), rule="naive", temperature=0.7, seed=5, max_tokens=7)
        next(engine.stream(tiny.prompt(8), rule=rule, max_tokens=9))  # left after one round
        assert run(*jobs[i]) == first[i]
    fresh = Engine(engine.model, engine.tokenizer, DraftModel(tiny.pair("llama")[1]))
    prompt, seed = jobs[2]
    options = {"rule": rule, "temperature": temperature, "max_tokens": 25}
    assert fresh.generate(prompt, seed=seed, **options).token_ids == first[2]
    if temperature:
        assert first[0] != first[1]


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_other_seeds_draw_other_masks(tiny: Any, rule: str) -> None:
    engine = tiny.engine()
    options = {"rule": rule, "verdict": "sampled", "max_tokens": 40}
    texts = {tuple(engine.generate(tiny.prompt(1), seed=s, **options).token_ids) for s in range(6)}
    assert len(texts) > 1
    texts = {
        tuple(engine.generate(tiny.prompt(1), rule=rule, seed=s, mask_seed=3, max_tokens=40).token_ids)
        for s in range(6)
    }
    assert len(texts) == 1, "the masks of a greedy sequence have their own seed"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_case_12_logprobs_are_the_clean_targets(tiny: Any, family: str, rule: str, temperature: float) -> None:
    engine, prompt = tiny.engine(family), tiny.prompt(6)
    result = engine.generate(
        prompt, rule=rule, temperature=temperature, dropout=0.4, max_tokens=30, logprobs=True, ignore_eos=True
    )
    rows = tiny.full_logits(engine.model, prompt.tolist() + result.token_ids)[prompt.shape[0] - 1 : -1]
    expected = rows.log_softmax(dim=-1).gather(1, torch.tensor(result.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=1e-3, atol=1e-3)
    assert engine.generate(prompt, rule=rule, max_tokens=5).logprobs is None


def test_case_24_two_prompts_in_one_call_are_refused(tiny: Any) -> None:
    engine = tiny.engine()
    two = torch.stack([tiny.prompt(1), tiny.prompt(2)])
    for prompts in (two, ["w5 w6", "w7 w8"], two.tolist(), [two[0], two[1]]):
        with pytest.raises(SettingError, match="one prompt at a time"):
            engine.generate(prompts, rule="strict")


def test_case_24_two_streams_of_one_engine(tiny: Any) -> None:
    """Interleaved: each the same as alone, or a clear error; never a wrong text."""
    engine = tiny.engine()
    prompts = [tiny.prompt(1), tiny.prompt(2)]
    alone = [engine.generate(prompt, rule="strict", max_tokens=30).token_ids for prompt in prompts]
    streams = [engine.stream(prompt, rule="strict", max_tokens=30) for prompt in prompts]
    try:
        for _ in range(31):
            for stream in streams:
                next(stream, None)
    except SettingError as error:
        assert "one" in str(error)  # noqa: PT017
        return
    assert [stream.result.token_ids for stream in streams] == alone


def test_a_stream_that_was_left_does_not_block_the_engine(tiny: Any) -> None:
    engine = tiny.engine()
    expected = engine.generate(tiny.prompt(1), rule="strict", max_tokens=20).token_ids
    for _ in engine.stream(tiny.prompt(2), rule="strict", max_tokens=20):
        break
    assert engine.generate(tiny.prompt(1), rule="strict", max_tokens=20).token_ids == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "nonsense"}, "rule.*js.*naive.*strict"),
        ({"heads": 0}, "heads.*1"),
        ({"dropout": 1.0}, "dropout.*\\[0, 1\\)"),
        ({"dropout": -0.1}, "dropout.*\\[0, 1\\)"),
        ({"dropout": {"p": 0.3}}, "dropout.*flat"),
        ({"temprature": 1.0}, "temprature.*temperature"),
        ({"draft_length": -1}, "draft_length"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
    ],
)
def test_case_28_options_are_refused_by_name(tiny: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        tiny.engine().stream(tiny.prompt(1), **options)


def test_prompts_are_refused_before_the_first_token(tiny: Any) -> None:
    engine = tiny.engine()
    for empty in ("", [], torch.tensor([], dtype=torch.int64)):
        with pytest.raises(SettingError, match="empty"):
            engine.stream(empty)
    with pytest.raises(SettingError, match="chat template"):
        engine.stream([{"role": "user", "content": "w5"}])
    with pytest.raises(SettingError, match="context is 512"):
        engine.stream(tiny.prompt(1, 506), max_tokens=7)
    with pytest.raises(SettingError, match="context is 512"):
        engine.stream(tiny.prompt(1, 600), max_tokens=1)
    result = engine.generate(tiny.prompt(1, 506), max_tokens=6, rule="strict", ignore_eos=True)
    assert len(result.token_ids) == 6


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}",
        "{{ 'no system' + 1 }}",
        "no end {{ messages",
    ],
)
def test_a_template_that_refuses_messages_is_a_refused_request(tiny: Any, template: str) -> None:
    engine = tiny.engine()
    engine.tokenizer.chat_template = template
    with pytest.raises(SettingError, match=r"template refuses these messages \(.+\): pass prompts as text, .*--raw"):
        engine.stream([{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}])


def test_text_and_messages_and_ids_are_the_same_prompt(tiny: Any) -> None:
    engine = tiny.engine()
    engine.tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w8"
    ids = [9, 5, 6, 8]
    expected = engine.generate(ids, rule="strict", max_tokens=8).token_ids
    for prompt in ("w9 w5 w6 w8", torch.tensor(ids), torch.tensor([ids]), [{"role": "user", "content": "w5 w6"}]):
        assert engine.generate(prompt, rule="strict", max_tokens=8).token_ids == expected


def test_a_last_message_of_the_assistant_is_continued(tiny: Any) -> None:
    engine = tiny.engine()
    engine.tokenizer.chat_template = (
        "{% for m in messages %}w9 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
    )
    asked = [{"role": "user", "content": "w5 w6"}]
    assert engine.encode(asked).tolist() == [9, 5, 6, 8]
    assert engine.encode([*asked, {"role": "assistant", "content": "w7"}]).tolist() == [9, 5, 6, 9, 7]


def test_a_draft_with_a_shorter_context_is_refused(tiny: Any) -> None:
    draft = tiny.build_model("llama", max_position_embeddings=32)
    engine = Engine(tiny.pair("llama")[0], tiny.word_tokenizer(), DraftModel(draft))
    with pytest.raises(SettingError, match="draft model's context is 32"):
        engine.stream(tiny.prompt(1), max_tokens=21, rule="strict")
    assert engine.generate(tiny.prompt(1), max_tokens=20, rule="strict", ignore_eos=True).statistics.generated == 20
    assert engine.generate(tiny.prompt(1), max_tokens=60, draft_length=0, ignore_eos=True).statistics.generated == 60


def test_js_without_a_draft_distribution_is_refused_before_the_first_token(tiny: Any) -> None:
    engine = Engine(tiny.pair("llama")[0], tiny.word_tokenizer(), PromptLookup())
    with pytest.raises(SettingError, match=r"'js'.*PromptLookup.*naive"):
        engine.stream(tiny.prompt(1), rule="js")
    assert engine.generate(tiny.prompt(1), rule="naive", max_tokens=5).token_ids


def test_no_drafter(tiny: Any) -> None:
    engine = Engine(tiny.pair("llama")[0], tiny.word_tokenizer())
    with pytest.raises(SettingError, match="no drafter"):
        engine.stream(tiny.prompt(1))
    result = engine.generate(tiny.prompt(1), draft_length=0, max_tokens=15)
    assert result.token_ids == tiny.plain_generate(engine.model, tiny.prompt(1), 15)
