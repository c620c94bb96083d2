"""Gaussian heads: their covariance, what they are keyed by, their support, and how near dropout heads they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from acceptance import reference
from acceptance.support import INF, LinearHead, devices, make_evidence, make_head, random_head, to_device
from dropmatch.acceptance import judge
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import Cluster, build_cluster, check_heads
from dropmatch.heads.dropout import dropped_hidden
from dropmatch.heads.gaussian import DRAFT_TOKENS, logit_covariance
from dropmatch.heads.vocabulary import Vocabulary
from dropmatch.masks import Stream, normals

GAUSSIAN = AcceptanceConfig(verdict="sampled", heads_mode="gaussian", gaussian_tokens=32)
VOCAB = 900


def drawn(cluster: Cluster, clean: torch.Tensor) -> torch.Tensor:
    """What heads add to the clean logits, 0 where an id stands for the second time: [N, K, S]."""
    assert cluster.token_ids is not None
    moved = cluster.head_logits - clean.float().gather(1, cluster.token_ids)[:, None]
    return torch.where(cluster.head_logits.isneginf(), 0.0, moved)


# --- the numbers


def test_normals_are_the_references() -> None:
    made = normals(Stream.GAUSSIAN, torch.tensor([-3, 2**62]), torch.tensor([0, 4095]), 3, 7)
    assert made.dtype == torch.float32
    for n, (seed, position) in enumerate([(-3, 0), (2**62, 4095)]):
        for head in range(3):
            expected = [reference.normal(seed, position, head, unit) for unit in range(7)]
            np.testing.assert_allclose(made[n, head].numpy(), expected, atol=1e-5)


def test_normals_are_nested_and_normal() -> None:
    seeds, positions = torch.arange(40), torch.arange(40) * 3
    many = normals(Stream.GAUSSIAN, seeds, positions, 8, 60)
    assert torch.equal(normals(Stream.GAUSSIAN, seeds, positions, 3, 31), many[:, :3, :31])
    assert stats.kstest(many.flatten().numpy(), "norm").pvalue > 1e-3
    flat = many.flatten(0, 1).double()  # 320 x 60
    correlation = torch.corrcoef(flat.T) - torch.eye(60)
    assert correlation.abs().max().item() < 5 / math.sqrt(320)


# --- the covariance


@pytest.mark.parametrize("p", [0.05, 0.3, 0.7])
def test_covariance_is_its_definition(p: float) -> None:
    head = random_head(30, 50, 1.0)
    hidden = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.stack([torch.randperm(30)[:9] for _ in range(3)])
    made = logit_covariance(hidden, head.weight[ids], p)
    for n in range(3):
        expected = reference.covariance(hidden[n].double().numpy(), head.weight[ids[n]].double().numpy(), p)
        np.testing.assert_allclose(made[n].numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_covariance_is_that_of_dropout_heads(p: float) -> None:
    """1,024 dropout heads of the core: each entry within five standard errors of a Gaussian's."""
    head = random_head(12, 256, 0.3)
    evidence = make_evidence(head, 3)
    ids = torch.arange(12).expand(3, -1)
    wanted = logit_covariance(evidence.hidden, head.weight[ids], p)
    copies = dropped_hidden(evidence, AcceptanceConfig(dropout=p, heads=1024))
    logits = copies @ head.weight.T  # [3, 1024, 12]
    for n in range(3):
        made = torch.cov(logits[n].T)
        variance = wanted[n].diagonal()
        error = ((variance[:, None] * variance[None] + wanted[n] ** 2) / 1023).sqrt()
        assert bool(((made - wanted[n]).abs() < 5 * error).all())
        np.testing.assert_allclose(
            logits[n].mean(dim=0).numpy(), evidence.clean_logits[n].numpy(), atol=5 * variance.max().sqrt() / 32
        )


@devices
def test_heads_have_that_covariance_and_the_clean_logits_as_their_mean(device: str) -> None:
    head = random_head(VOCAB, 64, 0.3)
    head.weight = head.weight.to(device)
    evidence = to_device(make_evidence(random_head(VOCAB, 64, 0.3), 4), device)
    cluster = build_cluster(evidence, replace(GAUSSIAN, heads=1024), head)
    assert cluster.token_ids is not None
    wanted = logit_covariance(evidence.hidden, head.weight[cluster.token_ids], 0.3)
    moved = drawn(cluster, evidence.clean_logits)
    for n in range(4):
        once = ~cluster.centroid_logits[n].isneginf()
        made, target = torch.cov(moved[n].T)[once][:, once], wanted[n][once][:, once]
        variance = target.diagonal()
        error = ((variance[:, None] * variance[None] + target**2) / 1023).sqrt()
        assert bool(((made - target).abs() < 5 * error).all())
        assert bool((moved[n].mean(dim=0)[once].abs() < 5 * (variance / 1024).sqrt()).all())


def test_heads_are_the_references_from_fixed_normals() -> None:
    """Every number once more in fp64: the factor by numpy, normals in slots from the likeliest token on."""
    head = random_head(VOCAB, 48, 0.4, cap=5.0)
    evidence = make_evidence(head, 3)
    cluster = build_cluster(evidence, GAUSSIAN, head)
    assert cluster.token_ids is not None
    for n in range(3):
        ids = evidence.clean_logits[n].topk(32).indices.tolist()
        assert cluster.token_ids[n, :32].tolist() == ids
        rows, hidden = head.weight[ids].double().numpy(), evidence.hidden[n].double().numpy()
        factor = np.linalg.cholesky(reference.covariance(hidden, rows, 0.3))
        raw = rows @ hidden
        for i in range(5):
            z = [reference.normal(int(evidence.seeds[n]), int(evidence.positions[n]), i, j) for j in range(32)]
            expected = 5.0 * np.tanh((raw + factor @ np.array(z)) / 5.0)
            np.testing.assert_allclose(cluster.head_logits[n, i, :32].numpy(), expected, atol=5e-3)


# --- without dropout, and towards it


@pytest.mark.parametrize("verdict", ["sampled", "denoised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_dropout_the_heads_are_the_clean_logits_to_the_last_bit(dtype: torch.dtype, verdict: str) -> None:
    head = make_head(VOCAB, 32, cap=20.0)
    head.weight = head.weight.to(dtype)
    evidence = make_evidence(make_head(VOCAB, 32), 6)
    hidden = evidence.hidden.to(dtype)
    evidence = replace(evidence, hidden=hidden, clean_logits=head.full(hidden))
    cluster = build_cluster(evidence, replace(GAUSSIAN, dropout=0.0), head)
    assert torch.equal(drawn(cluster, evidence.clean_logits), torch.zeros_like(cluster.head_logits))
    clean = evidence.clean_logits.float().argmax(dim=1)
    for rule in ("naive", "js"):
        config = replace(GAUSSIAN, rule=rule, dropout=0.0, verdict=verdict)
        noisy = replace(evidence, draft_logits=evidence.draft_logits + 1e-3)  # type: ignore[operator]
        assert torch.equal(judge(noisy, config, head).accept, evidence.draft_tokens == clean)


def test_noise_shrinks_as_the_root_of_p_over_1_minus_p() -> None:
    head = random_head(VOCAB, 64, 0.3)
    evidence = make_evidence(head, 4)
    moved = {
        p: drawn(build_cluster(evidence, replace(GAUSSIAN, dropout=p), head), evidence.clean_logits)
        for p in (0.3, 1e-2, 1e-6)
    }
    for p in (1e-2, 1e-6):
        scale = math.sqrt(p / (1 - p) / (0.3 / 0.7))
        np.testing.assert_allclose(moved[p].numpy(), (moved[0.3] * scale).numpy(), atol=2e-3 * scale + 2e-6)


def test_a_hidden_state_of_zeros_and_equal_rows_are_no_trouble() -> None:
    head = random_head(VOCAB, 16, 0.3)
    head.weight[1::2] = head.weight[::2]  # every row twice: the covariance is singular
    evidence = make_evidence(head, 4)
    evidence.hidden[0] = 0.0
    evidence = replace(evidence, clean_logits=evidence.hidden @ head.weight.T)
    cluster = build_cluster(evidence, GAUSSIAN, head)
    assert bool(cluster.head_log_probs().exp().sum(2).isfinite().all())
    moved = drawn(cluster, evidence.clean_logits)
    assert moved[0].abs().max().item() < 1e-12
    assert moved[1:].abs().max().item() > 0.1


# --- keys and support


def test_heads_are_keyed_by_seed_and_position_and_nested() -> None:
    head = random_head(VOCAB, 64, 0.3)
    evidence = make_evidence(head, 6)
    base = build_cluster(evidence, GAUSSIAN, head)
    more = build_cluster(evidence, replace(GAUSSIAN, heads=9), head)
    assert torch.equal(more.head_logits[:, :5], base.head_logits)
    order = torch.tensor([4, 0, 4])
    again = build_cluster(evidence.rows(order), GAUSSIAN, head)
    torch.testing.assert_close(again.head_logits, base.head_logits[order])
    for change in ({"seeds": evidence.seeds + 1}, {"positions": evidence.positions + 1}):
        assert not torch.allclose(
            build_cluster(replace(evidence, **change), GAUSSIAN, head).head_logits, base.head_logits
        )
    fixed = replace(GAUSSIAN, mask_seed=4)
    others = replace(evidence, seeds=evidence.seeds * 5)
    assert torch.equal(build_cluster(others, fixed, head).head_logits, build_cluster(evidence, fixed, head).head_logits)
    wide = build_cluster(evidence, replace(GAUSSIAN, gaussian_tokens=100), head)
    torch.testing.assert_close(wide.head_logits[..., :32], base.head_logits[..., :32], atol=1e-3, rtol=1e-3)


def test_support_is_the_likeliest_first_then_the_drafts_each_once() -> None:
    head = make_head(VOCAB, 32)  # logits tie often
    evidence = make_evidence(head, 6)
    worst = evidence.clean_logits.argmin(dim=1)
    evidence = replace(evidence, draft_tokens=worst)
    cluster = build_cluster(evidence, GAUSSIAN, head)
    assert cluster.token_ids is not None
    assert cluster.token_ids.shape[1] == 32 + 1 + DRAFT_TOKENS
    for n in range(6):
        ids, clean = cluster.token_ids[n].tolist(), evidence.clean_logits[n].tolist()
        assert ids[:32] == sorted(ids[:32], key=lambda i: (-clean[i], i))
        assert min(clean[i] for i in ids[:32]) >= sorted(clean)[-32]
        assert ids[32] == worst[n]
        draft = evidence.draft_logits[n]  # type: ignore[index]
        assert set(draft.topk(DRAFT_TOKENS).indices.tolist()) <= set(ids)
        shown = [i for i, gone in zip(ids, cluster.centroid_logits[n].isneginf().tolist(), strict=True) if not gone]
        assert sorted(shown) == sorted(set(ids))
    for made in (cluster.head_log_probs(), cluster.centroid_log_probs, cluster.draft_log_probs()):
        np.testing.assert_allclose(made.exp().sum(-1).numpy(), 1.0, atol=1e-5)
    np.testing.assert_allclose(cluster.uniform_log_probs().exp().sum(1).numpy(), 1.0, atol=1e-5)


@pytest.mark.parametrize("vocab", [64, 1000, 20000, 20032])
@pytest.mark.parametrize("count", [1, 16, 64])
def test_the_likeliest_tokens_are_found(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab + count)
    for logits in (
        torch.randn(5, vocab, generator=generator),
        (torch.randn(5, vocab, generator=generator) * 2).round(),  # ties everywhere
        torch.arange(vocab).float().expand(2, -1),  # the likeliest stand together, at the end
        torch.full((2, vocab), -INF).index_fill(1, torch.tensor([3, vocab - 1]), 1.0),
    ):
        values, ids = Vocabulary(logits).likeliest(count)
        assert torch.equal(values, logits.topk(count, dim=1).values)
        assert torch.equal(logits.gather(1, ids), values)
        assert all(len(set(row)) == count for row in ids.tolist())
        for row, value in zip(ids.tolist(), values.tolist(), strict=True):
            assert list(zip(value, row, strict=True)) == sorted(
                zip(value, row, strict=True), key=lambda x: (-x[0], x[1])
            )


def test_tokens_are_looked_up_where_they_first_stand() -> None:
    head = random_head(VOCAB, 32, 0.5)
    evidence = make_evidence(head, 5)
    cluster = build_cluster(evidence, replace(GAUSSIAN, dropout=0.0), head)
    clean = evidence.clean_logits.log_softmax(dim=1)
    for tokens in (evidence.draft_tokens, evidence.clean_tokens, evidence.clean_logits.topk(32).indices[:, 31]):
        np.testing.assert_allclose(
            cluster.centroid_log_prob_of(tokens).numpy(), clean.gather(1, tokens[:, None]).squeeze(1).numpy(), atol=1e-4
        )


@pytest.mark.parametrize("vocab", [8, 20, 40])
def test_a_vocabulary_smaller_than_the_support(vocab: int) -> None:
    head = random_head(vocab, 32, 0.5)
    evidence = make_evidence(head, 5)
    cluster = build_cluster(evidence, GAUSSIAN, head)
    assert cluster.centroid_tail is not None
    if vocab <= 32:
        assert bool(cluster.centroid_tail.isneginf().all())
    np.testing.assert_allclose(cluster.head_log_probs().exp().sum(-1).numpy(), 1.0, atol=1e-5)


@pytest.mark.parametrize("allowed", [1, 3, 40])
def test_what_is_banned_has_no_mass(allowed: int) -> None:
    head = random_head(VOCAB, 32, 0.5)
    evidence = make_evidence(head, 6)
    generator = torch.Generator().manual_seed(allowed)
    keep = torch.stack([torch.randperm(VOCAB, generator=generator)[:allowed] for _ in range(6)])
    bias = torch.full((6, VOCAB), -INF).scatter(1, keep, 0.0)
    evidence = replace(evidence, bias=bias, draft_tokens=keep[:, 0])
    cluster = build_cluster(evidence, GAUSSIAN, head)
    assert cluster.token_ids is not None
    assert bool((bias.gather(1, cluster.head_tokens()) == 0).all())
    banned = bias.gather(1, cluster.token_ids).isneginf()
    for log_probs in (cluster.centroid_log_probs, cluster.draft_log_probs(), cluster.uniform_log_probs()):
        assert bool(log_probs[:, :-1][banned].isneginf().all())
        np.testing.assert_allclose(log_probs.exp().sum(1).numpy(), 1.0, atol=1e-5)
    for verdict in ("sampled", "denoised"):
        config = replace(GAUSSIAN, verdict=verdict)
        made = judge(evidence, config, head)
        assert bool(made.accept.all()) if allowed == 1 else not bool(made.accept.all())
        refused = judge(replace(evidence, draft_tokens=bias.argmin(dim=1)), config, head)
        assert not bool(refused.accept.any())


# --- against dropout heads


@pytest.mark.parametrize("rule", ["naive", "js"])
@pytest.mark.parametrize("units", [256, 2048])
def test_acceptance_is_that_of_dropout_heads(rule: str, units: int) -> None:
    """Mean acceptance over random heads and rows, over several seeds; benchmarks/gaussian_heads.py does real ones."""
    head = random_head(2000, units, 1.6 / math.sqrt(units))
    evidence = make_evidence(head, 150, noise=1.2)
    evidence = replace(evidence, draft_tokens=evidence.clean_logits.topk(2, dim=1).indices[:, 1])
    rates = {}
    for mode in ("dropout", "gaussian"):
        # a random head is flat, so that a support of 64 would lack most of the mass: that is not asked here
        config = AcceptanceConfig(
            rule, verdict="sampled", heads_mode=mode, shortlist_size=1024, gaussian_tokens=512, dropout=0.1
        )
        accepted = [judge(evidence, replace(config, mask_seed=s), head).accept for s in range(10)]
        rates[mode] = torch.stack(accepted).float().mean(dim=0)  # [150]
    assert 0.2 < rates["dropout"].mean().item() < 0.9
    assert abs(rates["dropout"].mean().item() - rates["gaussian"].mean().item()) < 0.035
    assert float(torch.corrcoef(torch.stack(list(rates.values())))[0, 1]) > 0.6


# --- heads without rows


@pytest.mark.parametrize("verdict", ["sampled", "denoised"])
def test_case_21_a_head_without_rows_gets_dropout_heads_and_says_so(verdict: str) -> None:
    head = make_head(60, 16, can_gather=False)
    evidence = make_evidence(head, 3)
    config = AcceptanceConfig(heads_mode="gaussian", verdict=verdict)
    told = check_heads(config, head)
    assert told is not None
    assert "dropout heads over the full vocabulary" in told
    assert ("64 x K" in told) == (verdict == "denoised")
    made = judge(evidence, config, head)
    assert {kind for kind, _ in head.calls} == {"full"}
    expected = judge(evidence, replace(config, heads_mode="dropout"), head)
    assert torch.equal(made.accept, expected.accept)
    assert check_heads(config, make_head(60, 16)) is None
    assert check_heads(AcceptanceConfig(verdict="sampled"), head) is None


def test_by_default_a_head_without_rows_gets_the_papers_sampled_heads() -> None:
    """Hundreds of heads over the full vocabulary would cost more than is won."""
    head = make_head(60, 16, can_gather=False)
    evidence = make_evidence(head, 3)
    assert check_heads(AcceptanceConfig(), head) is None
    made = judge(evidence, AcceptanceConfig(), head)
    assert made.frequency.isnan().all()
    expected = judge(evidence, AcceptanceConfig(verdict="sampled"), head)
    assert torch.equal(made.accept, expected.accept)
    assert torch.equal(made.distance, expected.distance)
    assert not judge(evidence, AcceptanceConfig(), make_head(60, 16)).frequency.isnan().any()


def test_full_support_is_refused_for_gaussian_heads() -> None:
    for more in ({"heads_mode": "gaussian"}, {"verdict": "denoised"}):
        for support in ("full", "shortlist"):
            with pytest.raises(SettingError, match=rf"support='{support}'.*heads_mode='dropout'"):
                AcceptanceConfig(support=support, **more)
    assert AcceptanceConfig(support="full", verdict="denoised", heads_mode="dropout").wants_gaussian is False


def test_a_bias_of_the_head_is_in_front_of_the_soft_cap() -> None:
    """Where the cap saturates depends on it."""

    class Biased(LinearHead):
        bias = torch.linspace(-6, 6, VOCAB)

        def full(self, hidden: torch.Tensor) -> torch.Tensor:
            return self._finish(hidden @ self.weight.T + self.bias)

        def rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return self.weight[token_ids], self.bias[token_ids]

    head = Biased(random_head(VOCAB, 32, 0.3).weight, cap=4.0)
    evidence = make_evidence(head, 4)
    evidence = replace(evidence, clean_logits=head.full(evidence.hidden))
    cluster = build_cluster(evidence, replace(GAUSSIAN, heads=64), head)
    finite = cluster.head_logits[~cluster.head_logits.isneginf()]
    assert finite.max().item() <= 4.0 + 1e-4
    assert finite.min().item() >= -4.0 - 1e-4
