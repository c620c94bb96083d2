"""A verdict without randomness: the probability of acceptance over sets of heads, against a threshold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.acceptance.evidence import REJECTED, Evidence, Verdict, reason_count
from dropmatch.config import AcceptanceConfig
from dropmatch.heads import Cluster

if TYPE_CHECKING:
    from dropmatch.acceptance.registry import Rule


def denoised(
    rule: Rule, evidence: Evidence, clusters: Iterable[tuple[int, Cluster]], config: AcceptanceConfig
) -> Verdict:
    """Accept where at least `strictness` of the sets of heads accept.

    Args:
        rule: asked about each set.
        evidence: N rows.
        clusters: as `build_sets` makes them.
        config: the settings.
    """
    rows, parts = len(evidence), []
    for sets, cluster in clusters:
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
