"""Rules of other papers and engines against their equations, in fp64 and plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acceptance.support import INF, make_evidence, make_head
from dropmatch.acceptance import Evidence, get_rule, judge, reason_name
from dropmatch.config import AcceptanceConfig
from dropmatch.decoding.verify import following
from dropmatch.errors import SettingError

PEERS = ("typical", "margin", "fuzzy", "fly", "ensemble", "topk", "threshold")
VOCAB = 40
Row = tuple[np.ndarray, np.ndarray, np.ndarray, int, int]  # target logits, p, q, draft token, followed


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def entropy(p: np.ndarray) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def js(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def margin(row: Row, threshold: float) -> bool:
    z, _, _, token, _ = row
    first, second = np.argsort(-z, kind="stable")[:2]
    return bool(token == first or (token == second and z[first] > 0 and z[second] / z[first] > threshold))


def fly(row: Row, threshold: float, window: int) -> bool:
    _, p, _, token, followed = row
    return bool(token == p.argmax() or (entropy(np.sort(p)[-3:]) >= threshold and followed >= window))


def topk(row: Row, candidates: int, delta: float) -> bool:
    _, p, _, token, _ = row
    return bool(token in np.argsort(-p, kind="stable")[:candidates] and p[token] >= p.max() - delta)


# what each rule says of a row, as its source defines it
REFERENCE: dict[str, Callable[..., bool]] = {
    "typical": lambda row, threshold, delta: row[1][row[3]] > min(threshold, delta * math.exp(-entropy(row[1]))),
    "margin": margin,
    "fuzzy": lambda row, threshold: js(row[1], row[2]) <= threshold,
    "fly": fly,
    "ensemble": lambda row, weight: int((weight * row[1] + (1 - weight) * row[2]).argmax()) == row[3],
    "topk": topk,
    "threshold": lambda row, threshold: row[1][row[3]] >= threshold,
}
NUMBERS = {
    "typical": st.fixed_dictionaries({"threshold": st.floats(0, 1), "delta": st.floats(0, 1)}),
    "margin": st.fixed_dictionaries({"threshold": st.floats(0.3, 1)}),
    "fuzzy": st.fixed_dictionaries({"threshold": st.floats(0, 0.7)}),
    "fly": st.fixed_dictionaries({"threshold": st.floats(0, 1.1), "window": st.integers(1, 5)}),
    "ensemble": st.fixed_dictionaries({"weight": st.floats(0, 1)}),
    "topk": st.fixed_dictionaries({"candidates": st.integers(1, VOCAB + 5), "delta": st.floats(0, 1)}),
    "threshold": st.fixed_dictionaries({"threshold": st.floats(0, 1)}),
}


def rows_of(evidence: Evidence) -> list[Row]:
    assert evidence.draft_logits is not None
    assert evidence.followed is not None
    found = []
    for n in range(len(evidence)):
        z, y = evidence.clean_logits[n].double().numpy().copy(), evidence.draft_logits[n].double().numpy().copy()
        if evidence.bias is not None:
            bias = evidence.bias[n].double().numpy()
            z += bias
            y[np.isneginf(bias)] = -INF
        found.append((z, softmax(z), softmax(y), int(evidence.draft_tokens[n]), int(evidence.followed[n])))
    return found


def evidence_of(seed: int, scale: float, rows: int = 12) -> Evidence:
    """Rows from flat to peaked; the logits do not tie."""
    generator = torch.Generator().manual_seed(seed)
    evidence = make_evidence(make_head(VOCAB, 8, seed), rows, seed)
    clean = torch.randn(rows, VOCAB, generator=generator) * scale + 0.3
    assert evidence.draft_logits is not None
    draft = clean + torch.randn(rows, VOCAB, generator=generator) * scale * torch.linspace(0.1, 1.0, rows)[:, None]
    tokens = torch.where(torch.arange(rows) % 2 == 0, draft.argmax(dim=1), clean.topk(2, dim=1).indices[:, 1])
    return replace(
        evidence,
        clean_logits=clean,
        draft_logits=draft,
        draft_tokens=tokens,
        clean_tokens=clean.argmax(dim=1),
        followed=torch.randint(0, 6, (rows,), generator=generator),
        remaining=torch.full((rows,), 6),
    )


@pytest.mark.parametrize("rule", PEERS)
@given(data=st.data(), seed=st.integers(0, 10**6), scale=st.sampled_from([0.5, 2.0, 4.0]), banned=st.booleans())
def test_a_rule_says_what_its_source_defines(
    rule: str, data: st.DataObject, seed: int, scale: float, banned: bool
) -> None:
    evidence = evidence_of(seed, scale)
    if banned:  # a hard constraint on some tokens, the drafted ones not among them
        bias = torch.zeros(len(evidence), VOCAB)
        bias[:, ::3] = -INF
        bias.scatter_(1, evidence.draft_tokens[:, None], 0.0)
        evidence = replace(evidence, bias=bias)
    numbers = data.draw(NUMBERS[rule])
    verdict = judge(evidence, AcceptanceConfig(rule, **numbers))
    expected = [REFERENCE[rule](row, **numbers) for row in rows_of(evidence)]
    for n, (ours, theirs) in enumerate(zip(verdict.accept.tolist(), expected, strict=True)):
        # a number within rounding of its threshold may fall on either side
        assert ours == theirs or near_the_edge(rule, rows_of(evidence)[n], numbers), (n, numbers)
    assert {reason_name(code) for code in verdict.reason[verdict.accept].tolist()} <= {rule}
    probability = torch.tensor([row[1][row[3]] for row in rows_of(evidence)], dtype=torch.float32)
    torch.testing.assert_close(verdict.probability, probability, rtol=1e-4, atol=1e-6)


def near_the_edge(rule: str, row: Row, numbers: dict[str, Any]) -> bool:
    """Whether a hair more or less of a number changes the reference's own answer."""
    answers = set()
    for name, value in numbers.items():
        for shift in (-1e-5, 0.0, 1e-5):
            changed = value if isinstance(value, int) else value + shift
            answers.add(REFERENCE[rule](row, **{**numbers, name: changed}))
    return len(answers) == 2


@pytest.mark.parametrize("rule", PEERS)
def test_a_verdict_does_not_depend_on_the_other_rows(rule: str) -> None:
    evidence, config = evidence_of(3, 2.0, rows=9), AcceptanceConfig(rule)
    together = judge(evidence, config)
    for n in range(9):
        alone = judge(evidence.rows(slice(n, n + 1)), config)
        assert torch.equal(alone.accept[0], together.accept[n])


@pytest.mark.parametrize("rule", PEERS)
def test_the_token_floor_holds_for_all(rule: str) -> None:
    evidence = evidence_of(5, 1.0, rows=30)
    free = judge(evidence, AcceptanceConfig(rule))
    held = judge(evidence, AcceptanceConfig(rule, token_floor=0.2))
    assert torch.equal(held.accept, free.accept & (free.probability >= 0.2))


@pytest.mark.parametrize("rule", [name for name in PEERS if get_rule(name).needs_draft_distribution])
def test_a_drafter_without_distribution_is_refused(rule: str) -> None:
    with pytest.raises(SettingError, match=f"'{rule}' compares distributions"):
        judge(replace(evidence_of(1, 1.0), draft_logits=None), AcceptanceConfig(rule))


def test_the_extremes_are_everything_and_exact_matches() -> None:
    evidence = evidence_of(8, 2.0, rows=40)
    exact = evidence.draft_tokens == evidence.clean_tokens

    def accepted(rule: str, **numbers: Any) -> torch.Tensor:
        return judge(evidence, AcceptanceConfig(rule, **numbers)).accept

    for everything in (accepted("threshold", threshold=0.0), accepted("fuzzy", threshold=0.7)):
        assert everything.all()
    for nothing_else in (
        accepted("margin", threshold=1.0),
        accepted("topk", candidates=1),
        accepted("topk", delta=0.0),
        accepted("ensemble", weight=1.0),
        accepted("fly", window=100),
        accepted("fly", threshold=1.1),
    ):
        assert torch.equal(nothing_else, exact)
    assert torch.equal(
        accepted("ensemble", weight=0.0),
        evidence.draft_tokens == evidence.draft_logits.argmax(dim=1),  # type: ignore[union-attr]
    )


def test_threshold_is_sglang_s_clause_without_a_coin() -> None:
    evidence = evidence_of(8, 2.0, rows=40)
    accept = judge(evidence, AcceptanceConfig("threshold", threshold=0.3)).accept
    again = judge(replace(evidence, seeds=evidence.seeds + 1), AcceptanceConfig("threshold", threshold=0.3)).accept
    assert torch.equal(accept, again)
    likely = torch.tensor([row[1][row[3]] for row in rows_of(evidence)])
    assert not bool((accept & (likely < 0.3 - 1e-5)).any())


def test_margin_has_no_meaning_for_logits_that_are_not_positive() -> None:
    evidence = evidence_of(8, 2.0, rows=40)
    below = replace(evidence, clean_logits=evidence.clean_logits - 100.0)
    accept = judge(below, AcceptanceConfig("margin", threshold=0.5)).accept
    assert torch.equal(accept, evidence.draft_tokens == evidence.clean_tokens)


@given(st.lists(st.booleans(), max_size=9))
def test_what_follows_a_token_is_counted_to_the_next_mismatch(exact: list[bool]) -> None:
    followed, remaining = following(torch.tensor(exact, dtype=torch.bool))
    for i in range(len(exact)):
        rest = exact[i + 1 :]
        assert int(remaining[i]) == len(rest)
        assert int(followed[i]) == (rest.index(False) if False in rest else len(rest))


@given(st.lists(st.booleans(), min_size=1, max_size=16), st.integers(1, 8))
def test_fly_s_window_is_that_of_vllm_and_one_match_more_than_that_of_its_own_code(
    exact: list[bool], window: int
) -> None:
    n = len(exact)
    followed, remaining = following(torch.tensor(exact))
    tokens = torch.where(torch.tensor(exact), 0, 1)
    zeros = torch.zeros(n, dtype=torch.int64)
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(n, -1)
    evidence = Evidence(torch.zeros(n, 2), logits, tokens, zeros, zeros, zeros, followed=followed, remaining=remaining)
    accept = judge(evidence, AcceptanceConfig("fly", threshold=0.0, window=window)).accept.tolist()
    mismatches = [i for i in range(n) if not exact[i]]
    # vLLM: pos + W < n, and the next W native decisions accept
    assert [i for i in mismatches if accept[i]] == [
        i for i in mismatches if i + window < n and all(exact[i + 1 : i + 1 + window])
    ]
    # AMD-AGI/FLy: the pattern (mismatch, W - 1 matches), and nothing new among the last W
    theirs = [i for i in mismatches if i < n - window and all(exact[i + 1 : i + window])]
    assert [i for i in mismatches if accept[i]] == [i for i in theirs if exact[i + window]]


def test_fly_without_the_rest_of_the_draft_is_refused() -> None:
    with pytest.raises(SettingError, match="what follows in the draft"):
        judge(replace(evidence_of(1, 1.0), followed=None, remaining=None), AcceptanceConfig("fly"))


def test_a_window_that_no_draft_can_fill_is_refused() -> None:
    rule = get_rule("fly")
    rule.check_window(6, 7)
    with pytest.raises(SettingError, match=r"window=6 needs at least 7 draft tokens.*draft_length is 5"):
        rule.check_window(6, 5)
    get_rule("naive").check_window(None, 1)


def test_published_values_are_the_defaults() -> None:
    config = AcceptanceConfig("typical")
    assert (config.threshold, config.delta, config.window) == (0.09, 0.3, None)
    assert AcceptanceConfig("margin").threshold == 0.9
    assert (AcceptanceConfig("fly").threshold, AcceptanceConfig("fly").window) == (0.3, 6)
    assert (AcceptanceConfig("topk").candidates, AcceptanceConfig("topk").delta) == (10, 0.6)
    assert AcceptanceConfig("typical", threshold=0.09) == config
    assert AcceptanceConfig("typical", threshold=0.2).changed(rule="margin") == AcceptanceConfig("margin")
    assert AcceptanceConfig("typical", threshold=0.2).changed(delta=0.1).threshold == 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "js", "threshold": 0.2}, r"threshold=0.2 has no meaning for rule 'js'.*typical"),
        ({"rule": "typical", "window": 3}, r"window=3 has no meaning for rule 'typical'.*\(fly\)"),
        ({"rule": "typical", "threshold": 1.5}, r"threshold \(ε.*a number from 0 to 1, got 1.5"),
        ({"rule": "typical", "threshold": "0.5"}, r"threshold .*got '0.5'"),
        ({"rule": "typical", "delta": math.nan}, r"delta .*got nan"),
        ({"rule": "fly", "window": 2.0}, r"window .*an integer from 1 to 127, got 2.0"),
        ({"rule": "fly", "window": 0}, r"window .*got 0"),
        ({"rule": "topk", "candidates": True}, r"candidates .*got True"),
    ],
)
def test_numbers_that_a_rule_cannot_take_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        AcceptanceConfig(**options)
