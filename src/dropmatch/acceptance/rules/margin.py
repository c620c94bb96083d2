"""`margin`: the token is the target's runner-up, and hardly behind (MARS).

"MARS", margin-aware speculative verification, arXiv 2601.15498, algorithm 1.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster
from dropmatch.heads.support import constrained


def judge_margin(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ is the likeliest token, or the second and z₂ / z₁ > θ for its logit and the likeliest one's (N rows).

    θ is `threshold`. The ratio has a meaning for a positive z₁ only: where it is not, exact matches remain. Ratios
    of logits change when a constant is added to all of them, so θ does not carry over from one model to another.

    This is the paper's algorithm, at any temperature. The published code (5SSjw/MARS) relaxes only when sampling: its
    greedy decoding is exact match, and its sampling takes either of the two likeliest tokens where z₂ / z₁ > θ, any
    other one never there, and elsewhere what rejection sampling takes.
    """
    assert config.threshold is not None
    clean, _, _ = constrained(evidence)  # [N, V]
    logits, ids = clean.float().topk(2, dim=1)  # [N, 2] each
    first, second = logits.unbind(dim=1)
    close = (first > 0) & (second > config.threshold * first)
    runner_up = close & (ids[:, 1] == evidence.draft_tokens)
    accept = (ids[:, 0] == evidence.draft_tokens) | runner_up
    return lossy(accept, "margin", probability_of(evidence, clean_log_probs(evidence)), config)


MARGIN = register(
    Rule(
        name="margin",
        judge=judge_margin,
        summary="it is the target's second token, with a logit above threshold times the first one's (MARS)",
        needs_heads=False,
        parameters=(Parameter("threshold", 0.9, 0.0, 1.0, "θ, the ratio of the two logits"),),
    )
)
