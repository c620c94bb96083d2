"""A verdict without randomness: the probability of acceptance over sets of heads, against a threshold."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.acceptance.evidence import REJECTED, Evidence, Verdict, reason_count
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Distributions, Head, build_sets

if TYPE_CHECKING:
    from dropmatch.acceptance.registry import Rule


def denoised(rule: Rule, evidence: Evidence, config: AcceptanceConfig, head: Head) -> Verdict:
    """Accept where the probability of acceptance over heads is at least `strictness`.

    A floor is asked of the clean distribution first, and heads are made only if it leaves a row: log p̄(ŷ) is a concave
    function of the heads' logits, whose mean are the clean ones. So where p(ŷ) is below the floor, the logits with
    p̄(ŷ) at or above it are a convex set without the mean, and a Gaussian has at most half of its mass there.

    Args:
        rule: asked about each set of heads.
        evidence: N rows.
        config: the settings.
        head: the target's LM head.
    """
    distributions = Distributions.of(evidence)
    floor = config.clean_floor(head.can_gather)
    if floor == 0:
        return _over_sets(rule, evidence, distributions, config, head)
    probability = distributions.clean.probability(evidence.draft_tokens)  # [N]
    likely = probability >= floor  # [N]
    refused = Verdict.blank(torch.zeros_like(likely), "exact").with_numbers(probability=probability)
    if likely.device.type == "cpu":  # on a GPU, to learn this would mean waiting for it
        if not likely.any():
            return refused
        if likely.all():
            return _over_sets(rule, evidence, distributions, config, head)
    return refused.where(likely, _over_sets(rule, evidence, distributions, config, head))


def _over_sets(
    rule: Rule, evidence: Evidence, distributions: Distributions, config: AcceptanceConfig, head: Head
) -> Verdict:
    """Accept where at least `strictness` of the sets of heads accept: N rows."""
    rows, parts = len(evidence), []
    for sets, cluster in build_sets(evidence, distributions, config, head):
        verdict = rule.judge(evidence.repeated(sets), cluster, config)  # N * sets rows
        parts.append({f.name: getattr(verdict, f.name).view(rows, sets) for f in fields(Verdict)})
    each = parts[0]  # [N, G]
    if len(parts) > 1:
        each = {name: torch.cat([part[name] for part in parts], dim=1) for name in each}

    frequency = each["accept"].float().mean(dim=1)
    accept = frequency >= config.strictness
    return Verdict(
        accept=accept,
        reason=torch.where(accept, _commonest(each["reason"]), REJECTED),
        distance=each["distance"].mean(dim=1),
        radius=each["radius"].mean(dim=1),
        votes=each["votes"].float().mean(dim=1).round().long(),
        probability=each["probability"].mean(dim=1),
        uniform_passes=each["uniform_passes"].float().mean(dim=1) >= 0.5,
        frequency=frequency,
    )


def _commonest(codes: Tensor) -> Tensor:
    """The commonest reason of each row but for rejection, the lowest code on a tie: [N, G] -> [N]."""
    counts = torch.zeros(codes.shape[0], reason_count(), dtype=torch.int64, device=codes.device)
    counts.scatter_add_(1, codes, torch.ones_like(codes))
    counts[:, REJECTED] = 0
    return counts.argmax(dim=1)
