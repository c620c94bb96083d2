"""Heads, evidence and clusters for the tests of the acceptance core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acceptance import reference
from dropmatch.acceptance import Evidence
from dropmatch.config import AcceptanceConfig

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
INF = float("inf")


class LinearHead:
    """A linear LM head, soft-capped if asked; it remembers the shapes that it was called with."""

    def __init__(self, weight: Tensor, *, can_gather: bool = True, cap: float | None = None) -> None:
        self.weight = weight  # [V, d]
        self.vocab_size = weight.shape[0]
        self.can_gather = can_gather
        self.cap = cap
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def full(self, hidden: Tensor) -> Tensor:
        self.calls.append(("full", tuple(hidden.shape)))
        return self._finish(hidden @ self.weight.T)

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        assert self.can_gather, "gather was called on a head that cannot"
        assert int(token_ids.min()) >= 0
        assert int(token_ids.max()) < self.vocab_size
        self.calls.append(("gather", (*hidden.shape, token_ids.shape[1])))
        return self._finish(torch.einsum("nkd,nsd->nks", hidden, self.weight[token_ids]))

    def rows(self, token_ids: Tensor) -> tuple[Tensor, None]:
        assert self.can_gather, "rows were asked of a head that has none to give"
        self.calls.append(("rows", tuple(token_ids.shape)))
        return self.weight[token_ids], None

    def finish(self, logits: Tensor) -> Tensor:
        return self._finish(logits)

    def _finish(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def make_head(vocab: int, units: int, seed: int = 0, *, scale: float = 1.0, **options: Any) -> LinearHead:
    """Weights that are multiples of 1/8, so that with `make_evidence` and p = 0.5 every logit is exact."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, units, generator=generator) * scale
    return LinearHead((weight * 8).round() / 8, **options)


def random_head(vocab: int, units: int, scale: float, seed: int = 1, **options: Any) -> LinearHead:
    """Weights without structure: logits never tie."""
    weight = torch.randn(vocab, units, generator=torch.Generator().manual_seed(seed)) * scale
    return LinearHead(weight, **options)


def make_evidence(
    head: LinearHead,
    rows: int,
    seed: int = 0,
    *,
    noise: float = 4.0,
    draft_vocab: int | None = None,
    **changes: Any,
) -> Evidence:
    """Rows whose draft is the target's distribution and noise, from hardly any to much.

    The draft token is by turns the draft's own likeliest, the target's runner-up and the target's likeliest.
    """
    generator = torch.Generator().manual_seed(seed + 1000)
    units = head.weight.shape[1]
    hidden = (torch.randn(rows, units, generator=generator) * 4).round() / 4
    clean = head._finish(hidden @ head.weight.T)  # [N, V]
    draft_vocab = head.vocab_size if draft_vocab is None else draft_vocab
    vocab = min(draft_vocab, head.vocab_size)
    draft = torch.randn(rows, draft_vocab, generator=generator)
    draft *= noise * torch.linspace(0.05, 1.5, max(rows, 1))[:rows, None]
    draft[:, :vocab] += clean[:, :vocab]
    own = draft[:, :vocab].argmax(dim=1)
    first, second = clean[:, :vocab].topk(2, dim=1).indices.unbind(dim=1)
    turn = torch.arange(rows) % 3
    values: dict[str, Any] = {
        "hidden": hidden,
        "clean_logits": clean,
        "draft_tokens": torch.where(turn == 0, own, torch.where(turn == 1, second, first)),
        "clean_tokens": clean.argmax(dim=1),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.randint(0, 4096, (rows,), generator=generator),
        "draft_logits": draft,
    }
    return Evidence(**(values | changes))


def reference_answers(evidence: Evidence, config: AcceptanceConfig, head: LinearHead) -> list[reference.Answer]:
    """The slow reference on every row: heads from the paper's equations, in fp64 over the full vocabulary."""
    answers = []
    draft = evidence.draft_logits
    assert draft is not None
    vocab = min(head.vocab_size, draft.shape[1])
    weight = head.weight.double().numpy()[:vocab]
    for n in range(len(evidence)):
        seed = int(evidence.seeds[n]) if config.mask_seed is None else config.mask_seed
        hidden = evidence.hidden[n].double().numpy()
        copies = reference.dropped(hidden, seed, int(evidence.positions[n]), config.heads, config.dropout)
        logits = copies @ weight.T
        if head.cap is not None:
            logits = head.cap * np.tanh(logits / head.cap)
        row = draft[n, :vocab].double().numpy().copy()
        if evidence.bias is not None:
            bias = evidence.bias[n, :vocab].double().numpy()
            logits = logits + bias
            row[np.isneginf(bias)] = -np.inf
        answers.append(reference.answer(logits, row, int(evidence.draft_tokens[n]), config.floor))
    return answers


class ScriptedHead:
    """One row's heads say what they are told to, whatever the hidden state: [K, V]."""

    can_gather = True

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]

    def full(self, hidden: Tensor) -> Tensor:
        assert hidden.shape[0] == self.logits.shape[0]
        return self.logits

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        assert hidden.shape[:2] == (1, self.logits.shape[0])
        return self.logits[:, token_ids[0]][None]


def scripted(head_logits: list[list[float]], draft_logits: list[float], token: int) -> tuple[Evidence, ScriptedHead]:
    """One row and the head that plays its script: [K, V], [V]."""
    logits = torch.tensor(head_logits, dtype=torch.float32)
    clean = logits.mean(dim=0, keepdim=True)
    evidence = Evidence(
        hidden=torch.zeros(1, 4),
        clean_logits=clean,
        draft_tokens=torch.tensor([token]),
        clean_tokens=clean.argmax(dim=1),
        seeds=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        draft_logits=torch.tensor([draft_logits], dtype=torch.float32),
    )
    return evidence, ScriptedHead(logits)


def to_device(evidence: Evidence, device: str) -> Evidence:
    """The same evidence elsewhere."""
    return map_evidence(evidence, lambda value: value.to(device))


def map_evidence(evidence: Evidence, change: Callable[[Tensor], Tensor]) -> Evidence:
    """The evidence with every tensor changed."""
    return Evidence(**{name: change(value) for name, value in vars(evidence).items() if value is not None})
