"""The denoised verdict: against a slow reference, free of seeds, and what `strictness` does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptance import reference
from acceptance.support import devices, make_evidence, random_head, to_device
from dropmatch.acceptance import Evidence, Rule, Verdict, get_rule, judge, reason_code, reason_name
from dropmatch.acceptance.denoising import _over_sets as over_sets
from dropmatch.acceptance.denoising import denoised
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import Cluster, Distributions, build
from dropmatch.heads.build import HEAD_SETS

HEAD = random_head(500, 40, 0.35)
EVIDENCE = make_evidence(HEAD, 30, noise=2.0)
DENOISED = AcceptanceConfig(verdict="denoised", gaussian_tokens=48, token_floor=0.0)


@pytest.mark.parametrize("cap", [None, 6.0])
def test_the_verdict_is_the_references(cap: float | None) -> None:
    """64 sets of K = 3 heads over a vocabulary that the support holds, each answered by the paper's equations."""
    head = random_head(30, 40, 0.35, cap=cap)
    evidence = make_evidence(head, 9, noise=2.0)
    z = np.array(
        [[[reference.normal(g, 0, k, j) for j in range(30)] for k in range(3)] for g in range(HEAD_SETS)]
    )  # [G, K, S]
    frequencies = []
    for n in range(9):
        order = evidence.clean_logits[n].argsort(descending=True, stable=True).tolist()
        rows, hidden = head.weight[order].double().numpy(), evidence.hidden[n].double().numpy()
        factor = np.linalg.cholesky(reference.covariance(hidden, rows, 0.3))
        logits = np.zeros((HEAD_SETS, 3, 30))
        logits[:, :, order] = rows @ hidden + z @ factor.T
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        draft = evidence.draft_logits[n].double().numpy()  # type: ignore[index]
        answers = [reference.answer(logits[g], draft, int(evidence.draft_tokens[n]), 0.01) for g in range(HEAD_SETS)]
        for rule in ("naive", "js"):
            config = replace(DENOISED, rule=rule, heads=3, token_floor=0.01)
            made = judge(evidence.rows(torch.tensor([n])), config, head)
            expected = sum(getattr(a, rule) for a in answers) / HEAD_SETS
            unclear = sum(not a.clear for a in answers) / HEAD_SETS if rule == "js" else 0.0
            assert abs(made.frequency.item() - expected) <= unclear + 1e-6
            frequencies.append(expected)
            assert made.probability.item() == pytest.approx(np.mean([a.probability for a in answers]), abs=2e-3)
            assert made.votes.item() == pytest.approx(np.mean([a.votes for a in answers]), abs=0.51)
            if rule == "js":
                assert made.distance.item() == pytest.approx(np.mean([a.distance for a in answers]), abs=2e-3)
                assert made.radius.item() == pytest.approx(np.mean([a.radius for a in answers]), abs=2e-3)
    assert any(0.1 < f < 0.9 for f in frequencies)


@pytest.mark.parametrize("rule", ["naive", "js"])
@pytest.mark.parametrize("mode", ["gaussian", "dropout"])
@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_seeds_and_positions_change_nothing(rule: str, mode: str, floor: float) -> None:
    config = replace(DENOISED, rule=rule, heads_mode=mode, token_floor=floor)
    base = judge(EVIDENCE, config, HEAD)
    other = judge(replace(EVIDENCE, seeds=EVIDENCE.seeds + 3, positions=EVIDENCE.positions + 5), config, HEAD)
    for name, value in vars(base).items():
        torch.testing.assert_close(getattr(other, name), value, rtol=0, atol=0, equal_nan=True, msg=name)
    assert 2 < int(base.accept.sum()) < 28
    # while the sampled one is another with another seed
    sampled = [judge(EVIDENCE, AcceptanceConfig(rule=rule, mask_seed=s), HEAD).accept for s in range(4)]
    assert any(not torch.equal(sampled[0], each) for each in sampled)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["naive", "js"])
@given(index=st.lists(st.integers(0, 29), min_size=1, max_size=40))
@settings(max_examples=10, deadline=None)
def test_batch_and_order_change_nothing(rule: str, floor: float, index: list[int]) -> None:
    config = replace(DENOISED, rule=rule, token_floor=floor)
    whole = judge(EVIDENCE, config, HEAD)
    some = judge(EVIDENCE.rows(torch.tensor(index)), config, HEAD)
    assert torch.equal(some.accept, whole.accept[index])
    assert torch.equal(some.reason, whole.reason[index])
    np.testing.assert_allclose(some.frequency, whole.frequency[index], atol=1 / HEAD_SETS)


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_chunks_change_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(DENOISED, rule=rule)
    whole = judge(EVIDENCE, config, HEAD)
    HEAD.calls.clear()
    monkeypatch.setattr(build, "CHUNK_BYTES", 1)
    by_row = judge(EVIDENCE, config, HEAD)
    assert [shape[0] for kind, shape in HEAD.calls if kind == "rows"] == [1] * 30
    assert torch.equal(by_row.accept, whole.accept)


@pytest.mark.parametrize("rule", ["naive", "js"])
@pytest.mark.parametrize("mode", ["gaussian", "dropout"])
def test_strictness_is_a_threshold_on_the_frequency(rule: str, mode: str) -> None:
    config = replace(DENOISED, rule=rule, heads_mode=mode)
    base = judge(EVIDENCE, config, HEAD)
    before = torch.ones(30, dtype=torch.bool)
    for strictness in (1 / HEAD_SETS, 0.2, 0.5, 0.8, 1.0):
        made = judge(EVIDENCE, replace(config, strictness=strictness), HEAD)
        torch.testing.assert_close(made.frequency, base.frequency)
        assert torch.equal(made.accept, base.frequency >= strictness)
        assert bool((made.accept <= before).all())
        assert bool(((made.reason != 0) == made.accept).all())
        before = made.accept


def test_the_frequency_is_that_of_sampled_verdicts_on_the_same_heads() -> None:
    """With dropout heads: set g has the masks of seed g at position 0."""
    config = replace(DENOISED, rule="js", heads_mode="dropout", token_floor=0.0)
    at_zero = replace(EVIDENCE, positions=torch.zeros_like(EVIDENCE.positions))
    sampled = AcceptanceConfig(rule="js", verdict="sampled")
    each = torch.stack([judge(at_zero, replace(sampled, mask_seed=g), HEAD).accept for g in range(HEAD_SETS)])  # [G, N]
    np.testing.assert_allclose(judge(EVIDENCE, config, HEAD).frequency, each.float().mean(dim=0), atol=1e-6)


def test_gaussian_and_dropout_heads_mostly_agree() -> None:
    for rule in ("naive", "js"):
        a, b = (
            judge(EVIDENCE, replace(DENOISED, rule=rule, heads_mode=mode), HEAD).frequency
            for mode in ("gaussian", "dropout")
        )
        assert (a - b).abs().mean().item() < 0.08
        assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.9


def test_the_reason_is_the_commonest_of_those_that_accept() -> None:
    asked: list[Evidence] = []
    js, majority = reason_code("js"), reason_code("majority")

    def scripted(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
        asked.append(evidence)
        assert cluster is not None
        assert len(evidence) == 2 * HEAD_SETS
        place = torch.arange(HEAD_SETS).repeat(2)
        code = torch.where(place < 40, js, torch.where(place < 60, majority, 0))
        code[HEAD_SETS:] = torch.where(place[HEAD_SETS:] < 10, majority, 0)
        blank = Verdict.blank(code > 0, "exact")
        return blank.with_numbers(reason=code)

    rule = Rule(name="scripted", judge=scripted, summary="")
    two = EVIDENCE.rows(slice(0, 2))
    made = denoised(rule, two, DENOISED, HEAD)
    assert made.accept.tolist() == [True, False]
    assert made.reason.tolist() == [js, 0]
    assert made.frequency.tolist() == [60 / 64, 10 / 64]
    assert bool(made.distance.isnan().all())
    # what has the size of the vocabulary is not copied for every set
    assert asked[0].clean_logits.numel() == asked[0].hidden.numel() == 0
    assert asked[0].draft_tokens.tolist() == EVIDENCE.draft_tokens[:2].repeat_interleave(HEAD_SETS).tolist()


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_the_floor_is_asked_of_the_clean_distribution_first(rule: str) -> None:
    """Heads say nothing of rows that it refuses, and no others are refused for it."""
    logits = EVIDENCE.clean_logits.double().numpy()
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs = (probs / probs.sum(axis=1, keepdims=True))[np.arange(30), EVIDENCE.draft_tokens]  # [N]
    floor = float(np.median(probs))
    made = judge(EVIDENCE, replace(DENOISED, rule=rule, token_floor=floor), HEAD)
    likely = torch.from_numpy(probs >= floor)
    assert torch.equal(made.frequency.isnan(), ~likely)
    np.testing.assert_allclose(made.probability[~likely], probs[~likely], rtol=1e-4)
    assert not bool(made.accept[~likely].any())
    assert bool(made.accept[likely].any())
    index = likely.nonzero().squeeze(1)
    alone = judge(EVIDENCE.rows(index), replace(DENOISED, rule=rule, token_floor=floor), HEAD)
    for name, value in vars(alone).items():
        torch.testing.assert_close(getattr(made, name)[index], value, equal_nan=True, msg=name)
    # a floor above all: no heads at all
    HEAD.calls.clear()
    nothing = judge(EVIDENCE, replace(DENOISED, rule=rule, token_floor=1.0), HEAD)
    assert not bool(nothing.accept.any())
    assert HEAD.calls == []


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_heads_would_hardly_ever_accept_what_the_floor_refuses_beforehand(rule: str) -> None:
    """Asked of the heads' centroids alone, the floor refuses the same rows but for the error of 64 sets."""
    many = make_evidence(HEAD, 600, noise=2.0, seed=3)
    rows = torch.arange(600)
    probability = many.clean_logits.softmax(dim=1)[rows, many.draft_tokens]
    for floor in (0.02, 0.1):
        config = replace(DENOISED, rule=rule, token_floor=floor)
        made = judge(many, config, HEAD)
        assert bool(made.frequency.isnan().any())
        alone = over_sets(
            get_rule(rule), many, Distributions.of(many), config, HEAD
        ).accept  # asked of each set's centroid only
        assert bool((made.accept <= alone).all())
        differing = int((made.accept != alone).sum())
        assert differing <= 0.03 * int(alone.sum()), differing
        assert int((probability < floor).sum()) > 50
        assert int(made.accept.sum()) > 100
        # where fewer than half of the sets are enough, the floor says nothing beforehand
        lenient = judge(many, replace(config, strictness=0.2), HEAD)
        assert not bool(lenient.frequency.isnan().any())
        assert torch.equal(lenient.accept, lenient.frequency >= 0.2)


def test_js_says_majority_where_equation_6_rarely_holds() -> None:
    verdict = judge(EVIDENCE, replace(DENOISED, rule="js", strictness=0.1), HEAD)
    names = {reason_name(int(code)) for code in verdict.reason}
    assert names <= {"js", "majority", "rejected"}
    assert "js" in names


@devices
def test_strict_and_placeholders_are_what_they_always_are(device: str) -> None:
    evidence = to_device(EVIDENCE, device)
    head = random_head(500, 40, 0.35)
    head.weight = head.weight.to(device)
    assert torch.equal(
        judge(evidence, replace(DENOISED, rule="strict"), head).accept, evidence.draft_tokens == evidence.clean_tokens
    )
    nothing = replace(evidence, draft_tokens=torch.full_like(evidence.draft_tokens, -1))
    assert not bool(judge(nothing, replace(DENOISED, strictness=1 / 64), head).accept.any())
    assert len(judge(evidence.rows(slice(0, 0)), DENOISED, head).accept) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verdict": "mean"}, "verdict must be one of: auto, sampled, denoised"),
        ({"heads_mode": "normal"}, "heads_mode must be one of: auto, dropout, gaussian"),
        ({"verdict": "denoised", "strictness": 0}, r"strictness must be a number in \(0, 1\]"),
        ({"verdict": "denoised", "strictness": 1.1}, r"strictness must be a number in \(0, 1\]"),
        ({"verdict": "sampled", "strictness": 0.7}, "strictness has a meaning for verdict='denoised' only"),
        ({"verdict": "denoised", "mask_seed": 1}, "mask_seed has no meaning for verdict='denoised'"),
        ({"gaussian_tokens": 4}, "gaussian_tokens"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        AcceptanceConfig.from_options(options)
