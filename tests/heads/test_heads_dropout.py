"""Dropped-out heads: the hidden state's copies, the cluster over the full vocabulary, and its shortlist."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from acceptance import reference
from acceptance.support import (
    INF,
    LinearHead,
    devices,
    make_evidence,
    make_head,
    random_head,
    reference_answers,
    to_device,
)
from dropmatch.acceptance import Evidence, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import Cluster, build_cluster
from dropmatch.heads.dropout import DRAFT_SHORTLIST, dropped_hidden

FULL = AcceptanceConfig(support="full")
SHORT = AcceptanceConfig(support="shortlist", shortlist_size=64)
VOCAB = 900  # more than SHORT's M and the draft's share together


def outside(cluster: Cluster, values: torch.Tensor) -> torch.Tensor:
    """True log-sum-exp outside the support: [N, ..., V] -> [N, ...]."""
    assert cluster.token_ids is not None
    rest = torch.ones(values.shape[0], values.shape[-1], dtype=torch.bool).scatter(1, cluster.token_ids, False)
    shape = (values.shape[0], *[1] * (values.dim() - 2), values.shape[-1])
    return torch.where(rest.view(shape), values, -INF).logsumexp(-1)


# --- the copies of the hidden state (equations 1 and 2)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_dropout_the_copies_are_the_hidden_state(dtype: torch.dtype, device: str) -> None:
    evidence = to_device(make_evidence(make_head(20, 33), 6), device)
    evidence = replace(evidence, hidden=torch.randn(6, 33, device=device).to(dtype))
    copies = dropped_hidden(evidence, AcceptanceConfig(dropout=0.0, heads=4))
    assert copies.dtype == dtype
    assert torch.equal(copies, evidence.hidden[:, None].expand(6, 4, 33))


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.6])
def test_copies_are_those_of_equation_2(dtype: torch.dtype, p: float, device: str) -> None:
    evidence = make_evidence(make_head(20, 21), 4)
    evidence = replace(evidence, hidden=evidence.hidden.to(dtype))
    copies = dropped_hidden(to_device(evidence, device), AcceptanceConfig(dropout=p, heads=3)).cpu()
    for n in range(4):
        row = evidence.hidden[n].double().numpy()
        expected = reference.dropped(row, int(evidence.seeds[n]), int(evidence.positions[n]), 3, p)
        rounded = torch.from_numpy(expected).float().to(dtype)
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}[dtype]
        np.testing.assert_allclose(copies[n].double().numpy(), rounded.double().numpy(), rtol=tolerance)
        # the same units are dropped whatever the dtype
        assert torch.equal(copies[n] == 0, rounded == 0)


def test_mean_of_many_copies_is_the_hidden_state() -> None:
    evidence = make_evidence(make_head(20, 64), 3)
    p, heads = 0.3, 1024
    copies = dropped_hidden(evidence, AcceptanceConfig(dropout=p, heads=heads))
    deviation = evidence.hidden.abs() * math.sqrt(p / (1 - p) / heads)
    assert bool(((copies.mean(dim=1) - evidence.hidden).abs() <= 5 * deviation + 1e-6).all())


@pytest.mark.parametrize("seed", [-3, 0, 2**63 - 1])
def test_mask_seed_takes_the_place_of_the_sequences_seeds(seed: int) -> None:
    evidence = make_evidence(make_head(20, 32), 5)
    own = dropped_hidden(evidence, AcceptanceConfig())
    fixed = dropped_hidden(evidence, AcceptanceConfig(mask_seed=seed))
    assert not torch.equal(own, fixed)
    same = replace(evidence, seeds=torch.full((5,), seed))
    assert torch.equal(dropped_hidden(same, AcceptanceConfig()), fixed)
    others = replace(evidence, seeds=evidence.seeds + 1)
    assert torch.equal(dropped_hidden(others, AcceptanceConfig(mask_seed=seed)), fixed)


# --- the full vocabulary (equations 3 and 5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_full_cluster_is_equations_3_and_5(cap: float | None) -> None:
    head = make_head(40, 24, cap=cap)
    evidence = make_evidence(head, 5)
    cluster = build_cluster(evidence, FULL, head)
    assert cluster.token_ids is None
    assert cluster.head_tail is None
    for n in range(5):
        copies = reference.dropped(
            evidence.hidden[n].double().numpy(), int(evidence.seeds[n]), int(evidence.positions[n]), 5, 0.3
        )
        logits = copies @ head.weight.double().numpy().T
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        np.testing.assert_allclose(cluster.head_logits[n].numpy(), logits, atol=2e-5)
        np.testing.assert_allclose(cluster.centroid_logits[n].numpy(), logits.mean(axis=0), atol=2e-5)
        np.testing.assert_allclose(
            cluster.centroid_log_probs[n].exp().numpy(), reference.softmax(logits.mean(axis=0)), atol=1e-5
        )
        assert cluster.head_tokens()[n].tolist() == [reference.argmax(row) for row in logits.tolist()]


@pytest.mark.parametrize("config", [replace(FULL, dropout=0.0), replace(SHORT, dropout=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_dropout_the_heads_are_the_clean_logits(config: AcceptanceConfig, dtype: torch.dtype) -> None:
    head = make_head(VOCAB, 32, cap=20.0)
    head.weight = head.weight.to(dtype)
    evidence = make_evidence(make_head(VOCAB, 32), 6)
    hidden = evidence.hidden.to(dtype)
    clean = head.full(hidden)
    evidence = replace(evidence, hidden=hidden, clean_logits=clean)
    cluster = build_cluster(evidence, config, head)
    assert cluster.head_logits.dtype == torch.float32
    expected = clean.float() if cluster.token_ids is None else clean.float().gather(1, cluster.token_ids)
    shown = ~cluster.centroid_logits.isneginf()
    error = (cluster.head_logits - expected[:, None]).abs().amax(dim=1)[shown].max().item()
    assert error < (1e-5 if dtype == torch.float32 else 0.13)  # one unit of the last place in bf16 near 20
    assert torch.equal(cluster.head_tokens()[:, 0], clean.float().argmax(dim=1)) or dtype == torch.bfloat16


# --- which support


@pytest.mark.parametrize(
    ("support", "can_gather", "vocab", "used"),
    [
        ("full", True, VOCAB, "full"),
        ("full", False, VOCAB, "full"),
        ("shortlist", True, VOCAB, "gather"),
        ("auto", True, VOCAB, "gather"),
        ("auto", False, VOCAB, "full"),
        ("shortlist", True, 64 + DRAFT_SHORTLIST, "full"),
        ("shortlist", True, 64 + DRAFT_SHORTLIST + 1, "gather"),
        ("auto", True, 50, "full"),
        ("shortlist", True, 20, "full"),
    ],
)
def test_support_that_is_used(support: str, can_gather: bool, vocab: int, used: str) -> None:
    head = make_head(vocab, 16, can_gather=can_gather)
    config = AcceptanceConfig(verdict="sampled", support=support, shortlist_size=64)
    judge(make_evidence(head, 3), config, head)
    assert {kind for kind, _ in head.calls} == {used}


@pytest.mark.parametrize("vocab", [50, VOCAB])
def test_shortlist_of_a_head_that_cannot_gather_is_refused(vocab: int) -> None:
    head = make_head(vocab, 16, can_gather=False)
    with pytest.raises(SettingError, match=r"support='shortlist'.*'full'.*'auto'"):
        judge(make_evidence(head, 3), AcceptanceConfig(support="shortlist"), head)
    assert head.calls == []


# --- the shortlist


def test_shortlist_is_the_likeliest_of_target_and_draft_and_the_draft_token() -> None:
    head = make_head(VOCAB, 32)
    evidence = make_evidence(head, 6)
    worst = evidence.clean_logits.argmin(dim=1)
    draft = evidence.draft_logits.scatter(1, worst[:, None], -30.0)  # type: ignore[union-attr]
    evidence = replace(evidence, draft_tokens=worst, draft_logits=draft)
    cluster = build_cluster(evidence, SHORT, head)
    full = build_cluster(evidence, FULL, head)
    assert cluster.token_ids is not None
    for n in range(6):
        ids = cluster.token_ids[n].tolist()
        wanted = set(evidence.clean_logits[n].topk(64).indices.tolist())
        wanted |= set(draft[n].topk(DRAFT_SHORTLIST).indices.tolist())
        wanted |= {int(worst[n])}
        assert ids == sorted(ids)
        assert set(ids) == wanted
        # a token that is there twice counts once, with its own logit, in all three distributions
        for values, expected in (
            (cluster.head_logits[n], full.head_logits[n]),
            (cluster.centroid_logits[n], full.centroid_logits[n]),
            (cluster.draft_logits[n], full.draft_logits[n]),  # type: ignore[index]
        ):
            finite = ~values.isneginf()
            assert bool((finite.sum(dim=-1) == len(wanted)).all())
            once = torch.where(finite, values, 0.0)
            summed = torch.zeros(*values.shape[:-1], VOCAB).index_add(-1, cluster.token_ids[n], once)
            np.testing.assert_allclose(
                summed[..., sorted(wanted)].numpy(), expected[..., sorted(wanted)].numpy(), atol=1e-4
            )
    # a token far outside the target's list is found again, with the centroid's probability
    np.testing.assert_allclose(
        cluster.centroid_log_prob_of(worst).numpy(), full.centroid_log_prob_of(worst).numpy(), atol=0.3
    )


def test_draft_tail_is_exact_and_everything_sums_to_one() -> None:
    head = random_head(VOCAB, 32, 0.2)
    evidence = make_evidence(head, 8)
    cluster = build_cluster(evidence, SHORT, head)
    full = build_cluster(evidence, FULL, head)
    np.testing.assert_allclose(
        cluster.draft_tail.numpy(),  # type: ignore[union-attr]
        outside(cluster, full.draft_logits).numpy(),  # type: ignore[arg-type]
        atol=1e-4,
    )
    for made in (cluster.head_log_probs(), cluster.centroid_log_probs, cluster.draft_log_probs()):
        np.testing.assert_allclose(made.exp().sum(-1).numpy(), 1.0, atol=1e-5)
    uniform = cluster.uniform_log_probs().exp()
    present = ~cluster.centroid_logits.isneginf()
    np.testing.assert_allclose(uniform[:, :-1][present].numpy(), 1 / VOCAB, rtol=1e-4)
    np.testing.assert_allclose(uniform[:, -1].numpy(), 1 - present.sum(1).numpy() / VOCAB, rtol=1e-4)


def test_without_dropout_the_tails_are_exact() -> None:
    head = random_head(VOCAB, 32, 0.2)
    evidence = make_evidence(head, 8)
    cluster = build_cluster(evidence, replace(SHORT, dropout=0.0), head)
    true = outside(cluster, evidence.clean_logits).numpy()
    np.testing.assert_allclose(cluster.head_tail.numpy(), np.repeat(true[:, None], 5, 1), atol=1e-3)  # type: ignore[union-attr]
    np.testing.assert_allclose(cluster.centroid_tail.numpy(), true, atol=1e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scale", "spread", "agreement"),
    [(0.02, 0.06, 0.90), (0.1, 0.25, 0.95), (0.25, 1.2, 0.98), (0.4, 2.5, 0.99)],
    ids=["flat", "blunt", "peaked", "sharp"],
)
def test_shortlist_against_the_full_vocabulary(scale: float, spread: float, agreement: float) -> None:
    """The tail follows what dropout does to it, and the verdicts agree."""
    head = random_head(4000, 192, scale)
    evidence = make_evidence(head, 100, noise=scale * 8)
    short = AcceptanceConfig(support="shortlist", shortlist_size=400)
    cluster, full = build_cluster(evidence, short, head), build_cluster(evidence, FULL, head)
    true = outside(cluster, full.head_logits)
    assert cluster.head_tail is not None
    error = cluster.head_tail - true
    unmoved = outside(cluster, evidence.clean_logits)[:, None] - true  # as if dropout did nothing to the tail
    assert error.std().item() < spread
    assert abs(error.mean().item()) < 0.2 * abs(unmoved.mean().item())
    mass = true.exp() / full.head_logits.logsumexp(2).exp()
    estimated = cluster.head_log_probs()[..., -1].exp()
    assert (estimated - mass).abs().mean().item() < 0.04

    short_verdict, full_verdict = judge(evidence, short, head), judge(evidence, FULL, head)
    assert 0.2 < full_verdict.accept.float().mean().item() < 0.95  # both answers are there to be confused
    same = short_verdict.accept == full_verdict.accept
    assert same.float().mean().item() >= agreement
    naive = [judge(evidence, replace(config, rule="naive"), head) for config in (short, FULL)]
    assert (naive[0].accept == naive[1].accept).float().mean().item() >= agreement
    # bucketing only lowers a JS: what is above the full one comes from the tail's estimate
    tail_mass = mass.amax(dim=1) + estimated.amax(dim=1)
    for a, b in ((short_verdict.distance, full_verdict.distance), (short_verdict.radius, full_verdict.radius)):
        assert bool(((a - b).abs() <= tail_mass * math.log(2) + 1e-5).all())


def test_shortlist_that_holds_all_the_mass_equals_the_reference() -> None:
    head = make_head(VOCAB, 48, scale=2.0)
    evidence = make_evidence(head, 24, noise=8.0)
    short = AcceptanceConfig(support="shortlist", shortlist_size=600)
    answers = reference_answers(evidence, short, head)
    made = judge(evidence, short, head)
    assert {kind for kind, _ in head.calls} == {"gather"}
    np.testing.assert_allclose(made.distance, [a.distance for a in answers], atol=1e-3)
    np.testing.assert_allclose(made.radius, [a.radius for a in answers], atol=1e-3)
    for n, expected in enumerate(answers):
        if expected.clear:
            assert bool(made.accept[n]) == expected.js, n
        assert int(made.votes[n]) == expected.votes
        assert bool(made.uniform_passes[n]) == (expected.uniform <= expected.radius)


# --- vocabularies of different sizes (case 6)


@pytest.mark.parametrize("config", [FULL, SHORT])
@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(VOCAB, 700), (700, VOCAB)])
def test_padding_has_no_mass_on_either_side(config: AcceptanceConfig, target_vocab: int, draft_vocab: int) -> None:
    common = min(target_vocab, draft_vocab)
    head = make_head(target_vocab, 32)
    evidence = make_evidence(head, 12, draft_vocab=draft_vocab)
    assert evidence.draft_logits is not None
    small = LinearHead(head.weight[:common])
    cut = replace(
        evidence,
        clean_logits=evidence.clean_logits[:, :common],
        draft_logits=evidence.draft_logits[:, :common],
    )
    expected = judge(cut, config, small)
    # the padded rows are uninitialised: whatever is there must not matter
    for filler in (60.0, -60.0):
        evidence.draft_logits[:, common:] = filler
        head.weight[common:] = filler * torch.sign(evidence.hidden.sum(0))
        evidence.clean_logits[:, common:] = filler
        made = judge(evidence, config, head)
        assert torch.equal(made.accept, expected.accept)
        for name in ("distance", "radius", "probability"):
            np.testing.assert_allclose(getattr(made, name), getattr(expected, name), atol=1e-5, err_msg=name)
        assert torch.equal(made.votes, expected.votes)
        assert bool((build_cluster(evidence, config, head).head_tokens() < common).all())


# --- bans and grammar masks (cases 5 and 8)


def banned_evidence(head: LinearHead, rows: int, allowed: int, seed: int = 3) -> tuple[Evidence, torch.Tensor]:
    """A bias that leaves each row a few tokens, the likeliest not among them; draft tokens are among them."""
    evidence = make_evidence(head, rows, seed)
    scores = torch.rand(rows, head.vocab_size, generator=torch.Generator().manual_seed(seed))
    scores.scatter_(1, evidence.clean_logits.topk(2, dim=1).indices, -1.0)
    keep = scores.topk(allowed, dim=1).indices
    bias = torch.full((rows, head.vocab_size), -INF).scatter(1, keep, 0.0)
    clean = (evidence.clean_logits + bias).argmax(dim=1)
    return replace(evidence, bias=bias, draft_tokens=keep[:, 0], clean_tokens=clean), bias


@pytest.mark.parametrize("allowed", [1, 3, 40, 500])
@pytest.mark.parametrize("config", [FULL, SHORT])
def test_heads_centroid_and_draft_obey_a_ban(config: AcceptanceConfig, allowed: int) -> None:
    head = make_head(VOCAB, 32)
    evidence, bias = banned_evidence(head, 8, allowed)
    cluster = build_cluster(evidence, config, head)
    assert bool((bias.gather(1, cluster.head_tokens()) == 0).all())
    ids = torch.arange(VOCAB).expand(8, -1) if cluster.token_ids is None else cluster.token_ids
    banned = bias.gather(1, ids).isneginf()  # [N, S]
    for log_probs in (cluster.centroid_log_probs, cluster.draft_log_probs(), cluster.uniform_log_probs()):
        assert bool(log_probs[:, : ids.shape[1]][banned].isneginf().all())
        np.testing.assert_allclose(log_probs.exp().sum(1).numpy(), 1.0, atol=1e-5)
    assert bool(cluster.head_log_probs()[..., : ids.shape[1]].masked_select(banned[:, None]).isneginf().all())
    if allowed <= 40:  # all that is allowed is in the support, so the tail is empty
        made = judge(evidence, config, head)
        for n, expected in enumerate(reference_answers(evidence, config, head)):
            assert made.distance[n].item() == pytest.approx(expected.distance, abs=1e-5)
            assert made.radius[n].item() == pytest.approx(expected.radius, abs=1e-5)
            assert made.probability[n].item() == pytest.approx(expected.probability, abs=1e-5)
            assert int(made.votes[n]) == expected.votes
            if expected.clear:
                assert bool(made.accept[n]) == expected.js


@pytest.mark.parametrize("allowed", [3, 40, 500])
@pytest.mark.parametrize("config", [FULL, SHORT])
def test_uniform_draft_under_a_ban_spreads_over_what_is_allowed(config: AcceptanceConfig, allowed: int) -> None:
    head = make_head(VOCAB, 32)
    evidence, bias = banned_evidence(head, 8, allowed)
    cluster = build_cluster(evidence, config, head)
    uniform = cluster.uniform_log_probs().exp()
    ids = torch.arange(VOCAB).expand(8, -1) if cluster.token_ids is None else cluster.token_ids
    shown = ~cluster.centroid_logits.isneginf()
    assert bool((bias.gather(1, ids)[shown] == 0).all())
    np.testing.assert_allclose(uniform[:, : ids.shape[1]][shown].numpy(), 1 / allowed, rtol=1e-4)


@pytest.mark.parametrize("config", [FULL, SHORT])
def test_a_bias_that_only_shifts_reaches_heads_and_centroid(config: AcceptanceConfig) -> None:
    head = make_head(VOCAB, 32)
    evidence = make_evidence(head, 8)
    bias = torch.zeros(8, VOCAB)
    bias[:, 17] = 40.0
    cluster = build_cluster(replace(evidence, bias=bias), config, head)
    assert bool((cluster.head_tokens() == 17).all())
    assert bool((cluster.centroid_log_prob_of(torch.full((8,), 17)).exp() > 0.99).all())
