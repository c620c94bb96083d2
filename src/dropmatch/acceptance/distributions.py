"""What rules without heads compare: the clean and the draft distribution, before temperature and top-k/p.

N rows, V tokens in the vocabulary that target and draft share.
"""

from __future__ import annotations

from torch import Tensor

from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.config import AcceptanceConfig
from dropmatch.divergence import js_divergence
from dropmatch.heads.support import constrained


def clean_log_probs(evidence: Evidence) -> Tensor:
    """log p of the target without dropout, after hard constraints: [N, V] fp32."""
    clean, _, _ = constrained(evidence)
    return clean.float().log_softmax(dim=1)


def draft_log_probs(evidence: Evidence) -> Tensor:
    """log q of the drafter, after hard constraints: [N, V] fp32."""
    _, draft, _ = constrained(evidence)
    assert draft is not None
    return draft.float().log_softmax(dim=1)


def clean_entropy(evidence: Evidence, log_p: Tensor) -> Tensor:
    """Entropy in nats of the clean distribution log p [N, V], or what the evidence knows of it: [N] fp32."""
    if evidence.clean_entropy is not None:
        return evidence.clean_entropy
    return -(log_p.exp() * log_p.clamp_min(-1e4)).sum(dim=1)


def draft_distance(evidence: Evidence, log_p: Tensor) -> Tensor:
    """JS(draft ‖ clean) with the clean distribution log p [N, V], or what the evidence knows of it: [N] fp32."""
    if evidence.draft_distance is not None:
        return evidence.draft_distance
    return js_divergence(draft_log_probs(evidence), log_p)


def probability_of(evidence: Evidence, log_probs: Tensor) -> Tensor:
    """What log-probabilities [N, V] give the draft tokens: [N] fp32."""
    return log_probs.gather(1, evidence.draft_tokens[:, None]).squeeze(1).exp()


def lossy(accept: Tensor, reason: str, probability: Tensor, config: AcceptanceConfig) -> Verdict:
    """A verdict with one reason: accept [N] bool, where the probability [N] is at least `token_floor`."""
    return Verdict.blank(accept & (probability >= config.floor), reason).with_numbers(probability=probability)
