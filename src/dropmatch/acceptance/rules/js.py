"""`js`: the draft's distribution lies within the heads' cluster, or its token is their majority (eq. 5-7)."""

from __future__ import annotations

import torch

from dropmatch.acceptance.evidence import REJECTED, Evidence, Verdict, reason_code
from dropmatch.acceptance.registry import Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.divergence import js_divergence
from dropmatch.heads import Cluster


def judge_js(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """Algorithm 1 on N rows: JS(draft ‖ centroid) ≤ maxᵢ JS(headᵢ ‖ centroid), or ŷ is the majority token.

    Equation 6 never looks at the token itself, so with `token_floor` > 0 an acceptance also needs that
    probability in the centroid.
    """
    assert cluster is not None
    centroid = cluster.centroid_log_probs  # [N, S]
    radius = js_divergence(cluster.head_log_probs(), centroid[:, None]).amax(dim=1)  # [N], right side of eq. 6
    drafts = torch.stack([cluster.draft_log_probs(), cluster.uniform_log_probs()])  # [2, N, S]
    distance, uniform = js_divergence(drafts, centroid)  # [N] each; the former is the left side of eq. 6

    tokens = cluster.head_tokens()  # [N, K]
    votes = (tokens == evidence.draft_tokens[:, None]).sum(dim=1)  # [N]
    is_majority = cluster.majority_tokens(tokens) == evidence.draft_tokens  # [N], eq. 7
    probability = cluster.centroid_log_prob_of(evidence.draft_tokens).exp()  # [N]

    inside = distance <= radius
    accept = (inside | is_majority) & (probability >= config.floor)
    reason = torch.where(inside, reason_code("js"), reason_code("majority"))
    return Verdict.blank(accept, "js").with_numbers(
        reason=torch.where(accept, reason, REJECTED),
        distance=distance,
        radius=radius,
        votes=votes,
        probability=probability,
        uniform_passes=uniform <= radius,
    )


JS = register(
    Rule(
        name="js",
        judge=judge_js,
        summary="the draft's distribution is within the cluster of K heads, or its token their majority",
        needs_draft_distribution=True,
    )
)
