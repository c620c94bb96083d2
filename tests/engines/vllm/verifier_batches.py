"""What the tests of the verifier share: rules and settings, and batches of any requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from verifier_support import (
    INF,
    VOCAB,
    Ask,
    make_ask,
)

LOSSY = ("naive", "js")
PEERS = {
    "typical": {"threshold": 0.02},
    "fly": {"window": 1, "threshold": 0.05},
    "ensemble": {"weight": 0.3},
    "topk": {"candidates": 3},
}
JS = {"dropmatch": "js", "dropmatch_verdict": "sampled"}
NAIVE = {"dropmatch": "naive", "dropmatch_verdict": "sampled"}
WILD = {
    "dropmatch_verdict": "sampled",
    "dropmatch_heads": 64,
    "dropmatch_dropout": 0.6,
}  # accepts nearly anything that can be
JUDGE = "dropmatch.engines.vllm.rows.judge"
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def asks(
    draw: st.DrawFn, name: str, *, sampling: bool = True, constraints: bool = True, placeholders: bool = True
) -> Ask:
    """A request with any rule and settings, and drafts of 0 to 5 tokens."""
    lowest = -1 if placeholders else 0
    ranks = draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 9, *([-1] if lowest else [])]), max_size=5))
    rule = draw(st.sampled_from([None, "off", "strict", "naive", "js", "naive", "js", *PEERS]))
    options: dict[str, Any] = {} if rule is None else {"dropmatch": rule}
    if rule in ("strict", *LOSSY):
        options["dropmatch_heads"] = draw(st.sampled_from([1, 5, 9]))
        options["dropmatch_dropout"] = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5]))
        options["dropmatch_evaluation"] = draw(st.sampled_from(["lazy", "lazy", "eager"]))
        options["dropmatch_token_floor"] = draw(st.sampled_from([0.0, 0.0, 0.1]))
        options["dropmatch_verdict"] = draw(st.sampled_from(["sampled", "sampled", "denoised"]))
        if options["dropmatch_verdict"] == "sampled" and draw(st.booleans()):
            options["dropmatch_mask_seed"] = draw(st.integers(-3, 3))
    if rule in PEERS:
        options |= {f"dropmatch_{name}": value for name, value in PEERS[rule].items()}
        options["dropmatch_evaluation"] = draw(st.sampled_from(["lazy", "lazy", "eager"]))
    changes: dict[str, Any] = {"options": options, "chunk": draw(st.sampled_from([0, 0, 4]))}
    if sampling and draw(st.booleans()) and -1 not in ranks:
        changes["temperature"] = draw(st.sampled_from([0.5, 1.0, 1.7]))
        # vLLM's top-k on a CPU fails where a whole step has no draft row
        changes["top_k"] = draw(st.sampled_from([0, 0, 2, 10])) if ranks else 0
        changes["top_p"] = draw(st.sampled_from([1.0, 1.0, 0.8]))
    changes["seed"] = draw(st.sampled_from([None, 0, 1, 2, 12345]))
    seed = draw(st.integers(0, 10_000))
    ask = make_ask(name, ranks, seed, noise=draw(st.sampled_from([0.3, 1.0, 4.0])), **changes)
    if constraints:
        some = st.lists(st.integers(0, VOCAB - 1), max_size=4)
        if draw(st.booleans()):
            ask.allowed = set(range(VOCAB)) - set(draw(some)) - set(ask.drafts[:1] if draw(st.booleans()) else [])
        if draw(st.booleans()):
            ask.bad_words = [[token] for token in draw(some)]
            ask.bad_words += [list(pair) for pair in zip(ask.drafts, ask.drafts[1:]) if -1 not in pair][:1]
        if draw(st.booleans()):
            ask.penalties = draw(st.sampled_from([(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (0.8, 0.4, 0.9)]))
            ask.output = ask.output + ask.drafts[:1] if -1 not in ask.drafts[:1] else ask.output
        if draw(st.booleans()):
            ask.min_tokens, ask.stop = 1 + draw(st.integers(0, 4)), draw(some) + ask.drafts[-1:]
            ask.stop = [token for token in ask.stop if token >= 0]
        if ask.drafts and draw(st.booleans()):  # a grammar
            ask.raw = ask.raw.clone()
            ask.raw[draw(st.integers(0, len(ask.drafts) - 1)), draw(some)] = -INF
    return ask


def batches(low: int = 1, high: int = 4, **options: Any) -> st.SearchStrategy[list[Ask]]:
    """Batches of such requests."""
    return st.integers(low, high).flatmap(lambda n: st.tuples(*[asks(f"r{i}", **options) for i in range(n)]).map(list))


def replace_options(ask: Ask, options: dict[str, Any]) -> Ask:
    return replace(ask, options=options)


def scripted_judge(verdicts: dict[int, bool]) -> Callable[..., Any]:
    """A rule that says what it is told about each position."""
    from dropmatch.acceptance import Verdict

    def judge(evidence: Any, config: Any, head: Any) -> Verdict:
        return Verdict.blank(torch.tensor([verdicts[int(p)] for p in evidence.positions]), "naive")

    return judge
