"""The rules against the paper's equations: strict, naive (4), js (5 to 7 and Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptance import reference
from acceptance.support import make_evidence, make_head, random_head, reference_answers, scripted
from dropmatch.acceptance import Verdict, judge, reason_name
from dropmatch.config import AcceptanceConfig

JS = AcceptanceConfig(rule="js", support="full")
NAIVE = AcceptanceConfig(rule="naive", support="full")


def ask(rule: str, heads: list[list[float]], draft: list[float], token: int, **settings: Any) -> Verdict:
    """The verdict on one row whose heads are scripted, over the full vocabulary unless told otherwise."""
    evidence, head = scripted(heads, draft, token)
    config = AcceptanceConfig(**{"rule": rule, "heads": len(heads), "support": "full"} | settings)
    return judge(evidence, config, head)


def reasons(verdict: Verdict) -> list[str]:
    return [reason_name(code) for code in verdict.reason.tolist()]


# --- against the slow reference


@pytest.mark.parametrize("heads", [1, 2, 5, 8])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.15])
def test_rules_equal_the_reference(heads: int, p: float, floor: float) -> None:
    head = random_head(37, 24, 0.6, seed=heads, cap=6.0 if heads == 2 else None)
    evidence = make_evidence(head, 60, seed=heads, noise=4 + 10 * p)
    config = replace(JS, heads=heads, dropout=p, token_floor=floor)
    answers = reference_answers(evidence, config, head)
    verdict = judge(evidence, config, head)
    naive = judge(evidence, replace(config, rule="naive"), head)
    # both answers, and both reasons, are there to be confused
    assert {a.js for a in answers} == {True, False}
    assert {a.naive for a in answers} == {True, False}
    # one head is its own centroid, and its radius 0
    assert {"majority", *(["js"] if heads > 1 else [])} <= {a.reason for a in answers}
    clear = [n for n, a in enumerate(answers) if a.clear]
    assert len(clear) >= 50
    for n in clear:
        assert bool(verdict.accept[n]) == answers[n].js, n
        assert reasons(verdict)[n] == answers[n].reason, n
    np.testing.assert_allclose(verdict.distance, [a.distance for a in answers], atol=2e-6, rtol=2e-4)
    np.testing.assert_allclose(verdict.radius, [a.radius for a in answers], atol=2e-6, rtol=2e-4)
    for made in (verdict, naive):
        np.testing.assert_allclose(made.probability, [a.probability for a in answers], rtol=1e-4)
        assert made.votes.tolist() == [a.votes for a in answers]
    assert naive.accept.tolist() == [a.naive for a in answers]
    assert reasons(naive) == ["naive" if a.naive else "rejected" for a in answers]
    for n, a in enumerate(answers):
        if abs(a.uniform - a.radius) > 1e-4:
            assert bool(verdict.uniform_passes[n]) == (a.uniform <= a.radius)


halves = st.integers(-12, 12).map(lambda i: i / 2)


@given(data=st.data(), heads=st.integers(1, 6), vocab=st.integers(2, 7))
@settings(max_examples=150, deadline=None)
def test_scripted_heads_equal_the_reference(data: st.DataObject, heads: int, vocab: int) -> None:
    """Few values, so that ties of votes and of logits are common."""
    row = st.lists(halves, min_size=vocab, max_size=vocab)
    logits = data.draw(st.lists(row, min_size=heads, max_size=heads))
    draft, token = data.draw(row), data.draw(st.integers(0, vocab - 1))
    expected = reference.answer(np.array(logits), np.array(draft), token)
    made = ask("js", logits, draft, token)
    assert made.distance.item() == pytest.approx(expected.distance, abs=2e-6)
    assert made.radius.item() == pytest.approx(expected.radius, abs=2e-6)
    assert made.votes.item() == expected.votes
    centroid = np.array(logits).mean(axis=0)
    tokens = [reference.argmax(r) for r in logits]
    tied = [t for t in set(tokens) if tokens.count(t) == max(map(tokens.count, tokens))]
    decided = len({centroid[t] for t in tied}) == len(tied)  # equal centroid logits: either may win
    if expected.clear and decided:
        assert bool(made.accept) == expected.js
        assert reasons(made) == [expected.reason]
    assert bool(ask("naive", logits, draft, token).accept) == expected.naive


# --- majority (equation 7)


def spike(vocab: int, token: int, height: float = 4.0) -> list[float]:
    return [height if i == token else 0.0 for i in range(vocab)]


FAR = [0.0, 0.0, 0.0, 0.0, 0.0, 30.0]  # a draft distribution that no cluster below contains


@pytest.mark.parametrize(
    ("votes", "heights", "winner"),
    [
        ((2, 2, 2, 2, 2), (4, 4, 4, 4, 4), 2),
        ((1, 1, 1, 2, 2), (4, 4, 4, 4, 4), 1),
        ((1, 1, 1, 2, 2), (2, 2, 2, 9, 9), 1),  # votes count, not logits
        ((3, 1, 2, 1, 0), (9, 2, 9, 2, 9), 1),  # a plurality is enough
        ((4, 4, 1, 1, 0), (3, 3, 4, 4, 9), 1),  # a tie goes to the higher centroid logit, here of 1
        ((4, 4, 1, 1, 0), (4, 4, 3, 3, 9), 4),  # here of 4
        ((1, 1, 4, 4, 0), (3, 3, 4, 4, 9), 4),  # whichever comes first
        ((0, 1, 2, 3, 4), (4, 4, 6, 4, 4), 2),  # all apart: the highest
        ((3,), (4,), 3),
        ((3, 2), (3, 4), 2),
    ],
)
def test_majority_is_the_plurality_and_a_tie_goes_to_the_higher_centroid_logit(
    votes: Sequence[int], heights: Sequence[float], winner: int
) -> None:
    heads = [spike(6, token, height) for token, height in zip(votes, heights, strict=True)]
    for token in range(6):
        verdict = ask("js", heads, FAR, token)
        assert verdict.distance.item() > verdict.radius.item()
        assert bool(verdict.accept) == (token == winner)
        assert reasons(verdict) == ["majority" if token == winner else "rejected"]
        assert verdict.votes.item() == list(votes).count(token)


def test_majority_of_a_shortlist_speaks_of_token_ids() -> None:
    """Three heads say 370, two say 5; both are in the shortlist twice, as likely for target and draft."""
    vocab = 400
    heads = [[*spike(vocab, 370, 7.0)] for _ in range(3)] + [[*spike(vocab, 5, 9.0)] for _ in range(2)]
    draft = [*spike(vocab, 5, 12.0)]
    settings = {"support": "shortlist", "shortlist_size": 16}
    for token, votes in ((370, 3), (5, 2), (399, 0), (0, 0)):
        verdict = ask("js", heads, draft, token, **settings)
        assert verdict.distance.item() > verdict.radius.item()
        assert reasons(verdict) == ["majority" if token == 370 else "rejected"]
        assert verdict.votes.item() == votes
        expected = reference.answer(np.array(heads), np.array(draft), token)
        assert verdict.probability.item() == pytest.approx(expected.probability, rel=1e-3)
        assert bool(ask("naive", heads, draft, token, **settings).accept) == (votes > 0)


# --- equation 6


def test_radius_is_the_largest_head_and_the_draft_may_lie_on_it() -> None:
    heads = [spike(5, 0, 3.0), spike(5, 0, 3.0), spike(5, 1, 5.0)]
    probabilities = [reference.softmax(h) for h in heads]
    centroid = reference.softmax(np.array(heads).mean(axis=0).tolist())
    every = [reference.js(p, centroid) for p in probabilities]
    for k, expected in enumerate(every):
        # the draft is head k: as far from the centroid as that head, token 4 that no head chose
        verdict = ask("js", heads, heads[k], 4)
        assert verdict.distance.item() == pytest.approx(expected, abs=1e-6)
        assert verdict.radius.item() == pytest.approx(max(every), abs=1e-6)
        assert reasons(verdict) == ["js"]
    just_outside = [*spike(5, 1, 5.3)]
    assert reference.js(reference.softmax(just_outside), centroid) > max(every)
    assert reasons(ask("js", heads, just_outside, 4)) == ["rejected"]


def test_centroid_averages_logits_and_not_probabilities() -> None:
    heads = [[8.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    centroid = reference.softmax([4.0, 0.5, 0.0])
    verdict = ask("js", heads, [4.0, 0.5, 0.0], 1)
    assert verdict.distance.item() == pytest.approx(0.0, abs=1e-6)
    assert verdict.probability.item() == pytest.approx(centroid[1], rel=1e-5)


def test_js_is_named_before_majority_where_both_hold() -> None:
    heads = [spike(5, 0, 3.0), spike(5, 0, 4.0)]
    assert reasons(ask("js", heads, spike(5, 0, 3.5), 0)) == ["js"]


def test_equation_6_never_looks_at_the_token_and_the_floor_does() -> None:
    heads = [spike(6, 0, 3.0), spike(6, 1, 3.0)]
    inside = np.array(heads).mean(axis=0).tolist()
    probability = reference.softmax(inside)[5]
    assert reasons(ask("js", heads, inside, 5)) == ["js"]
    assert reasons(ask("js", heads, inside, 5, token_floor=probability * 0.99)) == ["js"]
    assert reasons(ask("js", heads, inside, 5, token_floor=probability * 1.01)) == ["rejected"]


@pytest.mark.parametrize("rule", ["js", "naive"])
def test_floor_binds_majority_and_naive_too(rule: str) -> None:
    heads = [spike(6, 2, 1.0)] * 3
    probability = reference.softmax(heads[0])[2]
    assert bool(ask(rule, heads, FAR, 2, token_floor=probability * 0.99).accept)
    refused = ask(rule, heads, FAR, 2, token_floor=probability * 1.01)
    assert reasons(refused) == ["rejected"]
    assert refused.votes.item() == 3


def test_uniform_passes_where_the_heads_are_too_noisy_to_judge() -> None:
    noisy = [spike(4, i, 20.0) for i in range(4)]  # their centroid is the uniform distribution
    assert bool(ask("js", noisy, FAR[:4], 0).uniform_passes)
    firm = [spike(4, 0, 8.0), spike(4, 0, 9.0)]
    assert not bool(ask("js", firm, FAR[:4], 0).uniform_passes)


@pytest.mark.parametrize("support", ["full", "shortlist"])
def test_a_draft_that_gives_most_tokens_nothing(support: str) -> None:
    """Logits of -inf are probabilities of 0, also where fewer are left than the shortlist asks for."""
    head = random_head(600, 24, 0.6)
    evidence = make_evidence(head, 12)
    assert evidence.draft_logits is not None
    kept = evidence.draft_logits.topk(5, dim=1)
    draft = torch.full_like(evidence.draft_logits, -torch.inf).scatter(1, kept.indices, kept.values)
    evidence = replace(evidence, draft_logits=draft)
    config = replace(JS, support=support, shortlist_size=300)
    verdict = judge(evidence, config, head)
    for n, expected in enumerate(reference_answers(evidence, config, head)):
        assert verdict.distance[n].item() == pytest.approx(expected.distance, abs=2e-3)
        assert int(verdict.votes[n]) == expected.votes
        if abs(expected.distance - expected.radius) > 5e-3:
            assert bool(verdict.accept[n]) == expected.js


# --- naive and strict


def test_naive_is_membership() -> None:
    heads = [spike(6, 1), spike(6, 1), spike(6, 4), spike(6, 3)]
    assert [token for token in range(6) if ask("naive", heads, FAR, token).accept] == [1, 3, 4]
    verdict = ask("naive", heads, FAR, 1)
    assert verdict.votes.item() == 2
    assert math.isnan(verdict.distance.item())
    assert math.isnan(verdict.radius.item())


def test_strict_is_the_clean_token_and_needs_no_head() -> None:
    head = make_head(30, 16)
    evidence = make_evidence(head, 20)
    verdict = judge(evidence, AcceptanceConfig(rule="strict"))
    expected = evidence.draft_tokens == evidence.clean_tokens
    assert 0 < int(expected.sum()) < 20
    assert torch.equal(verdict.accept, expected)
    assert reasons(verdict) == ["exact" if e else "rejected" for e in expected.tolist()]
    assert bool(verdict.distance.isnan().all())
    assert bool(verdict.probability.isnan().all())
    assert verdict.votes.tolist() == [-1] * 20
    # the clean token need not be the argmax: it may have been drawn
    drawn = replace(evidence, clean_tokens=evidence.draft_tokens)
    assert bool(judge(drawn, AcceptanceConfig(rule="strict")).accept.all())


# --- no dropout: nothing but exact match


@pytest.mark.parametrize("heads", [1, 3, 5, 7])
@pytest.mark.parametrize("support", ["full", "shortlist"])
def test_without_dropout_every_rule_is_exact_match(heads: int, support: str) -> None:
    head = make_head(600, 32)
    evidence = make_evidence(head, 40)
    exact = evidence.draft_tokens == evidence.clean_logits.argmax(dim=1)
    assert 0 < int(exact.sum()) < 40
    config = AcceptanceConfig(dropout=0.0, heads=heads, support=support, shortlist_size=128)
    naive = judge(evidence, replace(config, rule="naive"), head)
    assert torch.equal(naive.accept, exact)
    verdict = judge(evidence, config, head)
    assert torch.equal(verdict.accept, exact)
    assert set(verdict.votes.tolist()) == {0, heads}
    assert bool((verdict.radius < 1e-6).all())
    assert not bool(verdict.uniform_passes.any())


@pytest.mark.parametrize("vocab", [5, 37, 600, 5000])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_without_dropout_the_targets_own_distribution_lies_in_the_cluster(vocab: int, heads: int) -> None:
    """0 <= 0 in equation 6, whatever the token; logits are exact here, so that nothing but the rule is tested."""
    head = make_head(vocab, 16)
    evidence = make_evidence(head, 16)
    evidence = replace(evidence, draft_logits=evidence.clean_logits, draft_tokens=evidence.clean_logits.argmin(dim=1))
    verdict = judge(evidence, replace(JS, dropout=0.0, heads=heads), head)
    assert bool((verdict.distance < 1e-6).all())
    assert bool(verdict.accept.all())
    assert set(reasons(verdict)) == {"js"}


# --- across settings


@pytest.mark.parametrize("support", ["full", "shortlist"])
def test_naive_grows_with_the_number_of_heads(support: str) -> None:
    head = make_head(600, 24)
    evidence = make_evidence(head, 60)
    before = torch.zeros(60, dtype=torch.bool)
    counts = []
    for heads in (1, 2, 3, 5, 8, 16, 32):
        config = AcceptanceConfig(rule="naive", heads=heads, support=support, shortlist_size=64)
        accept = judge(evidence, config, head).accept
        assert not bool((before & ~accept).any())
        before = accept
        counts.append(int(accept.sum()))
    assert counts[-1] > counts[0]


def test_js_accepts_at_least_the_majority_and_naive_at_least_the_majority() -> None:
    head = make_head(300, 24)
    evidence = make_evidence(head, 80)
    verdict, naive = judge(evidence, JS, head), judge(evidence, NAIVE, head)
    most = verdict.votes > JS.heads // 2
    assert int(most.sum()) > 5
    assert bool(verdict.accept[most].all())
    assert bool(naive.accept[most].all())
