"""`naive`: the draft token is one of the heads' tokens (equation 4)."""

from __future__ import annotations

from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_naive(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ ∈ {y⁽ⁱ⁾}, y⁽ⁱ⁾ = argmax p⁽ⁱ⁾ (equation 4; N rows), and centroid probability ≥ token_floor."""
    assert cluster is not None
    votes = (cluster.head_tokens() == evidence.draft_tokens[:, None]).sum(dim=1)  # [N]
    probability = cluster.centroid_log_prob_of(evidence.draft_tokens).exp()  # [N]
    verdict = Verdict.blank((votes > 0) & (probability >= config.floor), "naive")
    return verdict.with_numbers(votes=votes, probability=probability)


NAIVE = register(Rule(name="naive", judge=judge_naive, summary="one of the K heads chose the token (eq. 4)"))
