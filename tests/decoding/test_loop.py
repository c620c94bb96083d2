"""The round loop with scripted drafts: blocks are cut, counted and rolled back exactly (cases 1, 4, 14, 15, 27)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.loop import Block, Request, decode
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.stopping import StopRules
from dropmatch.engines.hf.head import ModelHead


class Scene:
    """A tiny target, its greedy continuation of a prompt, and a run of the loop on a scripted draft."""

    def __init__(self, tiny: Any, family: str = "llama") -> None:
        self.tiny = tiny
        self.model = tiny.pair(family)[0]
        self.prompt: Tensor = tiny.prompt(70, 6)
        self.clean: list[int] = tiny.oracle(self.model, self.prompt, 40)
        self.head = ModelHead(self.model)
        self.statistics = Statistics()

    def wrong(self, token: int) -> int:
        return 3 + (token - 3 + 1) % (self.tiny.VOCAB - 3)

    def script(self, verdicts: str) -> Callable[[list[int]], list[int]]:
        """A draft of right (T) and wrong (F) tokens after any prefix of the clean continuation."""

        def propose(ids: list[int]) -> list[int]:
            coming = self.clean[len(ids) - self.prompt.shape[0] :]
            return [t if v == "T" else self.wrong(t) for t, v in zip(coming, verdicts, strict=False)]

        return propose

    def run(self, script: Callable[[list[int]], list[int]] | None, length: int = 5, **stop: Any) -> list[Block]:
        self.drafter = None if script is None else self.tiny.ScriptedDrafter(script)
        stop = {"max_tokens": 12, **stop}
        self.target = CachedModel(self.model)
        request = Request(
            self.prompt, TokenChooser(), StopRules(**stop), AcceptanceConfig("strict"), DraftConfig(length)
        )
        return list(decode(self.target, self.head, self.drafter, request, self.statistics))


@pytest.fixture
def scene(tiny: Any) -> Scene:
    return Scene(tiny)


def tokens_of(blocks: list[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


def assert_identities(statistics: Statistics, blocks: list[Block]) -> None:
    assert statistics.rounds == len(blocks)
    assert statistics.generated == sum(len(block.tokens) for block in blocks)
    assert 0 <= statistics.accepted <= statistics.proposed
    assert statistics.acceptance_length == 1 + statistics.accepted / statistics.rounds
    assert statistics.accepted == sum(statistics.reasons.values())
    # all rounds but the last end with a token of the target's own
    assert statistics.generated - statistics.accepted in (len(blocks), len(blocks) - 1)
    for block in blocks:
        assert len(block.tokens) == len(block.reasons) == len(block.exact) >= 1
        assert (block.finish is not None) == (block is blocks[-1])


def test_case_15_verdicts_true_false_true_true(scene: Scene) -> None:
    blocks = scene.run(scene.script("TFTT"), max_tokens=30)
    first = blocks[0]
    assert first.tokens == scene.clean[:2]
    assert first.reasons == ["exact", "correction"]
    assert [entry.reason for entry in first.trace] == ["exact", "rejected", "not reached", "not reached"]
    assert [entry.accepted for entry in first.trace] == [True, False, False, False]
    assert tokens_of(blocks) == scene.clean[:30]
    assert_identities(scene.statistics, blocks)


def test_case_14_nothing_accepted_is_a_rate_of_zero(scene: Scene) -> None:
    blocks = scene.run(scene.script("FFFFF"), max_tokens=9)
    assert tokens_of(blocks) == scene.clean[:9]
    assert scene.statistics.acceptance_rate == 0.0
    assert scene.statistics.acceptance_length == 1.0
    assert (scene.statistics.rounds, scene.statistics.accepted) == (9, 0)
    # 5 in each of the first four rounds, then what the budget leaves
    assert scene.statistics.proposed == 5 * 4 + 4 + 3 + 2 + 1
    assert_identities(scene.statistics, blocks)


def test_case_14_everything_accepted_is_a_rate_of_one(scene: Scene) -> None:
    blocks = scene.run(scene.script("TTTTT"), max_tokens=12)
    assert tokens_of(blocks) == scene.clean[:12]
    assert [block.tokens for block in blocks] == [scene.clean[:6], scene.clean[6:12]]
    assert [block.reasons[-1] for block in blocks] == ["bonus", "bonus"]
    assert scene.statistics.acceptance_rate == 1.0
    assert scene.statistics.acceptance_length == 6.0
    assert scene.statistics.proposed == scene.statistics.accepted == 10


@pytest.mark.parametrize("budget", range(1, 13))
@pytest.mark.parametrize("verdicts", ["TTTTT", "TTFTT", "FTTTT"])
def test_case_4_exactly_the_budget(scene: Scene, budget: int, verdicts: str) -> None:
    blocks = scene.run(scene.script(verdicts), max_tokens=budget)
    assert tokens_of(blocks) == scene.clean[:budget]
    assert scene.statistics.generated == budget
    assert blocks[-1].finish == ("length", None)
    assert scene.target.length == scene.prompt.shape[0] + budget - 1
    assert_identities(scene.statistics, blocks)


@pytest.mark.parametrize("at", range(0, 8))
@pytest.mark.parametrize("verdicts", ["TTTTT", "TTFTT", "FFFFF"])
def test_case_1_end_of_sequence_inside_a_block(scene: Scene, at: int, verdicts: str) -> None:
    """Whichever position of a block EOS falls on: output, cache, drafter and statistics end there."""
    eos = scene.clean[at]
    at = scene.clean.index(eos)
    blocks = scene.run(scene.script(verdicts), max_tokens=30, eos_token_ids=frozenset({eos}))
    assert tokens_of(blocks) == scene.clean[: at + 1]
    assert blocks[-1].finish == ("stop", eos)
    ids = scene.prompt.tolist() + scene.clean[: at + 1]
    assert scene.target.length == len(ids) - 1
    assert scene.target._cache.get_seq_length() == len(ids) - 1
    assert scene.drafter is not None
    assert scene.drafter.committed[-1] == ids
    assert scene.statistics.generated == at + 1
    assert_identities(scene.statistics, blocks)


def test_case_1_tokens_after_the_end_are_neither_accepted_nor_proposed(scene: Scene) -> None:
    eos = scene.clean[1]
    assert scene.clean.index(eos) == 1
    scene.run(scene.script("TTTT"), eos_token_ids=frozenset({eos}))
    assert (scene.statistics.proposed, scene.statistics.accepted, scene.statistics.generated) == (2, 2, 2)
    assert scene.statistics.acceptance_rate == 1.0
    assert scene.statistics.reasons == {"exact": 2}


def test_end_of_sequence_as_correction_counts_the_rejected_token(scene: Scene) -> None:
    eos = scene.clean[1]
    scene.run(scene.script("TFTT"), eos_token_ids=frozenset({eos}))
    assert (scene.statistics.proposed, scene.statistics.accepted, scene.statistics.generated) == (2, 1, 2)


def test_a_wrong_end_of_sequence_in_the_draft_does_not_end(scene: Scene) -> None:
    eos = next(token for token in range(3, 100) if token not in scene.clean)
    blocks = scene.run(lambda ids: [eos, eos], max_tokens=8, eos_token_ids=frozenset({eos}))
    assert tokens_of(blocks) == scene.clean[:8]


def test_end_of_sequence_in_the_prompt_does_not_end(scene: Scene) -> None:
    blocks = scene.run(scene.script("TT"), max_tokens=8, eos_token_ids=frozenset({int(scene.prompt[-1])} - {-1}))
    assert len(tokens_of(blocks)) >= 1
    assert tokens_of(blocks) == scene.clean[: len(tokens_of(blocks))]


def test_a_criterion_sees_every_token_once_and_cuts(scene: Scene) -> None:
    seen: list[list[int]] = []

    def criterion(ids: Tensor, scores: Any) -> Tensor:
        seen.append(ids[0].tolist())
        return torch.tensor([ids.shape[1] - scene.prompt.shape[0] >= 4])

    blocks = scene.run(scene.script("TTTTT"), max_tokens=30, criteria=(criterion,))
    assert tokens_of(blocks) == scene.clean[:4]
    assert blocks[-1].finish == ("stop", None)
    assert seen == [scene.prompt.tolist() + scene.clean[: i + 1] for i in range(4)]
    assert (scene.statistics.proposed, scene.statistics.accepted) == (4, 4)


def test_case_27_a_round_without_draft_rows(scene: Scene) -> None:
    """A drafter that finds nothing, now and then or always, and no drafter at all."""
    blocks = scene.run(lambda ids: [] if len(ids) % 2 else scene.script("TT")(ids), max_tokens=11)
    assert tokens_of(blocks) == scene.clean[:11]
    assert any(not block.trace for block in blocks)
    assert_identities(scene.statistics, blocks)
    for script in (lambda ids: [], None):
        scene.statistics = Statistics()
        blocks = scene.run(script, max_tokens=7)
        assert [block.tokens for block in blocks] == [[token] for token in scene.clean[:7]]
        assert [block.reasons for block in blocks] == [["bonus"]] * 7
        assert (scene.statistics.proposed, scene.statistics.acceptance_rate) == (0, 0.0)
        assert scene.statistics.acceptance_length == 1.0


def test_the_last_round_does_not_draft_what_the_budget_cuts(scene: Scene) -> None:
    scene.run(scene.script("TTTTT"), max_tokens=8)
    assert scene.drafter is not None
    assert [len(tokens) for tokens in scene.drafter.proposed] == [5, 1]


def test_the_drafter_is_told_what_was_committed(scene: Scene) -> None:
    blocks = scene.run(scene.script("TFT"), max_tokens=9)
    ids, expected = scene.prompt.tolist(), []
    for block in blocks:
        ids = ids + block.tokens
        expected.append(ids)
    assert scene.drafter is not None
    assert scene.drafter.committed == expected


@pytest.mark.parametrize("verdicts", ["TTTTT", "TTFTT", "FTTTT"])
def test_cache_after_a_run_is_a_fresh_prefill(tiny: Any, family: str, verdicts: str) -> None:
    scene = Scene(tiny, family)
    scene.run(scene.script(verdicts), max_tokens=24)
    ids = torch.cat([scene.prompt, torch.tensor(scene.clean[:23])])
    fresh = CachedModel(scene.model)
    with torch.no_grad():
        fresh.extend(ids, keep=1)
    fresh.rollback(ids.shape[0])
    for layer, expected in zip(scene.target._cache.layers, fresh._cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)


def test_a_second_run_is_not_touched_by_the_first(scene: Scene) -> None:
    scene.run(scene.script("TTFTT"), max_tokens=20)
    blocks = scene.run(scene.script("TTFTT"), max_tokens=20)
    assert tokens_of(blocks) == scene.clean[:20]


def test_head_hooks_are_removed(scene: Scene) -> None:
    module = scene.model.get_output_embeddings()
    before = len(module._forward_pre_hooks)
    scene.run(scene.script("TT"))
    assert len(module._forward_pre_hooks) == before
