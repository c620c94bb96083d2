"""`topk`: the token is among the target's likeliest, and not far behind (TensorRT-LLM's relaxed acceptance).

`relaxed_topk` and `relaxed_delta` of TensorRT-LLM's MTP decoding, where it is used while a model thinks.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_topk(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ is among the k likeliest tokens and p(ŷ) ≥ max p - δ (N rows).

    k is `candidates`, δ is `delta`, p the clean distribution before temperature.
    """
    assert config.candidates is not None
    assert config.delta is not None
    log_p = clean_log_probs(evidence)  # [N, V]
    likeliest = log_p.topk(min(config.candidates, log_p.shape[1]), dim=1)
    among = (likeliest.indices == evidence.draft_tokens[:, None]).any(dim=1)  # [N]
    probability = probability_of(evidence, log_p)
    close = probability >= likeliest.values[:, 0].exp() - config.delta
    return lossy(among & close, "topk", probability, config)


TOPK = register(
    Rule(
        name="topk",
        judge=judge_topk,
        summary="it is one of the target's candidates, within delta of its likeliest token (TensorRT-LLM)",
        needs_heads=False,
        parameters=(
            Parameter("candidates", 10, 1, 1 << 20, "k, how many of the likeliest tokens"),
            Parameter("delta", 0.6, 0.0, 1.0, "δ, how much less probable than the likeliest"),
        ),
    )
)
