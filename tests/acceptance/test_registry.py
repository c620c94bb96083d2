"""Rules by name, and rules from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acceptance.support import make_evidence, make_head
from dropmatch.acceptance import (
    Evidence,
    Rule,
    Verdict,
    get_rule,
    judge,
    reason_code,
    reason_name,
    register,
    registry,
    rule_names,
)
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import DropMatchError, SettingError
from dropmatch.heads import Cluster

HEAD = make_head(60, 16)
EVIDENCE = make_evidence(HEAD, 12)


@pytest.fixture(autouse=True)
def _rules_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


def even_tokens(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    return Verdict.blank(evidence.draft_tokens % 2 == 0, "even")


def test_the_rules_that_come_with_it() -> None:
    assert rule_names() == sorted(rule_names())
    assert {"strict", "naive", "js"} <= set(rule_names())
    assert [name for name in rule_names() if get_rule(name).lossless] == ["strict"]
    assert get_rule("js").needs_draft_distribution
    assert not get_rule("naive").needs_draft_distribution
    assert not get_rule("strict").needs_heads
    assert all(get_rule(name).summary for name in rule_names())


def test_a_rule_from_outside_works_by_name() -> None:
    with pytest.raises(SettingError):
        AcceptanceConfig(rule="even")
    rule = Rule(name="even", judge=even_tokens, summary="even ids", needs_heads=False)
    assert register(rule) is rule
    assert get_rule("even") is rule
    assert "even" in rule_names()
    verdict = judge(EVIDENCE, AcceptanceConfig(rule="even"))
    expected = EVIDENCE.draft_tokens % 2 == 0
    assert torch.equal(verdict.accept, expected)
    assert {reason_name(code) for code in verdict.reason[expected].tolist()} == {"even"}
    assert {reason_name(code) for code in verdict.reason[~expected].tolist()} == {"rejected"}


def test_a_rule_from_outside_is_given_heads_and_bound_by_the_vetoes() -> None:
    seen: list[tuple[int, Any]] = []

    def all_of_them(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
        assert cluster is not None
        seen.append((len(evidence), cluster.head_logits.shape))
        assert bool((evidence.draft_tokens >= 0).all())
        return Verdict.blank(torch.ones(len(evidence), dtype=torch.bool), "all")

    register(Rule(name="all", judge=all_of_them, summary="everything"))
    tokens = EVIDENCE.draft_tokens.clone()
    tokens[3] = -1
    evidence = Evidence(**(vars(EVIDENCE) | {"draft_tokens": tokens, "allowed": torch.arange(12) != 5}))
    verdict = judge(evidence, AcceptanceConfig(rule="all", heads=7, support="full"), HEAD)
    assert verdict.accept.tolist() == [n not in (3, 5) for n in range(12)]
    assert seen == [(12, (12, 7, 60))]


@pytest.mark.parametrize("name", ["nope", "JS", "", " js", "js ", None, 3, ["js"], {"js": 1}])
def test_an_unknown_rule_is_refused_with_the_names_of_those_there_are(name: Any) -> None:
    for make in (lambda: get_rule(name), lambda: AcceptanceConfig(rule=name)):
        with pytest.raises(SettingError) as caught:
            make()
        assert repr(name) in str(caught.value)
        assert "rule" in str(caught.value)
        for known in rule_names():
            assert known in str(caught.value)
    assert issubclass(SettingError, DropMatchError)


@pytest.mark.parametrize("name", ["js", "naive", "strict"])
def test_a_name_that_is_taken_is_refused_and_the_first_one_stays(name: str) -> None:
    first = get_rule(name)
    with pytest.raises(SettingError, match=f"{name!r} is registered already"):
        register(Rule(name=name, judge=even_tokens, summary="an impostor"))
    assert get_rule(name) is first


def test_reasons_keep_their_codes() -> None:
    codes = {name: reason_code(name) for name in ("rejected", "exact", "sampled", "js", "majority", "naive")}
    assert (codes["rejected"], codes["exact"], codes["sampled"]) == (0, 1, 2)
    assert len(set(codes.values())) == len(codes)
    new = reason_code("a reason of this test")
    assert reason_code("a reason of this test") == new
    assert reason_name(new) == "a reason of this test"
    assert {name: reason_code(name) for name in codes} == codes


def test_joined_verdicts_are_one_after_the_other() -> None:
    parts = [Verdict.blank(torch.tensor(accept), "even") for accept in ([True, False], [True], [False, True])]
    parts[1] = parts[1].with_numbers(votes=torch.tensor([4]), distance=torch.tensor([0.25]))
    joined = Verdict.join(parts)
    assert joined.accept.tolist() == [True, False, True, False, True]
    assert joined.votes.tolist() == [-1, -1, 4, -1, -1]
    assert joined.distance[2].item() == 0.25
    assert int(joined.distance.isnan().sum()) == 4
