"""The verifier against vLLM's own CPU kernels: no model, scripted logits, a slow reference (`verifier_support`)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from verifier_support import (
    CPU,
    HEAD,
    INF,
    UNITS,
    VOCAB,
    Ask,
    Runner,
    check,
    expected,
    make_ask,
    make_metadata,
    make_sampling,
    make_verifier,
    plugged,
    run,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor as vllm_logits
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding
from vllm.v1.sample import rejection_sampler as vllm_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from acceptance.support import random_head
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm import cpu_fixes
from dropmatch.engines.vllm import head as head_module
from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.head import VllmHead
from dropmatch.engines.vllm.install import JudgedSampler
from dropmatch.engines.vllm.verifier import Verifier
from dropmatch.errors import ModelError

LOSSY = ("naive", "js")
PEERS = {
    "typical": {"threshold": 0.02},
    "fly": {"window": 1, "threshold": 0.05},
    "ensemble": {"weight": 0.3},
    "topk": {"candidates": 3},
}
JS = {"dropmatch": "js", "dropmatch_verdict": "sampled"}
NAIVE = {"dropmatch": "naive", "dropmatch_verdict": "sampled"}
WILD = {
    "dropmatch_verdict": "sampled",
    "dropmatch_heads": 64,
    "dropmatch_dropout": 0.6,
}  # accepts nearly anything that can be
JUDGE = "dropmatch.engines.vllm.rows.judge"
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def asks(
    draw: st.DrawFn, name: str, *, sampling: bool = True, constraints: bool = True, placeholders: bool = True
) -> Ask:
    """A request with any rule and settings, and drafts of 0 to 5 tokens."""
    lowest = -1 if placeholders else 0
    ranks = draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 9, *([-1] if lowest else [])]), max_size=5))
    rule = draw(st.sampled_from([None, "off", "strict", "naive", "js", "naive", "js", *PEERS]))
    options: dict[str, Any] = {} if rule is None else {"dropmatch": rule}
    if rule in ("strict", *LOSSY):
        options["dropmatch_heads"] = draw(st.sampled_from([1, 5, 9]))
        options["dropmatch_dropout"] = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5]))
        options["dropmatch_evaluation"] = draw(st.sampled_from(["lazy", "lazy", "eager"]))
        options["dropmatch_token_floor"] = draw(st.sampled_from([0.0, 0.0, 0.1]))
        options["dropmatch_verdict"] = draw(st.sampled_from(["sampled", "sampled", "denoised"]))
        if options["dropmatch_verdict"] == "sampled" and draw(st.booleans()):
            options["dropmatch_mask_seed"] = draw(st.integers(-3, 3))
    if rule in PEERS:
        options |= {f"dropmatch_{name}": value for name, value in PEERS[rule].items()}
        options["dropmatch_evaluation"] = draw(st.sampled_from(["lazy", "lazy", "eager"]))
    changes: dict[str, Any] = {"options": options, "chunk": draw(st.sampled_from([0, 0, 4]))}
    if sampling and draw(st.booleans()) and -1 not in ranks:
        changes["temperature"] = draw(st.sampled_from([0.5, 1.0, 1.7]))
        # vLLM's top-k on a CPU fails where a whole step has no draft row
        changes["top_k"] = draw(st.sampled_from([0, 0, 2, 10])) if ranks else 0
        changes["top_p"] = draw(st.sampled_from([1.0, 1.0, 0.8]))
    changes["seed"] = draw(st.sampled_from([None, 0, 1, 2, 12345]))
    seed = draw(st.integers(0, 10_000))
    ask = make_ask(name, ranks, seed, noise=draw(st.sampled_from([0.3, 1.0, 4.0])), **changes)
    if constraints:
        some = st.lists(st.integers(0, VOCAB - 1), max_size=4)
        if draw(st.booleans()):
            ask.allowed = set(range(VOCAB)) - set(draw(some)) - set(ask.drafts[:1] if draw(st.booleans()) else [])
        if draw(st.booleans()):
            ask.bad_words = [[token] for token in draw(some)]
            ask.bad_words += [list(pair) for pair in zip(ask.drafts, ask.drafts[1:]) if -1 not in pair][:1]
        if draw(st.booleans()):
            ask.penalties = draw(st.sampled_from([(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (0.8, 0.4, 0.9)]))
            ask.output = ask.output + ask.drafts[:1] if -1 not in ask.drafts[:1] else ask.output
        if draw(st.booleans()):
            ask.min_tokens, ask.stop = 1 + draw(st.integers(0, 4)), draw(some) + ask.drafts[-1:]
            ask.stop = [token for token in ask.stop if token >= 0]
        if ask.drafts and draw(st.booleans()):  # a grammar
            ask.raw = ask.raw.clone()
            ask.raw[draw(st.integers(0, len(ask.drafts) - 1)), draw(some)] = -INF
    return ask


def batches(low: int = 1, high: int = 4, **options: Any) -> st.SearchStrategy[list[Ask]]:
    """Batches of such requests."""
    return st.integers(low, high).flatmap(lambda n: st.tuples(*[asks(f"r{i}", **options) for i in range(n)]).map(list))


# --- against the reference


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


# --- what the plugin leaves alone


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


# --- placeholders, empty drafts


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


# --- constraints


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


# --- drafts


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


# --- what is accepted, and how it is reported


def replace_options(ask: Ask, options: dict[str, Any]) -> Ask:
    return replace(ask, options=options)


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


def scripted_judge(verdicts: dict[int, bool]) -> Callable[..., Any]:
    """A rule that says what it is told about each position."""
    from dropmatch.acceptance import Verdict

    def judge(evidence: Any, config: Any, head: Any) -> Verdict:
        return Verdict.blank(torch.tensor([verdicts[int(p)] for p in evidence.positions]), "naive")

    return judge


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


def test_on_a_cpu_the_first_rows_are_judged_first_and_then_what_is_left_at_once() -> None:
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
    assert seen == [[8, 41, 71], [9, 10, 42]]
    assert [len(outcome.report[name].accepted) for name in "abc"] == [1, 2, 0]


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


# --- log-probabilities


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


# --- the CPU's expansion of values to tokens


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 7])), min_size=1, max_size=6),
       st.sampled_from([torch.float32, torch.int32, torch.int64]), st.integers(0, 2), st.integers(0, 9))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_expand_repeats_each_requests_value_for_its_tokens(
    rows: list[tuple[int, int]], dtype: torch.dtype, old: int, new: int
) -> None:
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    values = torch.tensor([value for _, value in rows], dtype=dtype)
    wanted = [new if value == old else value for count, value in rows for _ in range(count)]
    before = values.clone()
    found = cpu_fixes.expand(values, counts.cumsum(0).int(), len(wanted), replace_from=old, replace_to=new)
    assert found.dtype == dtype
    assert found.tolist() == wanted
    assert torch.equal(values, before)
    plain = cpu_fixes.expand(values, counts.cumsum(0).int(), len(wanted))
    assert plain.tolist() == [value for count, value in rows for _ in range(count)]


def test_the_probe_passes_a_good_function_and_refuses_broken_ones() -> None:
    good = cpu_fixes.expand

    def only_integers(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = good(x, *args, **kwargs)
        return found if x.dtype == torch.int32 else torch.zeros_like(found)

    def only_floats(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = good(x, *args, **kwargs)
        return found if x.dtype == torch.float32 else torch.zeros_like(found)

    def replaces_nothing(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return good(x, ends, n)

    def uninitialised(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return x.new_full((n,), 3)

    def ignores_empty(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return good(x, torch.tensor([2, 4, 5]), n, **kwargs)

    assert cpu_fixes.expands(good)
    for broken in (only_integers, only_floats, replaces_nothing, uninitialised, ignores_empty):
        assert not cpu_fixes.expands(broken), broken.__name__


def test_mending_replaces_a_broken_expansion_and_leaves_a_good_one_alone() -> None:
    def broken(x: Tensor, ends: Tensor, n: int, **kwargs: Any) -> Tensor:
        return x.new_zeros(n)

    def fine(*args: Any, **kwargs: Any) -> Tensor:
        return cpu_fixes.expand(*args, **kwargs)

    module = SimpleNamespace(expand_batch_to_tokens=broken)
    assert cpu_fixes.mend_expansion(module)
    assert module.expand_batch_to_tokens is cpu_fixes.expand
    assert not cpu_fixes.mend_expansion(module)
    module = SimpleNamespace(expand_batch_to_tokens=fine)
    assert not cpu_fixes.mend_expansion(module)
    assert module.expand_batch_to_tokens is fine


def test_vllms_own_expansion_is_found_right_or_mended() -> None:
    """Whatever this vLLM does, sampling with drafts is right afterwards."""
    with patch.object(vllm_sampler, "expand_batch_to_tokens", vllm_sampler.expand_batch_to_tokens):
        cpu_fixes.mend_expansion(vllm_sampler)
        assert cpu_fixes.expands(vllm_sampler.expand_batch_to_tokens)


# --- the LM head


class Model:
    """A model as vLLM loads it, as far as its head: `vocab` tokens."""

    def __init__(
        self, vocab: int, units: int = 16, *, bias: bool = False, uses_bias: bool = True, **finish: Any
    ) -> None:
        with set_current_vllm_config(VllmConfig()):
            self.lm_head = vllm_embedding.ParallelLMHead(vocab, units, bias=bias)
            self.logits_processor = vllm_logits.LogitsProcessor(vocab, **finish)
        weight = torch.randn(vocab, units, generator=torch.Generator().manual_seed(3))
        shard = self.lm_head.shard_indices
        mine = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        self.lm_head.weight.data.fill_(99.0)  # padding is never to be read
        self.lm_head.weight.data[: weight[mine].shape[0]] = weight[mine]
        if bias:
            values = torch.linspace(-2, 2, vocab)
            self.lm_head.bias.data.fill_(99.0)
            self.lm_head.bias.data[: values[mine].shape[0]] = values[mine]
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        self.uses_bias = uses_bias and bias

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden, self.lm_head.bias if self.uses_bias else None)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_world_size", lambda: 1)


FINISHES: list[dict[str, Any]] = [
    {},
    {"soft_cap": 5.0},
    {"scale": 0.25},
    {"soft_cap": 3.0, "scale": 2.0},
    {"bias": True},
    {"bias": True, "soft_cap": 3.0, "scale": -0.5},
]


def gather_like_full(head: VllmHead, vocab: int, units: int = 16) -> None:
    """Whether gathered logits are the columns of the full ones, for any ids, repeated or not."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(3, 4, units, generator=generator)  # [n, K, d]
    ids = torch.randint(vocab, (3, 50), generator=generator)
    ids[:, :2] = torch.tensor([0, vocab - 1])
    full = head.full(hidden.flatten(0, 1)).unflatten(0, (3, 4))  # [n, K, V]
    wanted = full.gather(2, ids[:, None].expand(-1, 4, -1))
    made = head.gather(hidden, ids)
    assert made.shape == (3, 4, 50)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    rows, bias = head.rows(ids)  # [n, S, d], [n, S]
    linear = torch.einsum("nkd,nsd->nks", hidden, rows) + (0.0 if bias is None else bias[:, None])
    torch.testing.assert_close(head.finish(linear), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_gathered_logits_are_columns_of_compute_logits(finish: dict[str, Any]) -> None:
    model = Model(100, **finish)
    head = VllmHead(model, 16, torch.float32, CPU)
    assert head.can_gather
    assert head.vocab_size == 100
    hidden = torch.randn(5, 16)
    assert torch.equal(head.full(hidden), model.compute_logits(hidden))
    gather_like_full(head, 100)


class TwoRanks:
    """Two tensor-parallel ranks, each in a thread of its own."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.barrier = threading.Barrier(2, timeout=20)
        self.slots: list[Any] = [None, None]
        self.summed: list[int] = []

    def exchange(self, value: Tensor) -> list[Tensor]:
        self.slots[self.local.rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def all_gather(self, value: Tensor) -> Tensor:
        return torch.cat(self.exchange(value), dim=-1)

    def all_reduce(self, value: Tensor) -> Tensor:
        assert value.is_contiguous()
        self.summed.append(value.numel())
        first, second = self.exchange(value)
        return first + second

    def run(self, work: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            self.local.rank = number
            try:
                work()
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors


@pytest.mark.parametrize("finish", FINISHES, ids=str)
@pytest.mark.parametrize("vocab", [100, 128, 190])
def test_gathered_logits_of_two_ranks_are_columns_of_compute_logits(
    finish: dict[str, Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TwoRanks()
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_rank", lambda: ranks.local.rank)
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(vllm_logits, "tensor_model_parallel_all_gather", ranks.all_gather)
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", ranks.all_reduce)
    made = threading.Lock()
    models: list[Model] = []

    def work() -> None:
        with made:  # vLLM's current config is global
            model = Model(vocab, **finish)
            models.append(model)
        product = model.lm_head.quant_method.apply

        def one_at_a_time(*args: Any, **kwargs: Any) -> Tensor:
            with made:  # vLLM's packed products on a CPU are not for two threads at once
                return product(*args, **kwargs)

        model.lm_head.quant_method.apply = one_at_a_time
        head = VllmHead(model, 16, torch.float32, CPU)
        assert head.can_gather
        gather_like_full(head, vocab)

    ranks.run(work)
    assert models[0].lm_head.weight.shape[0] < vocab
    # the probe, n x K x S logits of dropout heads, n x S rows and biases of Gaussian ones: never the vocabulary
    biases = {3 * 50} if finish.get("bias") else set()
    assert set(ranks.summed) == {2 * 64, 3 * 4 * 50, 3 * 50 * 16} | biases


@pytest.mark.usefixtures("one_rank")
def test_case_21_heads_that_are_no_plain_matrix_are_not_gathered_from() -> None:
    def quantised(model: Model) -> None:
        model.lm_head.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T)

    def without_weight(model: Model) -> None:
        weight = model.lm_head.weight.data
        del model.lm_head.weight
        model.lm_head.quant_method.apply = lambda layer, x, bias: x @ weight.T

    def upcast(model: Model) -> None:
        model.logits_processor.head_dtype = torch.float64

    def changed_afterwards(model: Model) -> None:
        made = model.compute_logits
        model.compute_logits = lambda hidden: made(hidden) + 1.5  # type: ignore[method-assign,assignment]

    def headless(model: Model) -> None:
        apply, head, processor = model.compute_logits, model.lm_head, model.logits_processor
        model.compute_logits = lambda hidden: processor(head, hidden, None)  # type: ignore[method-assign,assignment]
        del model.lm_head, apply

    for change in (quantised, without_weight, upcast, changed_afterwards, headless):
        model = Model(100)
        change(model)
        head = VllmHead(model, 16, torch.float32, CPU)
        assert not head.can_gather, change.__name__
        assert head.full(torch.randn(2, 16)).shape == (2, 100)
        assert head.vocab_size == 100


@pytest.mark.usefixtures("one_rank")
def test_a_head_whose_bias_the_model_ignores_is_found_by_the_probe() -> None:
    assert not VllmHead(Model(100, bias=True, uses_bias=False), 16, torch.float32, CPU).can_gather


@pytest.mark.usefixtures("one_rank")
def test_the_head_of_a_multimodal_models_language_model_is_found() -> None:
    inner = Model(100, soft_cap=4.0)
    head = VllmHead(SimpleNamespace(language_model=inner, compute_logits=inner.compute_logits), 16, torch.float32, CPU)
    assert head.can_gather
    gather_like_full(head, 100)


@pytest.mark.usefixtures("one_rank")
def test_a_head_in_bf16_passes_the_probe() -> None:
    model = Model(100, soft_cap=4.0)
    model.lm_head.weight.data = model.lm_head.weight.data.bfloat16()
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    head = VllmHead(model, 16, torch.bfloat16, CPU)
    assert head.can_gather
    assert head.gather(torch.randn(1, 2, 16).bfloat16(), torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_a_rank_without_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="compute_logits"):
        VllmHead(SimpleNamespace(compute_logits=lambda hidden: None), 16, torch.float32, CPU)


def test_the_verifier_judges_with_vllms_head_as_with_a_plain_one(one_rank: None) -> None:
    """The shortlist through `VllmHead.gather`, next to the reference's own head."""
    model = Model(400, UNITS)
    plain = random_head(400, UNITS, 1.0)
    plain.weight = model.lm_head.weight.data[:400]
    head = VllmHead(model, UNITS, torch.float32, CPU)
    batch = [
        make_ask(f"r{i}", [1, 0, 2], i, head=plain, options={**JS, "dropmatch_shortlist_size": 32}) for i in range(8)
    ]
    with patch("verifier_support.VOCAB", 400):
        outcome = run(batch, head=head)  # type: ignore[arg-type]
        answers = expected(batch, outcome, head=plain)
    assert outcome.tokens == {name: tokens for name, (tokens, _) in answers.items()}
    assert any("js" in report.accepted for report in outcome.report.values())


def test_judged_samplers_are_vllms_rejection_samplers() -> None:
    assert issubclass(JudgedSampler, RejectionSampler)
    assert head_module.PROBE_ROWS > 1
