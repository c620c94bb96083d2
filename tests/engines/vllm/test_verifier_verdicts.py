"""What the verifier makes of verdicts, how it reports them, and the log-probabilities of what it accepts."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verifier_batches import JS, JUDGE, LOSSY, MANY, NAIVE, batches, replace_options, scripted_judge
from verifier_reference import check
from verifier_support import Ask, make_ask, run

from dropmatch.engines.vllm.step import KnownArgmax
from dropmatch.engines.vllm.verifier import Verifier


@MANY
@given(batches(1, 3))
def test_dropout_of_zero_is_strict(batch: list[Ask]) -> None:
    for i, ask in enumerate(batch):  # a sampled token that a rule takes is no exact match even without dropout
        ask.temperature, ask.top_k, ask.top_p = 0.0, 0, 1.0
        ask.options = {"dropmatch": LOSSY[i % 2], "dropmatch_dropout": 0.0, "dropmatch_heads": 1 + i}
    strict = [replace_options(ask, {"dropmatch": "strict"}) for ask in batch]
    zero, clean = run(batch), run(strict)
    assert zero.tokens == clean.tokens
    assert [r.accepted for r in zero.report.values()] == [r.accepted for r in clean.report.values()]


@MANY
@given(batches(1, 3))
def test_lossless_accepts_a_prefix_of_what_lossy_accepts(batch: list[Ask]) -> None:
    """Case 25: a lazy rule never accepts fewer than strict on the same rows."""
    for ask in batch:
        kept = ("dropmatch", "dropmatch_window")
        ask.options = {"dropmatch": "js"} | {name: ask.options[name] for name in kept if name in ask.options}
    lossy, strict = run(batch), run([replace_options(ask, {"dropmatch": "strict"}) for ask in batch])
    for ask in batch:
        accepted = len(strict.tokens[ask.name]) - 1
        assert lossy.tokens[ask.name][:accepted] == ask.drafts[:accepted]


@pytest.mark.parametrize("rule", ["off", "strict", *LOSSY])
@pytest.mark.parametrize("evaluation", ["lazy", "eager"])
def test_case_14_nothing_accepted_and_everything_accepted(rule: str, evaluation: str) -> None:
    options: dict[str, Any] = {"dropmatch": rule}
    if rule != "off":
        options |= {"dropmatch_evaluation": evaluation, "dropmatch_dropout": 0.0}
    none = make_ask("none", [9, 9, 9], 1, options=options)
    every = make_ask("every", [0, 0, 0], 2, options=options)
    outcome = check([none, every])
    assert outcome.report["none"].accepted == []
    assert outcome.report["none"].drafted == outcome.report["every"].drafted == 3
    assert outcome.tokens["none"] == [int(none.raw[0].argmax())]
    if rule != "js" or evaluation == "lazy":
        assert outcome.report["every"].accepted == ["exact"] * 3
        assert outcome.tokens["every"] == [*every.drafts, int(every.raw[3].argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1e-2])
def test_case_15_verdicts_true_false_true_true_accept_one(temperature: float) -> None:
    ask = make_ask("a", [9, 9, 9, 9], 1, options=NAIVE, temperature=temperature, start=7)
    verdicts = dict(zip(range(8, 12), [True, False, True, True], strict=True))
    with patch(JUDGE, scripted_judge(verdicts)):
        outcome = run([ask])
    assert outcome.report["a"].accepted == ["naive"]
    assert outcome.tokens["a"] == [ask.drafts[0], int(ask.raw[1].argmax())]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_case_15_any_pattern_of_verdicts_and_exact_matches_ends_at_the_first_rejection(
    rows: list[tuple[bool, bool]], eager: bool, other: bool
) -> None:
    """Rows are (exact match?, what the rule says)."""
    options = {**NAIVE, "dropmatch_evaluation": "eager" if eager else "lazy"}
    ask = make_ask("a", [0 if exact else 9 for exact, _ in rows], 1, options=options, start=0)
    batch = [make_ask("z", [9], 5, options=options, start=50), ask] if other else [ask]
    verdicts = {1 + place: yes for place, (_, yes) in enumerate(rows)} | {51: True}
    with patch(JUDGE, scripted_judge(verdicts)):
        outcome = run(batch)
    wanted: list[str] = []
    for exact, yes in rows:
        if not (yes if eager else exact or yes):
            break
        wanted.append("exact" if exact else "naive")
    assert outcome.report["a"].accepted == wanted
    last = int(ask.raw[len(wanted)].argmax())
    assert outcome.tokens["a"] == [*ask.drafts[: len(wanted)], last]
    if other:
        assert outcome.report["z"].accepted == ["naive"]


def test_all_mismatches_are_judged_at_once() -> None:
    seen: list[list[int]] = []

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        seen.append(evidence.positions.tolist())
        return scripted_judge({8: True, 9: False, 10: True, 41: True, 42: True, 71: False, 72: True})(
            evidence, config, head
        )

    batch = [
        make_ask("a", [9, 9, 9], 1, options=NAIVE, start=7),
        make_ask("b", [9, 9], 2, options=NAIVE, start=40),
        make_ask("c", [9, 9], 3, options=NAIVE, start=70),
    ]
    with patch(JUDGE, judge):
        outcome = run(batch)
    assert seen == [[8, 9, 10, 41, 42, 71, 72]]
    assert [len(outcome.report[name].accepted) for name in "abc"] == [1, 2, 0]


@pytest.mark.parametrize(
    ("options", "temperature", "asked"),
    [
        ({"token_floor": 0.1}, 0.0, [8, 9]),
        ({"token_floor": 0.1, "evaluation": "eager"}, 0.0, [8, 9]),
        ({"token_floor": 0.3}, 0.0, []),
        ({"token_floor": 0.01}, 0.0, [8, 9, 10, 11]),
        ({"token_floor": 0.0}, 0.0, [8, 9, 10, 11]),
        ({"token_floor": 0.1, "strictness": 0.4}, 0.0, [8, 9, 10, 11]),
        ({"token_floor": 0.1, "verdict": "sampled"}, 0.0, [8, 9, 10, 11]),
        ({"token_floor": 0.1}, 1e-3, [8, 9, 10, 11]),
    ],
)
def test_rows_that_the_floor_refuses_and_those_behind_are_not_judged(
    options: dict[str, Any], temperature: float, asked: list[int]
) -> None:
    """Draft tokens of clean probability 0.2, 0.2, 0.05 and 0.2, beside a clean token of 0.7 and more."""
    seen: list[int] = []

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        seen.extend(evidence.positions.tolist())
        return scripted_judge(dict.fromkeys(range(100), True))(evidence, config, head)

    wanted = {"dropmatch": "naive"} | {f"dropmatch_{name}": value for name, value in options.items()}
    ask = make_ask("a", [9, 9, 9, 9], 1, options=wanted, temperature=temperature, start=7)
    ask.raw = torch.full_like(ask.raw, -30.0)
    for place, (probability, token) in enumerate(zip([0.2, 0.2, 0.05, 0.2], ask.drafts, strict=True)):
        ask.raw[place, token] = math.log(probability)
        ask.raw[place, (token + 70) % ask.raw.shape[1]] = math.log(0.75)
        ask.raw[place, (token + 140) % ask.raw.shape[1]] = math.log(0.25 - probability)
    with patch(JUDGE, judge):
        outcome = run([ask])
    assert seen == asked
    assert len(outcome.report["a"].accepted) == len(asked)


@pytest.mark.parametrize(("evaluation", "kept"), [("eager", 0), ("lazy", 2)])
def test_the_floor_refuses_exact_tokens_too_where_they_are_judged(evaluation: str, kept: int) -> None:
    options = {"dropmatch": "naive", "dropmatch_token_floor": 0.9, "dropmatch_evaluation": evaluation}
    ask = make_ask("a", [0, 0], 1, options=options, start=7)
    ask.raw = torch.full_like(ask.raw, -30.0)
    for place, token in enumerate(ask.drafts):  # the likeliest token has 0.75 in all
        ask.raw[place, token] = math.log(0.75)
        ask.raw[place, (token + 70) % ask.raw.shape[1]] = math.log(0.25)
    judge = scripted_judge(dict.fromkeys(range(100), True))  # it is not to be asked
    with patch(JUDGE, judge), patch("dropmatch.heads.vocabulary.BLOCK", 8):  # the two are in different blocks
        outcome = run([ask])
    assert len(outcome.report["a"].accepted) == kept
    assert outcome.tokens["a"][0] == ask.drafts[0]  # the target's own token, if not the draft's


@pytest.mark.parametrize(("lossy", "answered"), [(True, 1), (False, 0)])
def test_the_kernels_are_told_the_likeliest_tokens(lossy: bool, answered: int) -> None:
    """Where all rows were looked at; what vLLM asks is what is answered, or it would cost a pass over all logits."""
    told: list[torch.Tensor] = []

    class Watched(KnownArgmax):
        def __torch_function__(self, *args: Any) -> Any:
            found = super().__torch_function__(*args)
            told.extend([found] if found is self._tokens else [])
            return found

    batch = [make_ask("a", [0, 9, 0, 9], 1, options=NAIVE, start=7)]
    batch += [] if lossy else [make_ask("b", [0, 9], 2, options={"dropmatch": "strict"}, start=40)]
    judge = scripted_judge({9: True, 11: False})
    with patch("dropmatch.engines.vllm.verifier.KnownArgmax", Watched), patch(JUDGE, judge):
        outcome = run(batch)
    assert len(told) == answered
    assert outcome.tokens["a"] == [*batch[0].drafts[:3], int(batch[0].raw[3].argmax())]


def test_only_the_argmax_that_is_known_is_answered() -> None:
    logits, wrong = torch.eye(3), torch.tensor([2, 2, 2])
    with KnownArgmax(logits, wrong):
        assert logits.argmax(dim=-1) is wrong
        assert logits.argmax(-1).tolist() == logits.clone().argmax(dim=-1).tolist() == [0, 1, 2]
        assert int(logits.argmax()) == 0
        assert torch.equal(logits + 1, torch.eye(3) + 1)
    assert logits.argmax(dim=-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("evaluation", ["lazy", "eager"])
def test_rows_behind_one_that_cannot_be_judged_are_not_judged(evaluation: str) -> None:
    seen: list[int] = []

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        seen.extend(evidence.positions.tolist())
        return scripted_judge({8: True, 10: True, 11: True, 41: True})(evidence, config, head)

    options = {**NAIVE, "dropmatch_evaluation": evaluation}
    batch = [
        make_ask("a", [9, -1, 9, 0], 1, options=options, start=7),
        make_ask("b", [9], 2, options=options, start=40),
    ]
    with patch(JUDGE, judge):
        outcome = run(batch)
    assert sorted(seen) == [8, 41]
    assert outcome.report["a"].accepted == ["naive"]


def test_rows_behind_a_placeholder_of_a_request_that_samples_are_not_judged() -> None:
    seen: list[int] = []

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        seen.extend(evidence.positions.tolist())
        return scripted_judge(dict.fromkeys(range(100), True))(evidence, config, head)

    ask = make_ask("a", [9, -1, 9], 1, options=NAIVE, start=7, temperature=0.01, seed=1)
    ask.raw = ask.raw.clone()
    ask.raw[1, 0] = 50.0  # nearly certain, and no placeholder
    with patch(JUDGE, judge):
        outcome = run([ask])
    assert seen == [8]
    assert outcome.tokens["a"] == [ask.drafts[0], 0]


def test_the_evidence_names_the_position_and_seed_of_each_row() -> None:
    """Masks are keyed by both: the request's own mask seed, else its seed, else 0."""
    rows: dict[int, int] = {}

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        assert config.mask_seed is None
        rows.update(zip(evidence.positions.tolist(), evidence.seeds.tolist(), strict=True))
        return scripted_judge(dict.fromkeys(range(1000), True))(evidence, config, head)

    batch = [
        make_ask("a", [1, 1], 1, options=NAIVE, seed=4, start=20, chunk=6),
        make_ask("b", [1], 2, options={**NAIVE, "dropmatch_mask_seed": -9}, seed=5, start=30),
        make_ask("c", [1, 1], 3, options=NAIVE, start=40, chunk=2),
    ]
    with patch(JUDGE, judge):
        run(batch)
    assert rows == {21: 4, 22: 4, 31: -9, 41: 0, 42: 0}


def test_an_error_in_a_rule_leaves_no_step_behind() -> None:
    ask = make_ask("a", [9, 9], 1, options=NAIVE)
    with patch(JUDGE, lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
        run([ask])
    assert Verifier.active is None


def test_an_error_in_a_rule_leaves_no_random_numbers_behind() -> None:
    ask = make_ask("a", [9, 9], 1, options=NAIVE, temperature=1.0)
    try:
        with patch(JUDGE, lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
            run([ask])
        assert Verifier.uniforms is None
    finally:
        Verifier.uniforms = None


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_case_12_logprobs_of_lossy_tokens_are_the_clean_targets(mode: str, temperature: float) -> None:
    lossy = 0
    with patch("vllm.v1.sample.sampler.batched_count_greater_than", lambda x, values: (x >= values).sum(-1)):
        for seed in range(8):
            batch = [
                make_ask(
                    "a", [1, 0, 2], seed, options=NAIVE, temperature=temperature, seed=seed, penalties=(1.2, 0.1, 0.1)
                ),
                make_ask("b", [0, 1], seed + 1, options=JS, temperature=temperature, seed=seed),
            ]
            outcome = check(batch, mode=mode, logprobs=2)
            start = 0
            for ask in batch:
                for place, token in enumerate(outcome.tokens[ask.name][:-1]):
                    given, found, rank = outcome.logprobs[ask.name][place]
                    raw = mode.startswith("raw")
                    row = ask.raw[place] if raw else outcome.target_logits[0][start + place]
                    row = row if mode.endswith("logits") else row.log_softmax(dim=0)
                    assert given == token
                    assert found == pytest.approx(float(row[token]), abs=1e-5)
                    assert rank == int((row >= row[token]).sum())
                    if mode.endswith("logprobs"):
                        assert found < 0
                    lossy += outcome.report[ask.name].accepted[place] not in ("exact", "sampled")
                start += len(ask.drafts)
    assert lossy > 3


def test_case_12_without_logprobs_none_are_made() -> None:
    assert run([make_ask("a", [1, 0], 0, options=NAIVE)]).logprobs == {}
