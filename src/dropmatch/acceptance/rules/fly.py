"""`fly`: the target is uncertain here, and agrees with all that follows (FLy).

Li et al., "Training-free loosely speculative decoding: accepting semantically correct drafts beyond exact match",
ICLR 2026, arXiv 2511.22972.
"""

from __future__ import annotations

from dropmatch.acceptance.distributions import clean_log_probs, lossy, probability_of
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Parameter, Rule, register
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster

ENTROPY_TOKENS = 3


def judge_fly(evidence: Evidence, cluster: Cluster | None, config: AcceptanceConfig) -> Verdict:
    """ŷ is an exact match, or h ≥ θ and the next W draft tokens are exact matches (N rows).

    θ is `threshold`, W is `window`, h = -Σ p log p over the target's three likeliest tokens in nats: the gate of
    the published code and of vLLM's port, where the paper divides the entropy over the vocabulary by its logarithm.
    Near the end of a draft, where fewer than W tokens follow, only exact matches are accepted, so that a rule
    with W ≥ L accepts nothing else.

    W is counted as in vLLM's port (`fly_window_size`): W matches behind ŷ. In the published code (AMD-AGI/FLy,
    `win_len`) ŷ itself is one of W, so that W - 1 matches suffice; it too accepts no mismatch among the last W tokens
    of a draft. p is the distribution before temperature and top-k/p; vLLM documents processed probabilities, which
    are others when sampling.
    """
    assert config.threshold is not None
    assert config.window is not None
    assert evidence.followed is not None
    log_p = clean_log_probs(evidence)  # [N, V]
    likeliest, ids = log_p.topk(min(ENTROPY_TOKENS, log_p.shape[1]), dim=1)  # [N, 3] each
    uncertain = -(likeliest.exp() * likeliest.clamp_min(-1e4)).sum(dim=1) >= config.threshold  # [N]
    exact = ids[:, 0] == evidence.draft_tokens
    probability = probability_of(evidence, log_p)
    return lossy(exact | (uncertain & (evidence.followed >= config.window)), "fly", probability, config)


FLY = register(
    Rule(
        name="fly",
        judge=judge_fly,
        summary="the target's entropy is at least threshold, and the next window draft tokens match exactly (FLy)",
        needs_heads=False,
        needs_block=True,
        parameters=(
            Parameter("threshold", 0.3, 0.0, 1.1, "θ, the least entropy of the three likeliest tokens in nats"),
            Parameter("window", 6, 1, 127, "W, how many exact matches must follow; below L"),
        ),
    )
)
