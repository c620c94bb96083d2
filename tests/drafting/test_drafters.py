"""Drafters by themselves: prompt lookup against a slow search, the draft model against its own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dropmatch import Engine
from dropmatch.config import DraftConfig
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.drafting import DraftModel, PromptLookup
from dropmatch.errors import SettingError

GREEDY = TokenChooser()


def slow_lookup(ids: list[int], length: int, longest: int, shortest: int, vocab: int) -> list[int]:
    """Last earlier occurrence of the longest ending; what followed it, up to an unknown token."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if len(ids) > size and ids[start : start + size] == ids[-size:]:
                following = ids[start + size : start + size + length]
                unknown = next((i for i, token in enumerate(following) if token >= vocab), len(following))
                return following[:unknown]
    return []


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=25),
    length=st.integers(1, 6),
    grams=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    vocab=st.integers(3, 6),
)
@settings(max_examples=400, deadline=None)
def test_prompt_lookup(ids: list[int], length: int, grams: list[int], vocab: int) -> None:
    drafter = PromptLookup().begin()
    drafter.check(len(ids), 10, vocab)
    config = DraftConfig(min_ngram=grams[0], max_ngram=grams[1])
    draft = drafter.propose(torch.tensor(ids), length, GREEDY, config)
    assert draft.tokens.tolist() == slow_lookup(ids, length, grams[1], grams[0], vocab)
    assert draft.tokens.dtype == torch.int64
    assert draft.logits is None
    assert draft.probabilities is None


def begin(model: Any, vocab: int, **options: Any) -> DraftModel:
    drafter = DraftModel(model, **options).begin()
    drafter.check(10, 10, vocab)
    return drafter


@torch.no_grad()
def test_a_greedy_draft_is_what_the_draft_model_generates(tiny: Any, family: str) -> None:
    draft = tiny.pair(family)[1]
    drafter, ids = begin(draft, tiny.VOCAB), tiny.prompt(1)
    for kept in (3, 0, 6, 2, 5):
        proposal = drafter.propose(ids, 6, GREEDY, DraftConfig())
        assert proposal.tokens.tolist() == tiny.oracle(draft, ids, 6)
        rows = tiny.full_logits(draft, ids.tolist() + proposal.tokens.tolist())[ids.shape[0] - 1 : -1]
        torch.testing.assert_close(proposal.logits, rows, rtol=1e-3, atol=1e-3)
        assert proposal.probabilities is None
        ids = torch.cat([ids, proposal.tokens[:kept], tiny.prompt(kept + 50, 1)])
        drafter.commit(ids)


@torch.no_grad()
def test_a_sampled_draft_comes_with_its_distribution(tiny: Any) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    draft, ids = tiny.pair("llama")[1], tiny.prompt(1)
    chooser = TokenChooser(warpers=(TemperatureLogitsWarper(1.5), TopKLogitsWarper(4)), sample=True, seed=3)
    proposal = begin(draft, tiny.VOCAB).propose(ids, 6, chooser, DraftConfig())
    rows = tiny.full_logits(draft, ids.tolist() + proposal.tokens.tolist())[ids.shape[0] - 1 : -1]
    torch.testing.assert_close(proposal.logits, rows, rtol=1e-3, atol=1e-3)
    expected = TopKLogitsWarper(4)(None, rows / 1.5).softmax(dim=-1)
    torch.testing.assert_close(proposal.probabilities, expected, rtol=1e-3, atol=1e-3)
    assert bool((proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all())


@torch.no_grad()
def test_processors_reach_the_draft(tiny: Any) -> None:
    draft, ids = tiny.pair("llama")[1], tiny.prompt(1)
    banned = tiny.oracle(draft, ids, 3)

    def ban(prefix: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(banned), -torch.inf)

    proposal = begin(draft, tiny.VOCAB).propose(ids, 5, TokenChooser(processors=(ban,)), DraftConfig())
    assert not set(proposal.tokens.tolist()) & set(banned)
    assert bool(proposal.logits[:, banned].isneginf().all())


def test_begin_gives_states_of_their_own(tiny: Any) -> None:
    draft = tiny.pair("mistral")[1]
    parent = DraftModel(draft)
    one, two = parent.begin(), parent.begin()
    assert one is not two
    ids = [tiny.prompt(1, 15), tiny.prompt(2, 9)]
    with torch.no_grad():
        for drafter, prompt in zip((one, two, one, two), ids * 2, strict=True):
            drafter.check(10, 10, tiny.VOCAB)
            assert drafter.propose(prompt, 3, GREEDY, DraftConfig()).tokens.tolist() == tiny.oracle(draft, prompt, 3)
            drafter.commit(prompt)


def reduced(tiny: Any) -> tuple[Any, Any, Tensor]:
    """A target, and a draft whose head has the rows of 40 of its tokens only (d2t)."""
    target, draft = tiny.build_model("llama"), tiny.perturb(tiny.build_model("llama"), 0.03)
    favourites = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(0))[:70]
    head = torch.nn.Linear(48, 70, bias=False)
    head.weight = torch.nn.Parameter(draft.lm_head.weight[favourites].detach().clone())
    draft.lm_head = head
    return target, draft, favourites


@pytest.mark.parametrize("rule", ["strict", "naive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_7_a_reduced_vocabulary(tiny: Any, rule: str, temperature: float) -> None:
    """Ids are mapped before any comparison; js is refused."""
    target, draft, token_map = reduced(tiny)
    engine = Engine(target, tiny.word_tokenizer(), DraftModel(draft, token_map=token_map))
    accepted = 0
    for seed in range(4):
        prompt = tiny.prompt(seed)
        options = {"rule": rule, "temperature": temperature, "seed": seed, "max_tokens": 30, "dropout": 0.0}
        result = engine.generate(prompt, trace=True, ignore_eos=True, **options)
        drafted = {entry.token for entries in result.trace for entry in entries}
        assert drafted <= set(token_map.tolist())
        accepted += result.statistics.accepted
        if not temperature:
            assert result.token_ids == tiny.oracle(target, prompt, 30)
    assert accepted > 5
    with pytest.raises(SettingError, match=r"js.*distribution"):
        engine.stream(tiny.prompt(1), rule="js")
