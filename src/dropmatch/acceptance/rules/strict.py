"""`strict`: a draft token is accepted where it is the clean token. Lossless."""

from __future__ import annotations

from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_strict(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ = the clean token (N rows)."""
    return Verdict.blank(evidence.draft_tokens == evidence.clean_tokens, "exact")


STRICT = register(
    Rule(
        name="strict",
        judge=judge_strict,
        summary="exact match (greedy) or modified rejection sampling: lossless",
        needs_heads=False,
        lossless=True,
    )
)
