"""One block of draft tokens against the target's logits: how many are accepted, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dropmatch.acceptance import EXACT, SAMPLED, Evidence, Verdict, get_rule, judge, reason_name
from dropmatch.config import AcceptanceConfig
from dropmatch.decoding.sampling import TokenChooser, pick, rejection_accepts, residual
from dropmatch.drafting.base import Draft
from dropmatch.heads import Head, likeliest_token
from dropmatch.masks import Stream, uniforms

# told of each draft before it is judged: its evidence [n rows], and what lossless decoding accepts [n] bool
Observer = Callable[[Evidence, Tensor], None]


@dataclass(frozen=True)
class DraftTokenTrace:
    """What became of one draft token.

    Attributes:
        token: its id.
        clean_token: the target's likeliest token there.
        accepted: whether it was accepted.
        exact: whether lossless decoding accepts it.
        reason: "exact", "sampled", "js", "majority", "naive", ..., "rejected", or "not reached" after the
            first rejection.
        js: JS(draft ‖ centroid); None where the rule was not asked or does not look at it. Likewise the rest.
        radius: the largest JS(head ‖ centroid).
        votes: how many heads chose the token.
        probability: what the heads' centroid gives it; the target, where the floor refused it before heads were made.
        uniform_passes: whether even a uniform draft would have passed.
        frequency: share of the sets of heads that accept, where the verdict is denoised.
    """

    token: int
    clean_token: int
    accepted: bool
    exact: bool
    reason: str
    js: float | None = None
    radius: float | None = None
    votes: int | None = None
    probability: float | None = None
    uniform_passes: bool | None = None
    frequency: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Verdict on a block: accepted tokens, then the target's own token.

    Attributes:
        tokens: [a + 1] accepted draft tokens, then the correction or the bonus token.
        trace: one entry per draft token.
    """

    tokens: Tensor
    trace: list[DraftTokenTrace]


def verify(
    draft: Draft,
    logits: Tensor,
    hidden: Tensor,
    sequence: Tensor,
    chooser: TokenChooser,
    config: AcceptanceConfig,
    head: Head,
    observer: Observer | None = None,
) -> Outcome:
    """Accept the longest acceptable beginning of a draft and add the target's own next token.

    Args:
        draft: n proposed tokens.
        logits: [n + 1, V] the target's logits at the draft positions and the bonus position.
        hidden: [n + 1, d] the input of its LM head there.
        sequence: [T + n] the sequence with the draft.
        chooser: processors, temperature and seed of the request.
        config: the acceptance rule.
        head: the target's LM head.
        observer: told of the draft before it is judged.
    """
    n = draft.tokens.shape[0]
    scores = chooser.process(sequence, logits)  # [n + 1, V] fp32
    clean = likeliest_token(scores)  # [n + 1]
    warped = chooser.warp(sequence, scores) if chooser.sample else scores
    target = warped.softmax(dim=-1) if chooser.sample else None  # [n + 1, V]
    start = sequence.shape[0] - n
    positions = torch.arange(start, start + n, device=sequence.device)  # [n]
    seeds = torch.full_like(positions, chooser.seed)

    if target is None:
        exact = draft.tokens == clean[:n]
    else:
        draws = uniforms(Stream.ACCEPT, seeds, positions)
        exact = rejection_accepts(target[:n], draft.probabilities, draft.tokens, draws)

    followed, remaining = following(exact) if get_rule(config.rule).needs_block else (None, None)
    evidence = Evidence(
        hidden=hidden[:n],
        clean_logits=logits[:n],
        draft_tokens=draft.tokens,
        clean_tokens=clean[:n],
        seeds=seeds,
        positions=positions,
        draft_logits=draft.logits,
        bias=_shift(scores[:n], logits[:n]) if chooser.processors else None,
        allowed=warped[:n].gather(1, draft.tokens[:, None]).squeeze(1) > -torch.inf,
        followed=followed,
        remaining=remaining,
    )
    if observer is not None:
        observer(evidence, exact)
    trace = _judge_rows(evidence, exact, config, head, sampled=chooser.sample)
    accepted = sum(entry.accepted for entry in trace)
    if target is None:
        own = clean[accepted]
    else:
        weights = target[accepted]
        if accepted < n:
            q = None if draft.probabilities is None else draft.probabilities[accepted]
            weights = residual(weights, q, draft.tokens[accepted])
        own = pick(weights, chooser.uniform(Stream.TARGET_TOKEN, start + accepted))
    return Outcome(torch.cat([draft.tokens[:accepted], own[None]]), trace)


def following(exact: Tensor) -> tuple[Tensor, Tensor]:
    """What stands behind each token of a draft: exact matches right after it, and tokens; [n] bool -> [n], [n]."""
    remaining = torch.arange(exact.shape[0] - 1, -1, -1, device=exact.device)  # [n]
    # the next token that is no exact match, counted from the end of the draft
    ends = torch.where(exact, -1, remaining).flip(0).cummax(dim=0).values.flip(0)  # [n]
    behind = torch.cat([ends[1:], ends.new_full((min(1, ends.shape[0]),), -1)])  # [n]
    return remaining - 1 - behind, remaining


def _shift(scores: Tensor, logits: Tensor) -> Tensor:
    """What the processors added: [n, V], [n, V] -> [n, V], -inf for a banned token."""
    return torch.where(scores.isneginf(), -torch.inf, scores - logits.float())


def _judge_rows(
    evidence: Evidence, exact: Tensor, config: AcceptanceConfig, head: Head, *, sampled: bool
) -> list[DraftTokenTrace]:
    """Walk the block to its first rejection, asking the rule where it has a say.

    exact: [n] bool, what lossless decoding accepts. Lazy evaluation asks about the other rows only. When
    sampling, those rows are accepted in any case: to refuse one would bend the distribution.
    """
    matches = exact.tolist()
    lossless = get_rule(config.rule).lossless
    eager = config.evaluation == "eager" and not lossless
    asked = [] if lossless else [i for i, match in enumerate(matches) if eager or not match]
    # on a CPU rows behind the first rejection would be judged for nothing; a GPU would rather have one launch
    group = 1 if evidence.hidden.device.type == "cpu" else max(1, len(asked))
    tokens, clean = evidence.draft_tokens.tolist(), evidence.clean_tokens.tolist()

    answers: dict[int, DraftTokenTrace] = {}
    trace: list[DraftTokenTrace] = []
    alive = True
    for i, match in enumerate(matches):
        kept = match and (sampled or not eager)
        entry = DraftTokenTrace(
            token=tokens[i],
            clean_token=clean[i],
            accepted=alive and kept,
            exact=match,
            reason=reason_name(SAMPLED if sampled else EXACT) if kept else "rejected",
        )
        if not alive:
            entry = DraftTokenTrace(tokens[i], clean[i], accepted=False, exact=match, reason="not reached")
        elif i in asked:
            if i not in answers:
                batch = asked[asked.index(i) : asked.index(i) + group]
                index = torch.tensor(batch, device=evidence.hidden.device)
                verdict = judge(evidence.rows(index), config, head)
                answers.update(_entries(batch, verdict, tokens, clean, matches))
            entry = answers[i] if not kept else _with_numbers(entry, answers[i])
        trace.append(entry)
        alive = entry.accepted
    return trace


def _entries(
    rows: list[int], verdict: Verdict, tokens: list[int], clean: list[int], exact: list[bool]
) -> dict[int, DraftTokenTrace]:
    """Verdicts as trace entries, in one transfer from the device."""
    columns = torch.stack(
        [
            verdict.accept.double(),
            verdict.reason.double(),
            verdict.distance.double(),
            verdict.radius.double(),
            verdict.votes.double(),
            verdict.probability.double(),
            verdict.uniform_passes.double(),
            verdict.frequency.double(),
        ],
        dim=1,
    ).tolist()
    entries = {}
    for row, (accept, reason, distance, radius, votes, probability, uniform, frequency) in zip(
        rows, columns, strict=True
    ):
        entries[row] = DraftTokenTrace(
            token=tokens[row],
            clean_token=clean[row],
            accepted=bool(accept),
            exact=exact[row],
            reason=reason_name(int(reason)),
            js=_known(distance),
            radius=_known(radius),
            votes=int(votes) if votes >= 0 else None,
            probability=_known(probability),
            uniform_passes=bool(uniform) if radius == radius else None,
            frequency=_known(frequency),
        )
    return entries


def _with_numbers(entry: DraftTokenTrace, answer: DraftTokenTrace) -> DraftTokenTrace:
    """An entry accepted in any case, with the numbers of the rule's answer."""
    return replace(answer, accepted=entry.accepted, reason=entry.reason)


def _known(number: float) -> float | None:
    return None if number != number else number
