"""`typical`: the target finds the token likely enough for how certain it is (Medusa's typical acceptance).

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads", arXiv 2401.10774,
section 2.3.1.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_entropy, clean_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_typical(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """p(ŷ) > min(ε, δ exp(-H(p))) for the clean distribution p before temperature (N rows).

    ε is `threshold`, δ is `delta`, H the entropy in nats. Medusa puts the temperature into p, and falls back to
    exact matches at temperature 0; here the rule is the same at any temperature.
    """
    assert config.threshold is not None
    assert config.delta is not None
    log_p = clean_log_probs(evidence)  # [N, V]
    entropy = clean_entropy(evidence, log_p)  # [N]
    probability = probability_of(evidence, log_p)  # [N]
    bound = (config.delta * (-entropy).exp()).clamp_max(config.threshold)
    return lossy(probability > bound, "typical", probability, config)


TYPICAL = register(
    Rule(
        name="typical",
        judge=judge_typical,
        summary="the target gives the token more than min(threshold, delta * exp(-entropy)) (Medusa)",
        needs_heads=False,
        parameters=(
            Parameter("threshold", 0.09, 0.0, 1.0, "ε, the probability that always suffices"),
            Parameter("delta", 0.3, 0.0, 1.0, "δ, how much of exp(-entropy) suffices"),
        ),
    )
)
