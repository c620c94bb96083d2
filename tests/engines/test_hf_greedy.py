"""Greedy decoding in fp32 against transformers' own generate and a loop without a cache, token by token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dropmatch.drafting import DraftModel, PromptLookup

NO_DROPOUT = [
    {"rule": "naive", "dropout": 0.0},
    {"rule": "js", "dropout": 0.0},
    {"rule": "js", "dropout": 0.0, "heads_mode": "gaussian"},
    {"rule": "naive", "dropout": 0.0, "verdict": "denoised"},
]


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_strict_is_generate(tiny: Any, family: str, drafter: str) -> None:
    engine = tiny.engine(family, drafter)
    accepted = proposed = 0
    for seed in range(4):
        prompt = tiny.prompt(seed, 5 + 6 * seed)
        result = engine.generate(prompt, rule="strict", max_tokens=40)
        assert result.token_ids == tiny.plain_generate(engine.model, prompt, 40)
        assert result.finish_reason == ("stop" if result.token_ids[-1] == tiny.EOS else "length")
        accepted += result.statistics.accepted
        proposed += result.statistics.proposed
    assert proposed > accepted > 0, "neither acceptance nor rejection was tested"


def test_the_drafts_are_neither_perfect_nor_hopeless(tiny: Any, family: str) -> None:
    """The other tests of this file need both accepted and rejected tokens."""
    engine = tiny.engine(family)
    results = [engine.generate(tiny.prompt(s), rule="strict", max_tokens=30).statistics for s in range(4)]
    rate = sum(s.accepted for s in results) / sum(s.proposed for s in results)
    assert 0.2 < rate < 0.95


@pytest.mark.parametrize("length", range(0, 11))
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_any_draft_length(tiny: Any, family: str, length: int) -> None:
    engine = tiny.engine(family)
    prompt = tiny.prompt(11, 9)
    result = engine.generate(prompt, rule="strict", max_tokens=32, draft_length=length)
    assert result.token_ids == tiny.plain_generate(engine.model, prompt, 32)
    assert all(len(tokens) <= length for tokens in _rounds(engine, prompt, length))


def _rounds(engine: Any, prompt: torch.Tensor, length: int) -> list[list[Any]]:
    return engine.generate(prompt, rule="strict", max_tokens=12, draft_length=length, trace=True).trace


@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.99])
def test_draft_stop_probability(tiny: Any, threshold: float) -> None:
    """Drafts end after a token that the draft model gives less; the output stays."""
    engine = tiny.engine("llama")
    draft, prompt = tiny.pair("llama")[1], tiny.prompt(12)
    result = engine.generate(
        prompt, rule="strict", max_tokens=40, draft_length=8, draft_stop_probability=threshold, trace=True
    )
    assert result.token_ids == tiny.plain_generate(engine.model, prompt, 40)
    ids, lengths = prompt.tolist(), []
    for entries, size in zip(result.trace, _block_sizes(result), strict=True):
        tokens = [entry.token for entry in entries]
        rows = tiny.full_logits(draft, ids + tokens)[len(ids) - 1 : -1].softmax(dim=-1)
        confidence = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        assert all(value >= threshold - 1e-4 for value in confidence[:-1])
        budget = min(8, 40 - (len(ids) - prompt.shape[0]) - 1)
        if tokens and len(tokens) < budget:
            assert confidence[-1] < threshold + 1e-4
        lengths.append(len(tokens))
        ids += result.token_ids[len(ids) - prompt.shape[0] :][:size]
    assert min(lengths[:-1]) < 8


def _block_sizes(result: Any) -> list[int]:
    """Committed tokens a round: accepted and one more, but for a cut at the end."""
    sizes = [sum(entry.accepted for entry in entries) + 1 for entries in result.trace]
    sizes[-1] -= sum(sizes) - len(result.token_ids)
    return sizes


@pytest.mark.parametrize("options", NO_DROPOUT, ids=["naive", "js", "gaussian js", "denoised naive"])
@pytest.mark.parametrize("evaluation", ["lazy", "eager"])
def test_without_dropout_any_rule_is_greedy(tiny: Any, family: str, options: Any, evaluation: str) -> None:
    """Invariant: p = 0 equals greedy decoding. js: the radius is 0, so only the argmax token passes."""
    engine = tiny.engine(family)
    for seed in range(2):
        prompt = tiny.prompt(20 + seed)
        result = engine.generate(prompt, max_tokens=40, evaluation=evaluation, **options)
        assert result.token_ids == tiny.plain_generate(engine.model, prompt, 40)
        assert result.statistics.lossy == 0


def test_without_dropout_naive_with_prompt_lookup_is_greedy(tiny: Any, family: str) -> None:
    engine = tiny.engine(family, "lookup")
    prompt = tiny.prompt(23).repeat(2)
    result = engine.generate(prompt, max_tokens=40, rule="naive", dropout=0.0)
    assert result.token_ids == tiny.plain_generate(engine.model, prompt, 40)


@pytest.mark.parametrize("support", ["shortlist", "full"])
@pytest.mark.parametrize("rule", ["naive", "js"])
def test_without_dropout_on_a_shortlist(tiny: Any, support: str, rule: str) -> None:
    """A vocabulary that is larger than the shortlist, so that rows are gathered and a tail is left."""
    from dropmatch import Engine

    target = tiny.build_model("gemma2", vocab_size=600)
    engine = Engine(target, tiny.word_tokenizer(600), DraftModel(tiny.perturb(target, 0.05)))
    for seed in range(3):
        prompt = tiny.prompt(seed, vocab=600)
        options = {"rule": rule, "support": support, "shortlist_size": 32}
        result = engine.generate(prompt, max_tokens=30, dropout=0.0, **options)
        assert result.token_ids == tiny.plain_generate(target, prompt, 30)
        lossy = engine.generate(prompt, max_tokens=30, dropout=0.4, **options)
        assert lossy.statistics.judged > 0


def test_lossy_output_is_greedy_given_its_lossy_tokens(tiny: Any, family: str) -> None:
    """Every token that is not a lossy acceptance is the argmax of a full forward over the tokens before it."""
    engine = tiny.engine(family)
    lossy = 0
    for rule, seed in itertools.product(("naive", "js"), (31, 32)):
        prompt = tiny.prompt(seed)
        result = engine.generate(prompt, max_tokens=40, rule=rule, dropout=0.4)
        ids = prompt.tolist() + result.token_ids
        clean = tiny.full_logits(engine.model, ids)[prompt.shape[0] - 1 : -1].argmax(dim=-1).tolist()
        for token, expected in zip(result.tokens, clean, strict=True):
            assert token.lossy == (token.id != expected)
            assert not (token.lossy and token.reason in ("exact", "correction", "bonus"))
        lossy += result.statistics.lossy
        assert result.statistics.lossy == sum(token.lossy for token in result.tokens)
    assert lossy > 0


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_a_denoised_text_is_the_same_for_every_seed(tiny: Any, rule: str) -> None:
    lossy = sampled = 0
    for family in ("llama", "gemma2", "granite"):
        engine = tiny.engine(family)
        prompt = tiny.prompt(33)
        texts = {verdict: set() for verdict in ("sampled", "denoised")}  # type: dict[str, set[tuple[int, ...]]]
        for seed in range(4):
            for verdict, found in texts.items():
                result = engine.generate(prompt, max_tokens=40, rule=rule, dropout=0.1, verdict=verdict, seed=seed)
                found.add(tuple(result.token_ids))
                lossy += result.statistics.lossy * (verdict == "denoised")
        assert len(texts["denoised"]) == 1
        sampled += len(texts["sampled"])
    assert sampled > 3
    assert lossy > 0


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_lazy_and_eager_emit_the_same_token_at_the_same_prefix(tiny: Any, rule: str) -> None:
    """Invariant of lazy evaluation, at draft rows (bonus positions differ, since rounds end elsewhere)."""
    compared = 0
    for family in ("llama", "gemma2"):
        engine = tiny.engine(family)
        for seed in range(6):
            prompt = tiny.prompt(40 + seed)
            emitted = []
            for evaluation in ("lazy", "eager"):
                result = engine.generate(prompt, max_tokens=40, rule=rule, evaluation=evaluation, trace=True)
                emitted.append(_emitted_at_draft_rows(result))
            shared = emitted[0].keys() & emitted[1].keys()
            assert all(emitted[0][prefix] == emitted[1][prefix] for prefix in shared)
            compared += len(shared)
    assert compared > 100


def _emitted_at_draft_rows(result: Any) -> dict[tuple[tuple[int, ...], int], int]:
    """(prefix, draft token) -> emitted token, for every draft row that was reached and not cut off."""
    emitted, at = {}, 0
    for entries, size in zip(result.trace, _block_sizes(result), strict=True):
        for i in range(min(size, len(entries))):
            emitted[tuple(result.token_ids[: at + i]), entries[i].token] = result.token_ids[at + i]
        at += size
    return emitted


def test_target_as_its_own_draft(tiny: Any, family: str) -> None:
    """One model on both sides shares the head that is captured; everything is accepted."""
    from dropmatch import Engine

    target = tiny.pair(family)[0]
    engine = Engine(target, tiny.word_tokenizer(), DraftModel(target))
    prompt = tiny.prompt(50)
    result = engine.generate(prompt, rule="js", max_tokens=25)
    assert result.token_ids == tiny.plain_generate(target, prompt, 25)
    assert result.statistics.acceptance_rate == 1.0


def test_one_token_prompt_and_one_token_budget(tiny: Any, family: str) -> None:
    """The budget of one leaves nothing to draft, so the drafter is told of a round it had no part in."""
    engine = tiny.engine(family)
    for length, budget in ((1, 20), (1, 1), (12, 1), (9, 2)):
        prompt = tiny.prompt(60, length)
        result = engine.generate(prompt, rule="strict", max_tokens=budget)
        assert result.token_ids == tiny.plain_generate(engine.model, prompt, budget)


def test_greedy_loop_without_cache_agrees(tiny: Any, family: str) -> None:
    """A reference without any KV cache, in case transformers' generate shares a bug with the engine."""
    engine = tiny.engine(family)
    prompt = tiny.prompt(61, 10)
    result = engine.generate(prompt, rule="strict", max_tokens=25, ignore_eos=True)
    assert result.token_ids == tiny.oracle(engine.model, prompt, 25)


def test_prompt_lookup_accepts_on_a_loop(tiny: Any) -> None:
    """Random models soon repeat themselves; prompt lookup then proposes what comes."""
    from dropmatch import Engine

    target = tiny.pair("llama")[0]
    result = Engine(target, tiny.word_tokenizer(), PromptLookup()).generate(
        tiny.prompt(1), rule="strict", max_tokens=60, ignore_eos=True
    )
    assert result.statistics.accepted > 10
