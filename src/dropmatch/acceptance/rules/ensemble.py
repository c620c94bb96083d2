"""`ensemble`: the token is the likeliest of a mixture of target and draft (a static ensemble).

`assistant_ensemble_weight` of transformers, the baseline of arXiv 2604.07622.
"""

from __future__ import annotations

import math

import torch

from dropmatch.acceptance.distributions import clean_log_probs, draft_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster


def judge_ensemble(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ = argmax v, v = w p + (1 - w) q (N rows).

    w is `weight`, p the clean and q the draft distribution before temperature. The rule of greedy decoding in
    transformers, but for the token at a rejection: there the likeliest of v, here the clean token. When sampling,
    transformers accepts at random with probability 1 - w + w p(ŷ) / q(ŷ); this rule stays the same.
    """
    assert config.weight is not None
    log_p = clean_log_probs(evidence)  # [N, V]
    # in logarithms: an argmax among tiny probabilities would be a coin toss
    shares = torch.stack([log_p + _log(config.weight), draft_log_probs(evidence) + _log(1.0 - config.weight)])
    likeliest = shares.logsumexp(dim=0).argmax(dim=1)  # [N]
    return lossy(likeliest == evidence.draft_tokens, "ensemble", probability_of(evidence, log_p), config)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0.0 else -1e30


ENSEMBLE = register(
    Rule(
        name="ensemble",
        judge=judge_ensemble,
        summary="it is the likeliest token of weight * target + (1 - weight) * draft (transformers' ensemble weight)",
        needs_heads=False,
        needs_draft_distribution=True,
        parameters=(Parameter("weight", 0.7, 0.0, 1.0, "w, the target's share of the mixture"),),
    )
)
