"""The verifier against vLLM's own CPU kernels: no model, scripted logits, a slow reference (`verifier_reference`)."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verifier_batches import JS, LOSSY, MANY, NAIVE, WILD, batches, replace_options
from verifier_reference import check
from verifier_support import UNITS, VOCAB, Ask, make_ask, run
from vllm.v1.sample.rejection_sampler import RejectionSampler

from acceptance.support import random_head
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm import head as head_module
from dropmatch.engines.vllm.install import JudgedSampler


@MANY
@given(batches(sampling=False, constraints=False))
def test_greedy_batches_of_mixed_rules_and_settings_are_what_the_description_says(batch: list[Ask]) -> None:
    check(batch)


@MANY
@given(batches(sampling=False))
def test_greedy_batches_under_constraints_are_what_the_description_says(batch: list[Ask]) -> None:
    check(batch)


@MANY
@given(batches(), st.booleans())
def test_mixed_batches_of_greedy_and_sampling_requests_are_what_the_description_says(
    batch: list[Ask], probabilistic: bool
) -> None:
    if any(-1 in ask.drafts for ask in batch):
        probabilistic = False  # a drafter with probabilities leaves no placeholders
    check(batch, probabilistic=probabilistic)


@MANY
@given(batches(sampling=False, constraints=False), st.sampled_from(["lazy", "eager"]))
def test_the_engines_default_rules_requests_that_name_none(batch: list[Ask], evaluation: str) -> None:
    check(batch, default=AcceptanceConfig(rule="naive", heads=7, dropout=0.4, evaluation=evaluation))


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_rules_do_accept_lossy_tokens_here_and_do_reject(rule: str, temperature: float) -> None:
    """So that the comparisons above are not empty."""
    reasons: Counter[str] = Counter()
    rejected = 0
    for seed in range(60):
        options = {"dropmatch": rule, "dropmatch_verdict": "sampled"}
        ask = make_ask("a", [1, 0, 2, 1], seed, options=options, temperature=temperature, seed=seed)
        report = check([ask]).report["a"]
        reasons.update(report.accepted)
        rejected += len(report.accepted) < 4
    lossless = "exact" if temperature == 0 else "sampled"
    assert reasons[rule] > 10
    assert reasons[lossless] > 10
    assert rejected > 10
    assert set(reasons) <= {rule, lossless, "majority"}


@pytest.mark.parametrize("support", ["shortlist", "full", "auto"])
def test_the_support_is_the_one_that_is_configured(support: str) -> None:
    head = random_head(400, UNITS, 0.45)
    asks = [
        make_ask(f"r{i}", [1, 0, 2], i, head=head, options={**JS, "dropmatch_support": support, **size})
        for i, size in enumerate([{"dropmatch_shortlist_size": 16}, {"dropmatch_shortlist_size": 32}, {}])
    ]
    head.calls.clear()
    with patch("verifier_support.VOCAB", 400):
        check(asks, head=head)
    kinds = {kind for kind, _ in head.calls}
    # a shortlist of 2,048 out of 400 is everything
    assert kinds == ({"full"} if support == "full" else {"gather", "full"})


def test_a_batch_in_bf16_is_judged_from_the_logits_in_bf16() -> None:
    batch = [make_ask(f"r{i}", [1, 0, 1, 2], i, options=JS) for i in range(8)]
    for ask in batch:
        ask.raw = ask.raw.bfloat16()
    check(batch)


@MANY
@given(batches(2, 4, placeholders=False), st.booleans(), st.integers(0, 3))
def test_requests_that_are_off_are_bit_equal_to_the_plain_sampler(
    batch: list[Ask], probabilistic: bool, rng: int
) -> None:
    """Seeded and unseeded, greedy and sampling, next to others that are on."""
    judged = run(batch, probabilistic=probabilistic, rng=rng)
    plain = run(batch, judged=False, probabilistic=probabilistic, rng=rng)
    for ask in batch:
        if ask.options.get("dropmatch", "off") in ("off", "strict"):
            assert judged.tokens[ask.name] == plain.tokens[ask.name]
    # and so will be the steps to come
    assert torch.equal(judged.left[0], plain.left[0])
    assert all(torch.equal(judged.left[1][i], plain.left[1][i]) for i in judged.left[1] | plain.left[1])


@MANY
@given(batches(2, 4, placeholders=False))
def test_logprobs_of_requests_that_are_off_are_bit_equal_to_the_plain_samplers(batch: list[Ask]) -> None:
    with patch("vllm.v1.sample.sampler.batched_count_greater_than", lambda x, values: (x >= values).sum(-1)):
        judged, plain = (run(batch, judged=judged, logprobs=2, mode="processed_logprobs") for judged in (True, False))
    for ask in batch:
        if ask.options.get("dropmatch", "off") in ("off", "strict"):
            assert judged.logprobs[ask.name] == plain.logprobs[ask.name]


@MANY
@given(batches(2, 4), st.randoms(use_true_random=False))
def test_case_10_order_and_composition_of_the_batch_change_nothing(batch: list[Ask], random: Any) -> None:
    for i, ask in enumerate(batch):  # the unseeded ones that sample depend on the batch in vLLM itself
        ask.seed = ask.seed if ask.greedy or ask.seed is not None else i
    whole = run(batch)
    others = batch[:]
    random.shuffle(others)
    some = others[: random.randint(1, len(others))]
    for part in (others, some, batch[:1]):
        again = run(part, rng=random.randint(0, 99), proposed=[a.name for a in part if a.draft_logits is not None])
        for ask in part:
            assert again.tokens[ask.name] == whole.tokens[ask.name]
            assert again.report.get(ask.name) == whole.report.get(ask.name)


def test_case_10_a_seeded_request_among_unseeded_ones_says_the_same_every_time() -> None:
    seeded = make_ask("seeded", [1, 0, 1, 1], 3, options=JS, temperature=1.0, seed=11)
    alone = run([seeded], rng=1)
    for rng in range(10):
        others = [make_ask(f"o{i}", [0, 1], i + rng, options=NAIVE, temperature=1.0) for i in range(2)]
        assert run([others[0], seeded, others[1]], rng=rng).tokens["seeded"] == alone.tokens["seeded"]


def test_a_warm_up_without_hidden_states_passes_untouched() -> None:
    batch = [make_ask(f"r{i}", [1, 1, 1], i, options={**NAIVE, **WILD}) for i in range(4)]
    judged, plain = run(batch, hidden=False), run(batch, judged=False)
    assert judged.tokens == plain.tokens
    assert judged.report == {}
    assert run(batch).tokens != plain.tokens  # with them they would be judged


def test_unasked_heads_cost_nothing_exact_drafts_call_no_head() -> None:
    head = random_head(VOCAB, UNITS, 0.45)
    batch = [make_ask(f"r{i}", [0, 0, 0], i, options={"dropmatch": rule}) for i, rule in enumerate(LOSSY)]
    outcome = run(batch, head=head)
    assert head.calls == []
    assert all(len(tokens) == 4 for tokens in outcome.tokens.values())
    assert run([replace_options(ask, {"dropmatch": "strict"}) for ask in batch], head=head).tokens == outcome.tokens
    assert head.calls == []


def test_rows_of_equal_settings_are_judged_together_whatever_their_mask_seeds() -> None:
    head = random_head(VOCAB, UNITS, 0.45)
    batch = [make_ask(f"r{i}", [2], i, options={**JS, "dropmatch_mask_seed": i}) for i in range(4)]
    check(batch, head=head)
    assert [shape for _, shape in head.calls[:1]] == [(4 * 5, UNITS)]


def test_judged_samplers_are_vllms_rejection_samplers() -> None:
    assert issubclass(JudgedSampler, RejectionSampler)
    assert head_module.PROBE_ROWS > 1
