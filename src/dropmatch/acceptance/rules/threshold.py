"""`threshold`: the target gives the token at least so much (SGLang's acceptance threshold).

`speculative_accept_threshold_single` of SGLang, which uses it when sampling only.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_threshold(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """p(ŷ) ≥ τ for the clean distribution p before temperature (N rows); τ is `threshold`.

    One of SGLang's two clauses, that of `threshold_single`. The other one is not here: `coin <= prob_acc /
    threshold_acc`, for a uniform coin and the probability of ŷ and of the siblings that were refused before it. At
    `threshold_acc` = 1, SGLang's default, it is lossless sampling, which comes before this rule here too; below 1 it
    accepts more. SGLang's p is that after temperature, top-k and top-p.
    """
    assert config.threshold is not None
    probability = probability_of(evidence, clean_log_probs(evidence))  # [N]
    return lossy(probability >= config.threshold, "threshold", probability, config)


THRESHOLD = register(
    Rule(
        name="threshold",
        judge=judge_threshold,
        summary="the target gives the token at least threshold (SGLang)",
        needs_heads=False,
        parameters=(Parameter("threshold", 0.3, 0.0, 1.0, "τ, the least probability"),),
    )
)
