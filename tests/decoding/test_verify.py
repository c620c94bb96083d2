"""One block against the target's logits, with hidden states and heads that the test scripts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmatch.config import AcceptanceConfig
from dropmatch.decoding.sampling import TokenChooser
from dropmatch.decoding.verify import Outcome, verify
from dropmatch.drafting import Draft

V, D = 20, 32


class LinearHead:
    """A plain head, counting the rows that it is asked for."""

    def __init__(self, seed: int = 0) -> None:
        self.weight = torch.randn(V, D, generator=torch.Generator().manual_seed(seed)) * 0.6
        self.vocab_size, self.can_gather, self.rows = V, True, 0

    def full(self, hidden: Tensor) -> Tensor:
        self.rows += hidden.shape[0]
        return hidden @ self.weight.T

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        raise AssertionError("the vocabulary is small: nothing to gather")


def scene(seed: int, n: int = 5, noise: float = 0.8) -> tuple[LinearHead, Tensor, Draft, Tensor]:
    """Head, hidden states [n + 1, D], a draft of n tokens by noisy logits, and the sequence [T + n]."""
    head, generator = LinearHead(), torch.Generator().manual_seed(seed)
    hidden = torch.randn(n + 1, D, generator=generator)
    logits = hidden[:n] @ head.weight.T + torch.randn(n, V, generator=generator) * noise
    tokens = logits.argmax(dim=-1)
    sequence = torch.cat([torch.randint(V, (4,), generator=generator), tokens])
    return head, hidden, Draft(tokens, logits, logits.softmax(dim=-1)), sequence


def run(seed: int, chooser: TokenChooser | None = None, **config: Any) -> tuple[Outcome, LinearHead, Tensor]:
    head, hidden, draft, sequence = scene(seed)
    clean = hidden @ head.weight.T
    outcome = verify(
        draft,
        clean,
        hidden,
        sequence,
        chooser or TokenChooser(),
        AcceptanceConfig(**{"verdict": "sampled"} | config),
        head,
    )
    return outcome, head, clean


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
@pytest.mark.parametrize("evaluation", ["lazy", "eager"])
def test_outcome_is_consistent(rule: str, evaluation: str) -> None:
    for seed in range(40):
        outcome, _, clean = run(seed, rule=rule, evaluation=evaluation)
        accepted = [entry.accepted for entry in outcome.trace]
        count = accepted.index(False) if False in accepted else len(accepted)
        assert not any(accepted[count:])
        assert outcome.tokens.tolist()[:count] == [entry.token for entry in outcome.trace[:count]]
        assert outcome.tokens.shape[0] == count + 1
        assert int(outcome.tokens[-1]) == int(clean[count].argmax()), "the clean token at a rejection and as bonus"
        assert all(entry.reason == "not reached" for entry in outcome.trace[count + 1 :])
        assert [entry.clean_token for entry in outcome.trace] == clean[:-1].argmax(dim=-1).tolist()
        assert all(entry.exact == (entry.token == entry.clean_token) for entry in outcome.trace)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rule", ["naive", "js"])
def test_case_25_lossy_rules_accept_at_least_what_strict_accepts(rule: str, sample: bool) -> None:
    gained = 0
    for seed in range(150):
        chooser = TokenChooser(sample=sample, seed=seed)
        strict = run(seed, chooser, rule="strict")[0]
        lossy = run(seed, chooser, rule=rule)[0]
        assert len(lossy.tokens) >= len(strict.tokens)
        gained += len(lossy.tokens) - len(strict.tokens)
        assert lossy.trace[0].exact == strict.trace[0].exact
    assert gained > 20


def test_lazy_asks_the_heads_only_where_the_draft_differs() -> None:
    for seed in range(30):
        outcome, head, _ = run(seed, rule="naive", heads=3)
        asked = [entry for entry in outcome.trace if entry.probability is not None]
        assert all(not entry.exact for entry in asked)
        assert head.rows == 3 * len(asked), "on a CPU no row behind the first rejection is judged"
        outcome, head, _ = run(seed, rule="strict")
        assert head.rows == 0


def test_eager_asks_about_every_reached_row() -> None:
    for seed in range(30):
        outcome, _, _ = run(seed, rule="js", evaluation="eager")
        reached = [entry for entry in outcome.trace if entry.reason != "not reached"]
        assert all(entry.js is not None and entry.radius is not None for entry in reached)
        for entry in reached:
            assert entry.accepted == (entry.reason in ("js", "majority"))


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_lazy_and_eager_agree_up_to_the_first_refused_match(rule: str) -> None:
    """They emit the same tokens as far as both go; eager is never longer."""
    shorter = 0
    for seed in range(150):
        lazy = run(seed, rule=rule)[0].tokens.tolist()
        eager = run(seed, rule=rule, evaluation="eager")[0].tokens.tolist()
        assert eager == lazy[: len(eager)]
        shorter += len(eager) < len(lazy)
    assert shorter > 0


def test_verdicts_are_keyed_by_seed_and_position() -> None:
    head, hidden, draft, sequence = scene(3, n=1)
    clean = hidden @ head.weight.T

    def probability(seed: int, shift: int, mask_seed: int | None = None) -> float | None:
        """What the heads' centroid gives the token when the prompt is `shift` tokens longer."""
        config = AcceptanceConfig("naive", verdict="sampled", heads=4, evaluation="eager", mask_seed=mask_seed)
        longer = torch.cat([sequence[:1].repeat(shift), sequence])
        return verify(draft, clean, hidden, longer, TokenChooser(seed=seed), config, head).trace[0].probability

    keys = list(itertools.product(range(3), range(3)))
    values = [probability(*key) for key in keys]
    assert None not in values
    assert len(set(values)) == 9
    assert [probability(*key) for key in keys] == values
    assert probability(0, 2, mask_seed=1) == probability(9, 2, mask_seed=1) == probability(1, 2)


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
@pytest.mark.parametrize("sample", [False, True])
def test_case_5_a_banned_token_is_never_accepted_nor_emitted(rule: str, sample: bool) -> None:
    """The ban reaches the draft token, the correction and the bonus, whatever the heads think."""

    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, banned] = -torch.inf
        return scores

    for seed in range(60):
        head, hidden, draft, sequence = scene(seed)
        clean = hidden @ head.weight.T
        banned = [int(draft.tokens[1]), int(clean[0].argmax()), int(clean[-1].argmax())]
        chooser = TokenChooser(processors=(ban,), sample=sample, seed=seed)
        outcome = verify(
            draft, clean, hidden, sequence, chooser, AcceptanceConfig(rule, verdict="sampled", dropout=0.6), head
        )
        assert not set(outcome.tokens.tolist()) & set(banned)
        assert outcome.tokens.shape[0] <= 2


def test_case_8_heads_centroid_and_draft_obey_the_mask() -> None:
    """Without dropout the numbers behind a verdict are those of the processed distributions, nothing else."""
    for seed in range(20):
        head, hidden, draft, sequence = scene(seed)
        clean = hidden @ head.weight.T
        shift = torch.zeros(V)
        shift[clean[0].topk(6).indices[1:]], shift[2::5] = -torch.inf, 1.5
        shift[draft.tokens] = 0.0
        chooser = TokenChooser(processors=(lambda ids, scores: scores + shift,))  # noqa: B023
        config = AcceptanceConfig("js", verdict="sampled", dropout=0.0, evaluation="eager", heads=2)
        processed = Draft(draft.tokens, draft.logits + shift.clamp_min(-9.0), draft.probabilities)
        entry = verify(processed, clean, hidden, sequence, chooser, config, head).trace[0]
        target = (clean[0] + shift).double().softmax(dim=-1)
        banned = torch.where(shift.isneginf(), -torch.inf, processed.logits[0])
        ours = banned.double().softmax(dim=-1)
        middle = (target + ours) / 2
        expected = sum(torch.special.xlogy(p, p / middle).nansum() / 2 for p in (target, ours))
        assert entry.probability == pytest.approx(float(target[draft.tokens[0]]), abs=1e-5)
        assert entry.js == pytest.approx(float(expected), abs=1e-5)
        assert entry.radius == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rule", ["strict", "naive", "js"])
def test_a_token_outside_top_k_is_never_accepted(rule: str) -> None:
    from transformers import TopKLogitsWarper

    warpers = (TopKLogitsWarper(2),)
    for seed in range(80):
        head, hidden, draft, sequence = scene(seed)
        clean = hidden @ head.weight.T
        chooser = TokenChooser(warpers=warpers, sample=True, seed=seed)
        outcome = verify(
            draft, clean, hidden, sequence, chooser, AcceptanceConfig(rule, verdict="sampled", dropout=0.6), head
        )
        for token, row in zip(outcome.tokens.tolist(), clean, strict=False):
            assert token in row.topk(2).indices.tolist()


def test_case_27_no_draft_rows() -> None:
    head, hidden, _, sequence = scene(0)
    empty = Draft(sequence[:0])
    for sample, rule in itertools.product((False, True), ("strict", "naive", "js")):
        chooser = TokenChooser(sample=sample)
        clean = hidden[:1] @ head.weight.T
        outcome = verify(empty, clean, hidden[:1], sequence, chooser, AcceptanceConfig(rule), head)
        assert outcome.tokens.shape == (1,)
        assert outcome.trace == []
