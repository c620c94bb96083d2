"""What vLLM's rejection sampler should answer under the rules, written out row by row.

Straight from the description of the rules: one row at a time, from the same random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verifier_support import (
    HEAD,
    INF,
    Ask,
    Outcome,
    run,
)

from acceptance.support import LinearHead
from dropmatch.acceptance import Evidence, get_rule, judge, reason_name
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm.reporting import Reasons


def processed_row(ask: Ask, place: int) -> Tensor:
    """[V] what the request's processors make of the raw logits that verify a draft token."""
    row = ask.raw[place].float().tolist()
    said = ask.output + ask.drafts[:place]
    repetition, frequency, presence = ask.penalties
    for token in {token for token in [*ask.prompt, *said] if token >= 0}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(token for token in said if token >= 0).items():
        row[token] -= frequency * count + presence
    for token in range(len(row)):
        if ask.allowed is not None and token not in ask.allowed:
            row[token] = -INF
    for word in ask.bad_words:
        if len(word) == 1 or said[-(len(word) - 1) :] == word[:-1]:
            row[word[-1]] = -INF
    if len(said) < ask.min_tokens:
        for token in ask.stop:
            row[token] = -INF
    return torch.tensor(row, dtype=torch.float32)


def constrained_row(ask: Ask, row: Tensor) -> Tensor:
    """[V] the same after temperature, top-k and top-p."""
    if ask.greedy:
        return row
    row = row / ask.temperature
    order = row.argsort(descending=True).tolist()
    kept = order[: ask.top_k or len(order)]
    mass = row[kept].softmax(dim=0).tolist()
    total, few = 0.0, []
    for token, share in zip(kept, mass, strict=True):
        if few and ask.top_p < 1 and total >= ask.top_p:
            break
        few.append(token)
        total += share
    result = torch.full_like(row, -INF)
    result[few] = row[few]
    return result


def settings_of(ask: Ask, default: AcceptanceConfig | None) -> AcceptanceConfig | None:
    """The request's settings; None is off."""
    options = {key.removeprefix("dropmatch_"): value for key, value in ask.options.items() if key != "dropmatch"}
    rule = ask.options.get("dropmatch", "off" if default is None else default.rule)
    if rule == "off":
        return None
    known = {} if default is None else vars(default)
    return AcceptanceConfig(**(known | options | {"rule": rule}))


def ask_rule(
    ask: Ask,
    place: int,
    config: AcceptanceConfig | None,
    head: LinearHead,
    row: Tensor,
    final: Tensor,
    exact: list[bool],
) -> str | None:
    """Why the rule accepts a draft token, judged alone; None if it does not, or if there is none.

    exact: for each of the draft's tokens, whether lossless decoding accepts it.
    """
    token = ask.drafts[place]
    if config is None or get_rule(config.rule).lossless or not 0 <= token < len(row):
        return None
    compares = get_rule(config.rule).needs_draft_distribution
    if compares and ask.draft_logits is None:
        return None
    raw = ask.raw[place].float()
    evidence = Evidence(
        hidden=ask.hidden[place][None],
        clean_logits=ask.raw[place][None],
        draft_tokens=torch.tensor([token]),
        clean_tokens=row.argmax()[None],
        seeds=torch.tensor([ask.seed or 0]),
        positions=torch.tensor([ask.start + place + 1]),
        draft_logits=ask.draft_logits[place][None] if compares and ask.draft_logits is not None else None,
        bias=torch.where(row.isneginf(), -INF, row - raw)[None],
        allowed=torch.tensor([bool(final[token] > -INF)]),
        followed=torch.tensor([[*exact[place + 1 :], False].index(False)]),
        remaining=torch.tensor([len(exact) - place - 1]),
    )
    verdict = judge(evidence, config, head)
    return reason_name(int(verdict.reason)) if bool(verdict.accept) else None


def _rest(ask: Ask, place: int, final: Tensor, probabilistic: bool) -> tuple[Tensor, float]:
    """What a refused token is replaced from, and what the draft gave the token: final [V] -> [V], q."""
    token, p = ask.drafts[place], final.softmax(dim=0)
    if ask.greedy or not probabilistic:
        rest = p.clone()
        rest[token if token >= 0 else []] = 0
        return rest, 1.0
    assert ask.draft_logits is not None
    q = (ask.draft_logits[place] / ask.temperature).softmax(dim=0)
    return (p - q).clamp_min(0), float(q[token])


def expected(
    asks: Sequence[Ask],
    outcome: Outcome,
    *,
    probabilistic: bool = False,
    head: LinearHead = HEAD,
    default: AcceptanceConfig | None = None,
) -> dict[str, tuple[list[int], list[str]]]:
    """Tokens and reasons of each request, from the random numbers that the step began its rejections with."""
    counts = [len(ask.drafts) for ask in asks]
    here = torch.get_rng_state()
    torch.set_rng_state(outcome.state)
    own = {i: torch.Generator() for i in outcome.states}
    for i, generator in own.items():
        generator.set_state(outcome.states[i])
    uniforms = list(torch.rand(sum(counts), dtype=torch.float64).split(counts))
    for i, generator in own.items():
        if counts[i]:
            uniforms[i] = torch.empty(counts[i], dtype=torch.float64).uniform_(generator=generator)
    noise = torch.empty(len(asks), head.vocab_size).exponential_()
    for i, generator in own.items():
        if counts[i]:
            noise[i] = torch.empty(head.vocab_size).exponential_(generator=generator)
    torch.set_rng_state(here)

    answers = {}
    for i, ask in enumerate(asks):
        config = settings_of(ask, default)
        tokens: list[int] = []
        reasons: list[str] = []
        rows = [processed_row(ask, place) for place in range(len(ask.drafts))]
        finals = [constrained_row(ask, row) for row in rows]
        rests = [_rest(ask, place, final, probabilistic) for place, final in enumerate(finals)]
        lossless = [
            token == int(rows[place].argmax())
            if ask.greedy
            else token >= 0
            and float(finals[place].softmax(dim=0)[token]) / rests[place][1] >= float(uniforms[i][place])
            for place, token in enumerate(ask.drafts)
        ]
        for place, token in enumerate(ask.drafts):
            row, final, exact = rows[place], finals[place], lossless[place]
            if ask.greedy:
                choice, why = int(row.argmax()), "exact"
                if exact and config is not None and config.evaluation == "eager" and not get_rule(config.rule).lossless:
                    unknown = get_rule(config.rule).needs_draft_distribution and ask.draft_logits is None
                    exact = unknown or ask_rule(ask, place, config, head, row, final, lossless) is not None
                    if not exact:
                        tokens.append(choice)
                        break
            else:
                choice, why = int((rests[place][0] / noise[i]).argmax()), "sampled"
            reason = why if exact else ask_rule(ask, place, config, head, row, final, lossless)
            if reason is None:
                tokens.append(choice)
                break
            tokens.append(token)
            reasons.append(reason)
        else:
            tokens.append(outcome.bonus[i])
        answers[ask.name] = (tokens, reasons)
    return answers


def check(asks: Sequence[Ask], **options: Any) -> Outcome:
    """Run a batch and compare everything with what should come out."""
    outcome = run(asks, **options)
    known = {key: value for key, value in options.items() if key in ("probabilistic", "head", "default")}
    answers = expected(asks, outcome, **known)
    assert outcome.tokens == {name: tokens for name, (tokens, _) in answers.items()}
    wanted = {
        ask.name: Reasons(
            rule=getattr(settings_of(ask, options.get("default")), "rule", "off"),
            drafted=len(ask.drafts),
            accepted=answers[ask.name][1],
        )
        for ask in asks
        if ask.drafts
    }
    assert outcome.report == wanted
    for name, reasons in outcome.report.items():
        assert len(reasons.accepted) == len(outcome.tokens[name]) - 1
    before, after = outcome.target_logits
    assert torch.equal(before, after), "the target logits were not put back"
    return outcome
