"""Stop rules, and the text of single tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.decoding.stopping import StopRules
from dropmatch.decoding.text import Detokenizer

PROMPT = torch.tensor([5, 6])
WORDS = {1: "</s>", 3: "ab", 4: "c", 5: "\n", 6: "\n\n", 7: "x", 8: "bc", 9: "", 10: "bcx\nabcab"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def stops_at(rules: StopRules, tokens: list[int]) -> tuple[int, Any] | None:
    """How many tokens until a stop, asked token by token."""
    for i in range(len(tokens)):
        reason = rules.reason(PROMPT, tokens[: i + 1])
        if reason is not None:
            return i + 1, reason
    return None


def test_a_long_token_after_tokens_without_text() -> None:
    """The text before the last token counts, however long that token's own text is."""
    rules = StopRules(1000, frozenset(), ("xb",), decode)
    assert stops_at(rules, [7, *[9] * 9, 10]) == (11, ("stop", "xb"))


def test_order_of_reasons() -> None:
    rules = StopRules(3, frozenset({1}), ("abc",), decode)
    assert stops_at(rules, [7, 7, 7, 7]) == (3, ("length", None))
    assert stops_at(rules, [7, 7, 1]) == (3, ("stop", 1))
    assert stops_at(rules, [7, 3, 4]) == (3, ("stop", "abc"))
    assert stops_at(rules, [7, 7]) is None


@given(
    tokens=st.lists(st.sampled_from([3, 4, 5, 6, 7, 8, 9, 9, 9, 10]), min_size=1, max_size=60),
    stops=st.lists(st.sampled_from(["abc", "\n\n", "cab", "xx", "abab", "c\n", "bcx\nab"]), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_end_at_the_token_that_completes_one(tokens: list[int], stops: list[str]) -> None:
    rules = StopRules(1000, frozenset(), tuple(stops), decode)
    expected = next((i for i in range(1, len(tokens) + 1) if any(s in decode(tokens[:i]) for s in stops)), None)
    found = stops_at(rules, tokens)
    assert (None if found is None else found[0]) == expected
    if found is not None:
        assert found[1][1] in stops


def test_a_stop_string_over_tokens_without_text() -> None:
    """Tokens that decode to nothing (or to half a character) may lie within a stop string."""
    rules = StopRules(1000, frozenset(), ("abc",), decode)
    assert stops_at(rules, [7, 3, *[9] * 20, 4, 7]) == (23, ("stop", "abc"))


@pytest.mark.parametrize("answer", [True, torch.tensor([True]), torch.tensor(True)])
def test_criteria_may_answer_a_bool_or_a_tensor(answer: Any) -> None:
    rules = StopRules(10, criteria=(lambda ids, scores: False, lambda ids, scores: answer))
    assert rules.reason(PROMPT, [7]) == ("stop", None)


def test_criteria_are_asked_about_prompt_and_generated() -> None:
    rules = StopRules(10, criteria=(lambda ids, scores: ids.tolist() == [[5, 6, 7, 3]],))
    assert stops_at(rules, [7, 3, 4]) == (2, ("stop", None))


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    parts = [text.add(i) for i in ids]
    return [*parts, text.rest()]


@pytest.mark.parametrize(
    "text", ["plain ascii", "naïve café", "日本語のテキスト", "🙂👩‍👩‍👧 ok", " the the  the\n", "é"]
)
def test_pieces_join_to_the_text(tiny: Any, text: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts), "a character is given whole or not at all"


@given(data=st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes(tiny: Any, data: bytes) -> None:
    """Also bytes that are no UTF-8: pieces join to what decoding all at once gives."""
    tokenizer, alphabet = _tokenizer(tiny), _byte_alphabet()
    ids = tokenizer.convert_tokens_to_ids([alphabet[b] for b in data])
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@functools.cache
def _tokenizer(tiny: Any) -> Any:
    return tiny.byte_tokenizer()


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins of the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_special_tokens_have_no_text(tiny: Any) -> None:
    tokenizer = tiny.word_tokenizer()
    parts = pieces(tokenizer, [5, 1, 6, 0, 0, 7])
    assert "".join(parts) == tokenizer.decode([5, 1, 6, 0, 0, 7], skip_special_tokens=True)


def test_held_back_text_comes_at_the_end(tiny: Any) -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer("a€")["input_ids"][:-1]
    parts = pieces(tokenizer, ids)
    assert parts[0] == "a"
    assert parts[-1] == "\ufffd" == tokenizer.decode(ids)[1:]
