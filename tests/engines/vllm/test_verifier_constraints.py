"""Grammars, bad words, penalties, minimum lengths, top-k and top-p: what they ban is never accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from verifier_batches import JS, LOSSY, NAIVE, WILD
from verifier_reference import check
from verifier_support import HEAD, INF, VOCAB, Ask, make_ask, run


def banned_asks() -> dict[str, Callable[[Ask, int], None]]:
    """Ways to ban a request's first draft token."""

    def grammar(ask: Ask, token: int) -> None:
        ask.raw = ask.raw.clone()
        ask.raw[0, token] = -INF

    def allowed(ask: Ask, token: int) -> None:
        ask.allowed = set(range(VOCAB)) - {token}

    def bad_word(ask: Ask, token: int) -> None:
        ask.bad_words = [[token]]

    def bad_pair(ask: Ask, token: int) -> None:
        ask.bad_words = [[ask.output[-1], token]]

    def too_early(ask: Ask, token: int) -> None:
        ask.min_tokens, ask.stop = 8, [token]

    return {f.__name__: f for f in (grammar, allowed, bad_word, bad_pair, too_early)}


@pytest.mark.parametrize("how", banned_asks())
@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cases_5_and_8_a_banned_draft_token_is_never_accepted(how: str, rule: str, temperature: float) -> None:
    for seed in range(8):
        # its likeliest token is drafted: without the ban every head and any luck would take it
        ask = make_ask("a", [0, 0], seed, noise=0.1, options={"dropmatch": rule, **WILD}, temperature=temperature)
        ask.seed = seed
        if temperature == 0:
            assert run([ask]).tokens["a"][0] == ask.drafts[0]
        banned_asks()[how](ask, ask.drafts[0])
        outcome = check([ask, make_ask("b", [1, 0], seed, options={"dropmatch": rule, **WILD})])
        assert outcome.report["a"].accepted == []
        assert outcome.tokens["a"][0] != ask.drafts[0]


def test_case_5_a_stop_token_is_banned_just_as_long_as_min_tokens_says() -> None:
    for place in range(4):
        ask = make_ask("a", [0, 0, 0, 0], 9, noise=0.1, options={**JS, **WILD})
        ask.stop, ask.min_tokens = [ask.drafts[place]], 3
        accepted = len(check([ask]).report["a"].accepted)
        first = ask.drafts.index(ask.drafts[place])
        assert (accepted == first) == (len(ask.output) + first < 3)


def test_a_penalty_counts_the_draft_tokens_before_it() -> None:
    """The second of two equal draft tokens is punished so hard that no head has it."""
    for rule in LOSSY:
        ask = make_ask("a", [0, 0], 1, noise=0.1, options={"dropmatch": rule})
        ask.hidden = torch.stack([ask.hidden[0]] * 3)
        ask.raw = HEAD.full(ask.hidden)
        ask.drafts = [ask.drafts[0]] * 2
        ask.draft_logits = ask.raw[:2].clone()
        assert len(check([ask]).report["a"].accepted) == 2
        ask.penalties = (1.0, 0.0, 90.0)
        assert check([ask]).report["a"].accepted == ["exact"]


def test_heads_are_judged_under_the_penalties_that_the_clean_logits_are_under() -> None:
    """A token that only its presence penalty makes second best is not what the heads say."""
    ask = make_ask("a", [0], 4, noise=0.0, options={**NAIVE, "dropmatch_dropout": 0.01})
    ask.output = [ask.drafts[0]]
    ask.penalties = (1.0, 0.0, 50.0)
    assert check([ask]).report["a"].accepted == []


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_k": 2}, {"top_p": 1e-6}])
@pytest.mark.parametrize("rule", LOSSY)
def test_what_top_k_or_top_p_rules_out_is_vetoed(limit: dict[str, Any], rule: str) -> None:
    inside = 2 if limit == {"top_k": 2} else 1
    seen = set()
    for seed in range(12):
        for rank in (1, 2):
            options = {"dropmatch": rule, **WILD}
            ask = make_ask("a", [rank], seed, noise=0.1, options=options, temperature=1.0, seed=seed)
            taken = bool(check([replace(ask, **limit)]).report["a"].accepted)
            assert taken <= (rank < inside)
            seen.add((rank, bool(check([ask]).report["a"].accepted)))
    assert (1, True) in seen  # without the limit it is taken


def test_the_distributions_are_compared_before_temperature() -> None:
    """Heads at a tenth of the temperature would all agree; the reference divides by none."""
    differ = 0
    for seed in range(30):
        ask = make_ask("a", [1, 2], seed, options={**JS, "dropmatch_dropout": 0.2}, temperature=0.05, seed=seed)
        greedy = make_ask("b", [1, 2], seed, options={**JS, "dropmatch_dropout": 0.2}, seed=seed)
        outcome = check([ask, greedy])
        differ += outcome.report["a"].accepted != outcome.report["b"].accepted
    assert differ <= 3  # near zero temperature is near greedy
