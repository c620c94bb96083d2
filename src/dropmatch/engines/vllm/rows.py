"""Draft rows of a batch that await a verdict, and how a verdict is asked for; the same for both model runners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from vllm.logger import init_logger

from dropmatch.acceptance import Evidence, get_rule, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.heads import Head, check_heads

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


@dataclass(frozen=True)
class Row:
    """A draft token of a request with a lossy rule.

    Attributes:
        index: where it stands among the batch's rows.
        request: its request's id.
        place: where it stands in its request's draft.
        config: its request's settings, without a mask seed, so that equal ones are judged together.
        seed: seed of its dropout masks.
        followed, remaining: as in `Evidence`; known where its rule looks at them.
    """

    index: int
    request: str
    place: int
    config: AcceptanceConfig
    seed: int
    followed: int = 0
    remaining: int = 0


class Material(Protocol):
    """What a model runner knows about rows; n rows are given by their `index`, V is the target's vocabulary."""

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        ...

    def tokens(self, index: Tensor) -> Tensor:
        """Draft tokens: [n] int64."""
        ...

    def hidden(self, index: Tensor) -> Tensor:
        """Input of the LM head: [n, d]."""
        ...

    def clean(self, index: Tensor) -> Tensor:
        """Raw logits, after a grammar's mask: [n, V]."""
        ...

    def processed(self, rows: Sequence[Row], index: Tensor) -> Tensor | None:
        """Logits after the processors and before temperature and top-k/p: [n, V]; None where they are the raw ones."""
        ...

    def final(self, index: Tensor, tokens: Tensor) -> Tensor:
        """What tokens [n] have in the logits that tokens are chosen from: [n]."""
        ...

    def positions(self, index: Tensor) -> Tensor:
        """Index in its sequence of each draft token: [n] int64."""
        ...

    def draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """The draft's logits: [n, V]."""
        ...


def lossy_rows(
    requests: Sequence[str], counts: Sequence[int], settings: RequestSettings, bonus_rows: bool = False
) -> list[Row]:
    """The rows that a lossy rule has a say in.

    Args:
        requests: [B] ids.
        counts: [B] draft tokens of each.
        settings: the requests' settings.
        bonus_rows: whether each request's rows are followed by one for its bonus token.
    """
    rows: list[Row] = []
    index = 0
    for request, count in zip(requests, counts, strict=True):
        config = settings.of(request)
        if config is not None and not get_rule(config.rule).lossless:
            seed, shared = settings.seed(request), _without_seed(config)
            rows += [Row(index + place, request, place, shared, seed) for place in range(count)]
        index += count + bonus_rows
    return rows


@lru_cache(maxsize=256)
def _without_seed(config: AcceptanceConfig) -> AcceptanceConfig:
    return replace(config, mask_seed=None)


def with_following(rows: Sequence[Row], exact: dict[int, bool]) -> list[Row]:
    """The rows with what follows them in their drafts, where a rule looks at that.

    Args:
        rows: in order, those of a request all together.
        exact: for each row, by its index, whether lossless decoding accepts it.
    """
    found: list[Row] = []
    behind: Row | None = None
    for row in reversed(rows):
        if behind is not None and behind.request == row.request and get_rule(row.config.rule).needs_block:
            followed = 1 + behind.followed if exact[behind.index] else 0
            row = replace(row, followed=followed, remaining=behind.remaining + 1)
        behind = row
        found.append(row)
    return found[::-1]


def ask(rows: Sequence[Row], material: Material, head: Head) -> dict[int, int]:
    """Ask the rules about some rows: reason codes of those that they accept, by index."""
    groups: dict[AcceptanceConfig, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.config].append(row)
    accepted: dict[int, int] = {}
    for config, members in groups.items():
        told = check_heads(config, head)
        if told is not None:
            logger.warning_once("dropmatch: %s", told)
        verdict = judge(_evidence(members, material), config, head)
        answers = torch.stack([verdict.accept.long(), verdict.reason], dim=1).tolist()
        accepted.update({row.index: reason for row, (yes, reason) in zip(members, answers, strict=True) if yes})
    return accepted


def _evidence(rows: list[Row], material: Material) -> Evidence:
    """What is known about n rows, which share their settings."""
    index = torch.tensor([row.index for row in rows], device=material.device)
    clean, tokens = material.clean(index), material.tokens(index)  # [n, V], [n]
    processed, bias = material.processed(rows, index), None
    if processed is not None:
        processed = processed.float()
        bias = torch.where(processed.isneginf(), -torch.inf, processed - clean.float())
    return Evidence(
        hidden=material.hidden(index),
        clean_logits=clean,
        draft_tokens=tokens,
        clean_tokens=torch.full_like(tokens, -1),  # lossy rules look at the draft's tokens only
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64, device=clean.device),
        positions=material.positions(index),
        draft_logits=material.draft_logits(rows) if get_rule(rows[0].config.rule).needs_draft_distribution else None,
        bias=bias,
        allowed=material.final(index, tokens) > -torch.inf,
        followed=torch.tensor([row.followed for row in rows], device=clean.device),
        remaining=torch.tensor([row.remaining for row in rows], device=clean.device),
    )
