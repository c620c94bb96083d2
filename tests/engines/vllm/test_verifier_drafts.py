"""Drafts that the verifier meets: placeholders, none at all, with and without their distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from verifier_batches import JS, LOSSY, NAIVE, WILD, replace_options
from verifier_reference import check, expected
from verifier_support import (
    CPU,
    INF,
    UNITS,
    VOCAB,
    Runner,
    make_ask,
    make_metadata,
    make_sampling,
    make_verifier,
    plugged,
    run,
)
from vllm.v1.sample.sampler import Sampler

from acceptance.support import random_head
from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.install import JudgedSampler
from dropmatch.engines.vllm.verifier import Verifier


def test_case_27_a_step_with_zero_draft_rows() -> None:
    batch = [make_ask("a", [], 0, options=JS), make_ask("b", [], 1, options=NAIVE, temperature=1.0, seed=4)]
    judged, plain = run(batch), run(batch, judged=False)
    assert judged.tokens == plain.tokens
    assert {len(tokens) for tokens in judged.tokens.values()} == {1}
    assert judged.report == {}


def test_case_27_zero_draft_rows_with_top_k_only_do_not_end_the_engine() -> None:
    batch = [make_ask("a", [], 0, options=JS, temperature=1.0, seed=4, top_k=5), make_ask("b", [], 1, options=NAIVE)]
    outcome = run(batch)
    assert outcome.tokens["a"][0] in batch[0].raw[0].topk(5).indices.tolist()
    assert outcome.tokens["b"] == [int(batch[1].raw[0].argmax())]


def test_a_placeholder_is_refused_even_where_the_element_before_its_row_has_all_mass() -> None:
    """vLLM's CPU kernel reads that element for it."""
    ask = make_ask("a", [0, -1, 0], 3, options={}, temperature=1.0, seed=1)
    ask.raw[0] = -torch.inf
    ask.raw[0, -1] = 0.0
    ask.drafts[0] = ask.raw.shape[1] - 1
    tokens = run([ask]).tokens["a"]
    assert tokens[0] == ask.drafts[0]
    assert len(tokens) == 2
    assert min(tokens) >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_27_requests_without_drafts_among_others(temperature: float) -> None:
    for seed in range(6):
        batch = [
            make_ask("none", [], seed, options=JS, temperature=temperature),
            make_ask("some", [1, 0, 1], seed, options=JS, temperature=temperature, seed=seed),
            make_ask("idle", [], seed, options={}, chunk=3),
            make_ask("more", [1, 1], seed + 1, options=NAIVE),
        ]
        outcome = check(batch)
        assert set(outcome.report) == {"some", "more"}


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("evaluation", ["lazy", "eager"])
def test_placeholders_are_never_accepted(rule: str, evaluation: str) -> None:
    options = {"dropmatch": rule, **WILD, "dropmatch_evaluation": evaluation}
    for seed in range(10):
        for ranks in ([-1], [-1, -1, -1], [0, -1, 1], [1, 1, -1]):
            ask = make_ask("a", ranks, seed, options=options)
            outcome = check([ask, make_ask("b", [1], seed + 1, options=options)])
            assert len(outcome.report["a"].accepted) <= ranks.index(-1)


def test_a_placeholder_of_a_request_that_samples_is_not_accepted() -> None:
    """vLLM's CPU kernel reads the element before the row for it: here one without mass."""
    for seed in range(10):
        ask = make_ask("a", [0, -1, 1], seed, options={**NAIVE, **WILD}, temperature=1.0, seed=seed)
        ask.raw = ask.raw.clone()
        ask.raw[0, VOCAB - 1] = -INF
        if ask.drafts[0] != VOCAB - 1:
            check([ask])


@pytest.mark.parametrize("beyond", [0, 3])
def test_a_token_that_the_target_does_not_know_is_not_asked_about(beyond: int) -> None:
    """A draft vocabulary may be padded further; case 6."""
    head = random_head(VOCAB, UNITS, 0.45)
    ask = make_ask("a", [0, 1], 2, options={**NAIVE, **WILD, "dropmatch_support": "full"}, head=head)
    ask.drafts[1] = VOCAB + beyond
    head.calls.clear()
    outcome = run([ask], head=head)
    assert outcome.tokens["a"] == [ask.drafts[0], int(ask.raw[1].argmax())]
    assert head.calls == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_js_without_draft_logits_accepts_only_exact_matches(temperature: float) -> None:
    for seed in range(6):
        ask = make_ask("a", [0, 1, 0], seed, options={**JS, **WILD}, temperature=temperature, seed=seed)
        ask.draft_logits = None
        outcome = check([ask, make_ask("b", [1], seed, options={**JS, **WILD})])
        assert set(outcome.report["a"].accepted) <= {"exact", "sampled"}
        strict = run([replace_options(ask, {"dropmatch": "strict"})])
        assert outcome.tokens["a"] == strict.tokens["a"]


def test_js_without_any_drafter_of_logits_accepts_only_exact_matches() -> None:
    ask = make_ask("a", [0, 1, 0], 1, options={**JS, **WILD})
    bare = replace(ask, draft_logits=None)
    kept = make_verifier

    def without_drafts(runner: Any, *args: Any) -> Verifier:
        verifier = kept(runner, *args)
        verifier._drafts = None
        return verifier

    with patch("verifier_support.make_verifier", without_drafts):
        outcome = run([ask])
        naive = check([replace_options(ask, {**NAIVE, **WILD})])
    assert outcome.tokens == {"a": expected([bare], outcome)["a"][0]}
    assert outcome.report["a"].accepted == ["exact"]
    assert "naive" in naive.report["a"].accepted


def test_eager_js_without_draft_logits_keeps_exact_matches() -> None:
    ask = make_ask("a", [0, 0, 1], 1, options={**JS, "dropmatch_evaluation": "eager"}, draft_logits=None)
    assert check([ask]).report["a"].accepted == ["exact", "exact"]


def test_probabilistic_drafts_are_judged_by_logits_that_temperature_has_not_touched() -> None:
    for seed in range(12):
        batch = [
            make_ask("hot", [1, 1], seed, options=JS, temperature=2.0, seed=seed, noise=0.5),
            make_ask("cold", [1, 0, 2], seed + 1, options=JS, temperature=0.2, seed=seed, noise=0.5),
            make_ask("greedy", [1, 1], seed + 2, options=JS, noise=0.5),
        ]
        check(batch, probabilistic=True)


def test_draft_logits_stay_with_a_request_that_sits_out_a_step_and_go_with_one_that_ends() -> None:
    a, b, c = (make_ask(name, [1, 1], i, options=JS) for i, name in enumerate("abc"))
    runner = Runner([a, b, c])
    drafts = DraftLogits(lambda: True)
    drafts.attach(runner)
    runner.propose("ab")
    assert torch.equal(drafts.rows([("b", 1), ("a", 0)]), torch.stack([b.draft_logits[1], a.draft_logits[0]]))
    assert [drafts.has("a", place) for place in range(4)] == [True, True, False, False]
    assert not drafts.has("c", 0)
    drafts.forget("b")  # as after its step
    runner.propose("cb")
    assert torch.equal(drafts.rows([("a", 1), ("b", 0), ("c", 1)]),
                       torch.stack([a.draft_logits[1], b.draft_logits[0], c.draft_logits[1]]))  # fmt: skip
    del runner.requests["a"]
    runner.propose("b")
    assert not drafts.has("a", 0)
    assert drafts.has("c", 1)
    drafts.forget(["unknown"])


def test_draft_logits_are_not_kept_where_no_request_compares_them() -> None:
    a, b = make_ask("a", [1, 1], 0, options=NAIVE), make_ask("b", [1], 1)
    runner = Runner([a, b])
    drafts = make_verifier(runner)._drafts
    assert drafts is not None
    runner.propose("ab")
    assert not drafts.has("a", 0)
    runner.requests["b"] = Runner([make_ask("b", [1], 1, options=JS)]).requests["b"]
    runner.input_batch.req_ids = ["b"]
    other = make_verifier(runner)._drafts  # settings are read once for each request
    assert other is not None
    runner.propose("b")
    assert other.has("b", 0)


def test_stale_draft_logits_are_forgotten_when_a_step_proposes_without_comparing() -> None:
    wanted = [True]
    runner = Runner([make_ask("a", [1, 1], 0, options=JS)])
    drafts = DraftLogits(lambda: wanted[0])
    drafts.attach(runner)
    runner.propose("a")
    wanted[0] = False
    runner.propose("a")
    assert not drafts.has("a", 0)


def test_draft_logits_of_a_failed_proposal_are_not_kept_and_recording_ends() -> None:
    runner = Runner([make_ask("a", [1, 1], 0, options=JS)])
    propose = runner.propose_draft_token_ids
    runner.propose_draft_token_ids = lambda *args: (propose(), 1 / 0)  # type: ignore[method-assign,assignment]
    drafts = DraftLogits(lambda: True)
    drafts.attach(runner)
    with pytest.raises(ZeroDivisionError):
        runner.propose_draft_token_ids()
    assert not drafts.has("a", 0)
    assert drafts._steps is None
    runner.drafter.model.compute_logits(torch.zeros(1, VOCAB))  # of a warm-up: not recorded
    assert not drafts.has("a", 0)


def test_greedy_drafts_are_kept_without_a_copy_and_sampled_ones_with_one() -> None:
    for heat, probabilistic, copied in ((0.0, True, False), (0.5, True, True), (0.5, False, False)):
        ask = make_ask("a", [1], 0, options=JS, temperature=heat)
        runner = Runner([ask], probabilistic)
        made = torch.stack([ask.draft_logits[0]])
        runner.drafter.model.compute_logits = lambda hidden, made=made: made
        drafts = DraftLogits(lambda: True)
        drafts.attach(runner)
        runner.propose("a")
        kept = drafts._kept["a"][0][0]
        assert (kept.data_ptr() != made.data_ptr()) == copied
        assert torch.equal(kept[0], ask.draft_logits[0])


def test_the_drafts_of_a_step_are_forgotten_after_it_and_others_kept() -> None:
    a, b = make_ask("a", [1], 0, options=JS), make_ask("b", [1], 1, options=JS)
    runner = Runner([a, b])
    verifier = make_verifier(runner)
    runner.propose("ab")
    runner.input_batch.req_ids = ["a"]
    metadata, runner.positions = make_metadata([a])
    verifier.hidden = a.hidden
    with plugged(True), torch.inference_mode():
        JudgedSampler(verifier, Sampler(), None, CPU)(metadata, None, a.raw, make_sampling([a]))
    assert verifier._drafts is not None
    assert not verifier._drafts.has("a", 0)
    assert verifier._drafts.has("b", 0)
