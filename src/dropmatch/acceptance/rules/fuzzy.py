"""`fuzzy`: target and draft distribution are close, whatever the token (fuzzy speculative decoding).

Holsman et al., "Fuzzy speculative decoding for a tunable accuracy-runtime tradeoff", Findings of ACL 2025,
arXiv 2502.20704.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_log_probs, draft_distance, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_fuzzy(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """JS(draft ‖ clean) ≤ T on the distributions before temperature (N rows).

    T is `threshold`. The divergence is the Jensen-Shannon one of the paper's text, at most ln 2; what its published
    code calls by that name is another and unbounded, so its thresholds do not carry over.
    """
    assert config.threshold is not None
    log_p = clean_log_probs(evidence)  # [N, V]
    distance = draft_distance(evidence, log_p)  # [N]
    verdict = lossy(distance <= config.threshold, "fuzzy", probability_of(evidence, log_p), config)
    return verdict.with_numbers(distance=distance)


FUZZY = register(
    Rule(
        name="fuzzy",
        judge=judge_fuzzy,
        summary="JS(draft, target) is at most threshold, whatever the token (fuzzy speculative decoding)",
        needs_heads=False,
        needs_draft_distribution=True,
        parameters=(Parameter("threshold", 0.1, 0.0, 1.0, "T, the largest divergence in nats"),),
    )
)
