"""Strict sampling is exact: the joint distribution of three tokens over many seeds, against its enumeration.

The target and the draft are tables of logits given the last token, behind the interfaces of the loop, so that a
run takes a millisecond. A mutated acceptance must fail the same test, which shows that it has the power to.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dropmatch import masks
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.decoding import loop, sampling, verify
from dropmatch.decoding.sampling import TokenChooser, pick
from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.stopping import StopRules
from dropmatch.drafting import Draft, PromptLookup
from dropmatch.masks import Stream

V, TOKENS, SEEDS = 12, 3, 20_000
PROMPT = torch.tensor([4, 7, 2, 4])


def table(seed: int, peak: float) -> Tensor:
    """[V, V] logits given the last token."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * peak


TARGET = table(0, 1.2)
DRAFT = TARGET + table(1, 0.9)


class TableTarget:
    """Stands in for CachedModel."""

    length = 0

    def extend(self, tokens: Tensor, keep: int) -> Tensor:
        self.length += tokens.shape[0]
        return TARGET[tokens[-keep:]]

    def rollback(self, length: int) -> None:
        self.length = length


class NoHead:
    vocab_size, can_gather = V, False

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def hidden(self, rows: int) -> Tensor:
        return torch.zeros(rows, 4)


class TableDrafter:
    """What DraftModel does, on a table."""

    has_distribution = True

    def propose(self, ids: Tensor, length: int, chooser: TokenChooser, config: DraftConfig) -> Draft:
        logits, rows = [], []
        for _ in range(length):
            row = chooser.process(ids, DRAFT[ids[-1:]])
            rows.append(chooser.warp(ids, row).softmax(dim=-1))
            token = pick(rows[-1][0], chooser.uniform(Stream.DRAFT_TOKEN, ids.shape[0]))
            ids = torch.cat([ids, token[None]])
            logits.append(row)
        return Draft(ids[-length:], torch.cat(logits), torch.cat(rows))

    def commit(self, ids: Tensor) -> None: ...


class Lookup(PromptLookup):
    def __init__(self) -> None:
        super().__init__()
        self.check(0, 0, V)


@pytest.fixture
def quick_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of dropmatch.masks, drawn for all seeds at once and looked up."""
    drawn: dict[tuple[int, int], Tensor] = {}

    def lookup(stream: Stream, seeds: Tensor, positions: Tensor) -> Tensor:
        values = []
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            key = (int(stream), position)
            if key not in drawn:
                every = torch.arange(SEEDS)
                drawn[key] = masks.uniforms(stream, every, torch.full_like(every, position))
            values.append(drawn[key][seed])
        return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)

    monkeypatch.setattr(sampling, "uniforms", lookup)
    monkeypatch.setattr(verify, "uniforms", lookup)


def warpers(options: dict[str, float]) -> tuple[Any, ...]:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    kinds = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    return tuple(kinds[name](value) for name, value in options.items())


def exact_joint(options: dict[str, float]) -> Tensor:
    """[V, V, V] probability of the first three tokens, by the chain rule."""
    rows = TARGET
    for warper in warpers(options):
        rows = warper(None, rows)
    step = rows.double().softmax(dim=-1)  # [V, V]
    return step[int(PROMPT[-1])][:, None, None] * step[:, :, None] * step[None, :, :]


def observe(
    drafter: Callable[[], Any], options: dict[str, float], seeds: int, length: int
) -> tuple[Tensor, Statistics]:
    """[V, V, V] counts over the seeds."""
    counts, statistics, chain = Counter[tuple[int, ...]](), Statistics(), warpers(options)
    for seed in range(seeds):
        request = loop.Request(
            PROMPT, TokenChooser((), chain, True, seed), StopRules(TOKENS + 1), AcceptanceConfig("strict"),
            DraftConfig(length),
        )  # fmt: skip
        tokens: list[int] = []
        for block in loop.decode(TableTarget(), NoHead(), drafter(), request, statistics):
            tokens += block.tokens
            if len(tokens) >= TOKENS:
                break
        counts[tuple(tokens[:TOKENS])] += 1
    table_ = torch.zeros(V, V, V, dtype=torch.float64)
    for key, count in counts.items():
        table_[key] = count
    return table_, statistics


def p_value(counts: Tensor, exact: Tensor) -> float:
    """Chi-square, cells of fewer than 5 expected pooled; an impossible outcome is a p-value of 0."""
    counts, expected = counts.flatten(), exact.flatten() * counts.sum()
    if float(counts[expected == 0].sum()) > 0:
        return 0.0
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    pooled = torch.cat([expected[large], expected[~large].sum()[None]])
    keep = pooled > 0
    return float(chisquare(observed[keep].numpy(), pooled[keep].numpy()).pvalue)


CASES = [
    (TableDrafter, {}, 2),
    (TableDrafter, {"temperature": 0.7, "top_k": 5}, 3),
    (Lookup, {"temperature": 1.3, "top_p": 0.8}, 3),
]


@pytest.mark.usefixtures("quick_uniforms")
@pytest.mark.parametrize(("drafter", "options", "length"), CASES)
def test_strict_sampling_is_exact(drafter: Any, options: dict[str, float], length: int) -> None:
    counts, statistics = observe(drafter, options, SEEDS, length)
    assert statistics.accepted > 1000
    assert statistics.proposed - statistics.accepted > 1000
    exact = exact_joint(options)
    assert p_value(counts, exact) > 1e-4
    for axes in itertools.combinations(range(3), 2):  # marginals of each position: finer than the joint
        assert p_value(counts.sum(dim=axes), exact.sum(dim=axes)) > 1e-4


def from_target(target: Tensor, draft: Tensor | None, token: Tensor) -> Tensor:
    return target


def always(target: Tensor, draft: Tensor | None, tokens: Tensor, uniform: Tensor) -> Tensor:
    return uniform < 0.9


def without_ratio(target: Tensor, draft: Tensor | None, tokens: Tensor, uniform: Tensor) -> Tensor:
    return uniform < target.gather(1, tokens[:, None]).squeeze(1)


MUTATIONS = [("residual", from_target), ("rejection_accepts", always), ("rejection_accepts", without_ratio)]


@pytest.mark.usefixtures("quick_uniforms")
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS)
def test_the_test_has_the_power_to_fail(monkeypatch: pytest.MonkeyPatch, name: str, mutation: Any) -> None:
    monkeypatch.setattr(verify, name, mutation)
    counts, _ = observe(TableDrafter, {}, SEEDS // 4, 2)
    assert p_value(counts, exact_joint({})) < 1e-6


@pytest.mark.usefixtures("quick_uniforms")
def test_reusing_a_number_for_two_purposes_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft token, acceptance and correction need numbers of their own."""
    drawn = TokenChooser.uniform
    monkeypatch.setattr(TokenChooser, "uniform", lambda self, stream, at: drawn(self, Stream.ACCEPT, at))
    counts, _ = observe(TableDrafter, {}, SEEDS // 4, 2)
    assert p_value(counts, exact_joint({})) < 1e-6


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_the_whole_engine_samples_from_the_target(tiny: Any, drafter: str) -> None:
    """Fewer seeds, but a transformer, its caches and the real options: second and third token given the first."""
    from dropmatch import Engine
    from dropmatch.drafting import DraftModel

    small = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": None}
    target = tiny.build_model("llama", peak=1.5, **small)
    target.generation_config.eos_token_id = None
    drafts = {"model": DraftModel(tiny.perturb(target, 0.15)), "lookup": PromptLookup()}
    engine = Engine(target, tiny.word_tokenizer(V), drafts[drafter])
    seeds, options = 1200, {"temperature": 0.8, "top_k": 6, "top_p": 0.95}
    counts = torch.zeros(V, V, dtype=torch.float64)
    accepted = 0
    for seed in range(seeds):
        result = engine.generate(
            PROMPT, rule="strict", max_tokens=3, draft_length=2, seed=seed, ignore_eos=True, **options
        )
        counts[tuple(result.token_ids[:2])] += 1
        accepted += result.statistics.accepted
    assert accepted > 40
    first = tiny.full_logits(target, PROMPT.tolist())[-1]
    second = torch.stack([tiny.full_logits(target, [*PROMPT.tolist(), i])[-1] for i in range(V)])
    for warper in warpers(options):
        first, second = warper(None, first[None])[0], warper(None, second)
    exact = first.double().softmax(dim=-1)[:, None] * second.double().softmax(dim=-1)
    assert p_value(counts, exact) > 1e-4
    assert p_value(counts, exact.T) < 1e-6, "the power to fail"
