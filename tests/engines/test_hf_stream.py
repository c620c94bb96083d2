"""Streaming: the same tokens and text as generate, round by round, and what is left when it is closed early."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dropmatch import Engine
from dropmatch.drafting import DraftModel


def byte_engine(tiny: Any) -> Engine:
    """Random bytes as text: most are no UTF-8, many characters span tokens."""
    tokenizer = tiny.byte_tokenizer()
    target = tiny.build_model("llama", vocab_size=len(tokenizer))
    return Engine(target, tokenizer, DraftModel(tiny.perturb(target, 0.05)))


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_streaming_is_generate(tiny: Any, rule: str, temperature: float, kind: str) -> None:
    engine = tiny.engine() if kind == "words" else byte_engine(tiny)
    for seed in range(3):
        prompt = tiny.prompt(seed)
        options = {"rule": rule, "temperature": temperature, "seed": seed, "max_tokens": 30, "logprobs": True}
        result = engine.generate(prompt, **options)
        stream = engine.stream(prompt, **options)
        rounds = list(stream)
        assert [token.id for tokens in rounds for token in tokens] == result.token_ids
        assert "".join(token.text for tokens in rounds for token in tokens) == result.text
        assert stream.result.tokens == result.tokens
        assert stream.result.finish_reason == result.finish_reason
        assert len(rounds) == result.statistics.rounds == stream.statistics.rounds
        assert result.text == engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)


def test_multi_byte_characters_are_streamed_whole(tiny: Any) -> None:
    """The target is made to say a text; no piece shows half a character."""
    tokenizer = tiny.byte_tokenizer()
    text = "naïve 日本 🙂 the end"
    wanted = [*tokenizer(text)["input_ids"], tiny.EOS]
    target = tiny.build_model("llama", vocab_size=len(tokenizer))
    prompt = tiny.prompt(1)

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = wanted[min(ids.shape[1] - prompt.shape[0], len(wanted) - 1)]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

    for stop, expected in (((), text), ("本 ", "naïve 日本 "), ("🙂", "naïve 日本 🙂")):
        engine = Engine(target, tokenizer, tiny.ScriptedDrafter(lambda ids: wanted[len(ids) - prompt.shape[0] :]))
        stream = engine.stream(prompt, rule="naive", max_tokens=60, stop=stop, logits_processors=[force])
        pieces = [token.text for tokens in stream for token in tokens]
        assert "".join(pieces) == stream.result.text == expected
        assert not any("\ufffd" in piece for piece in pieces)


def test_closing_early(tiny: Any) -> None:
    engine = tiny.engine()
    whole = engine.generate(tiny.prompt(1), rule="strict", max_tokens=30)
    stream = engine.stream(tiny.prompt(1), rule="strict", max_tokens=30)
    assert stream.result.token_ids == []
    assert stream.result.finish_reason == "abort"
    first, second = next(stream), next(stream)
    stream.close()
    result = stream.result
    assert result.finish_reason == "abort"
    assert result.stop_reason is None
    assert result.tokens == first + second
    assert 0 < len(result.token_ids) < len(whole.token_ids)
    assert whole.token_ids[: len(result.token_ids)] == result.token_ids
    assert whole.text.startswith(result.text)
    assert result.statistics.generated == len(result.token_ids)
    assert list(stream) == []
    assert not engine.model.lm_head._forward_pre_hooks


def test_closing_before_the_first_round(tiny: Any) -> None:
    stream = tiny.engine().stream(tiny.prompt(1))
    stream.close()
    assert stream.result.finish_reason == "abort"
    assert stream.result.statistics.rounds == 0


def test_an_error_on_the_way_leaves_no_hook(tiny: Any) -> None:
    engine = tiny.engine()

    def fails(ids: Any, scores: Any) -> bool:
        raise RuntimeError("criterion")

    with pytest.raises(RuntimeError, match="criterion"):
        engine.generate(tiny.prompt(1), rule="strict", stopping_criteria=[fails])
    assert not engine.model.lm_head._forward_pre_hooks


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_statistics_add_up(tiny: Any, family: str, rule: str, temperature: float) -> None:
    engine = tiny.engine(family)
    options = {"rule": rule, "temperature": temperature, "max_tokens": 30, "trace": True}
    stream = engine.stream(tiny.prompt(2), **options)
    sizes = [len(tokens) for tokens in stream]
    result, counts = stream.result, stream.statistics
    assert counts.rounds == len(sizes) == len(result.trace)
    assert counts.generated == sum(sizes) == len(result.token_ids)
    assert counts.acceptance_length == 1 + counts.accepted / counts.rounds
    assert counts.accepted == sum(counts.reasons.values())
    kept = [token for token in result.tokens if token.reason not in ("correction", "bonus")]
    assert counts.accepted == len(kept)
    assert counts.lossy == sum(token.lossy for token in result.tokens)
    assert counts.generated - counts.accepted in (counts.rounds, counts.rounds - 1)
    for entries, size in zip(result.trace, sizes, strict=True):
        accepted = sum(entry.accepted for entry in entries)
        assert size <= accepted + 1
    assert counts.proposed <= sum(len(entries) for entries in result.trace)
    assert set(counts.reasons) <= {"exact", "sampled", "naive", "js", "majority"}
    assert ("sampled" in counts.reasons) <= (temperature > 0)
    if rule == "strict":
        assert counts.lossy == counts.judged == 0


def test_result_as_json(tiny: Any) -> None:
    result = tiny.engine().generate(tiny.prompt(1), rule="js", max_tokens=20, trace=True, logprobs=True)
    values = json.loads(json.dumps(result.as_dict()))
    assert values["token_ids"] == result.token_ids
    assert values["statistics"]["acceptance_length"] == result.statistics.acceptance_length
    assert len(values["trace"]) == result.statistics.rounds
    assert tiny.engine().generate(tiny.prompt(1), rule="js", max_tokens=5).trace is None
