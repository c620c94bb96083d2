"""Speculative decoding: rounds of draft, verify, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.stopping import StopRules
from dropmatch.decoding.verify import DraftTokenTrace, Observer, verify
from dropmatch.drafting.base import Draft, Drafter
from dropmatch.heads import Head


class CapturingHead(Head, Protocol):
    """A head that keeps its input while the target runs."""

    def capture(self) -> AbstractContextManager[None]:
        """Keep it from here on."""
        ...

    def hidden(self, rows: int) -> Tensor:
        """The input at the last positions of the last forward: [rows, d]."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: [T] token ids, T ≥ 1.
        chooser: how logits become tokens.
        stop: when to end.
        acceptance: how draft tokens are judged.
        draft: how draft tokens are proposed; a draft length of 0 is plain decoding.
        logprobs: whether to compute log-probabilities.
        observer: told of each draft before it is judged.
    """

    prompt: Tensor
    chooser: TokenChooser
    stop: StopRules
    acceptance: AcceptanceConfig
    draft: DraftConfig
    logprobs: bool = False
    observer: Observer | None = None


@dataclass(frozen=True)
class Block:
    """What one round committed.

    Attributes:
        tokens: committed ids, at least one.
        reasons: why each was committed: the reason of an accepted draft token, else "correction" or "bonus".
        exact: for each, whether it is what lossless decoding emits there.
        logprobs: log-probability that the clean target gives to each; empty unless asked for.
        trace: the verdicts on all draft tokens of the round.
        finish: why the sequence ends here, and what matched; None if it goes on.
    """

    tokens: list[int]
    reasons: list[str]
    exact: list[bool]
    logprobs: list[float]
    trace: list[DraftTokenTrace]
    finish: tuple[str, str | int | None] | None


@torch.inference_mode()
def decode(
    target: CachedModel, head: CapturingHead, drafter: Drafter | None, request: Request, statistics: Statistics
) -> Iterator[Block]:
    """Generate one sequence, a block at a time, counting into `statistics`.

    Target and drafter must be fresh: their caches hold nothing.

    Between rounds the target's cache holds the sequence without its last token.
    """
    ids, generated = request.prompt, list[int]()
    with head.capture():
        while True:
            # the target adds a token of its own, so a draft as long as the budget would be cut
            began = time.perf_counter()
            length = min(request.draft.draft_length, request.stop.max_tokens - len(generated) - 1)
            draft = Draft(ids[:0])
            if drafter is not None and length > 0:
                draft = drafter.propose(ids, length, request.chooser, request.draft)
            statistics.draft_seconds += time.perf_counter() - began

            n = draft.tokens.shape[0]
            sequence = torch.cat([ids, draft.tokens])  # [T + n]
            clock = time.perf_counter()
            logits = target.extend(sequence[target.length :], keep=n + 1)  # [n + 1, V]
            statistics.verify_seconds += time.perf_counter() - clock

            clock = time.perf_counter()
            outcome = verify(
                draft,
                logits,
                head.hidden(n + 1),
                sequence,
                request.chooser,
                request.acceptance,
                head,
                request.observer if n else None,
            )
            statistics.judge_seconds += time.perf_counter() - clock

            tokens, finish = _cut(outcome.tokens.tolist(), request, generated)
            generated += tokens
            ids = torch.cat([ids, outcome.tokens[: len(tokens)]])
            target.rollback(ids.shape[0] - 1)
            if drafter is not None:
                drafter.commit(ids)

            block = _block(tokens, finish, outcome.trace, logits if request.logprobs else None)
            _count(statistics, block)
            statistics.seconds += time.perf_counter() - began
            yield block
            if finish is not None:
                return


def _cut(
    tokens: list[int], request: Request, generated: list[int]
) -> tuple[list[int], tuple[str, str | int | None] | None]:
    """The block up to the token at which plain decoding would stop, and why it stops."""
    for i in range(len(tokens)):
        finish = request.stop.reason(request.prompt, generated + tokens[: i + 1])
        if finish is not None:
            return tokens[: i + 1], finish
    return tokens, None


def _block(
    tokens: list[int],
    finish: tuple[str, str | int | None] | None,
    trace: list[DraftTokenTrace],
    logits: Tensor | None,
) -> Block:
    """logits: [n + 1, V] the clean ones, if log-probabilities are wanted."""
    accepted = sum(entry.accepted for entry in trace)
    own = "bonus" if accepted == len(trace) else "correction"
    reasons = [entry.reason for entry in trace[:accepted]] + [own]
    exact = [entry.exact for entry in trace[:accepted]] + [True]
    logprobs: list[float] = []
    if logits is not None:
        rows = logits[: len(tokens)].float().log_softmax(dim=-1)  # [m, V]
        picked = torch.tensor(tokens, device=rows.device)[:, None]
        logprobs = rows.gather(1, picked).squeeze(1).tolist()
    return Block(tokens, reasons[: len(tokens)], exact[: len(tokens)], logprobs, trace, finish)


def _count(statistics: Statistics, block: Block) -> None:
    """Count the draft tokens that the cut left."""
    left = block.trace if block.finish is None else block.trace[: len(block.tokens)]
    kept = [entry for entry in left if entry.accepted]
    statistics.rounds += 1
    statistics.generated += len(block.tokens)
    statistics.proposed += len(left)
    statistics.accepted += len(kept)
    statistics.lossy += sum(not entry.exact for entry in kept)
    statistics.reasons.update(entry.reason for entry in kept)
    statistics.lengths[len(kept)] += 1
    statistics.judged += sum(entry.probability is not None for entry in left)
    compared = [entry.uniform_passes for entry in left if entry.uniform_passes is not None]
    statistics.compared += len(compared)
    statistics.uniform_passes += sum(compared)
