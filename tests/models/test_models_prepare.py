"""Packed weights, 4-bit draft weights and grouped attention compute what the plain model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dropmatch import Engine
from dropmatch.drafting import DraftModel
from dropmatch.engines.hf.head import ModelHead
from dropmatch.errors import ModelError
from dropmatch.models.draft_weights import GROUP, Int4RowLinear, quantize_draft
from dropmatch.models.grouped_attention import NAME, use_grouped_attention
from dropmatch.models.packing import PackedLinear, can_pack, pack_linears
from dropmatch.models.prepare import prepare_for_decoding

BF16 = torch.bfloat16
packs = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2, dtype=BF16)), reason="this processor cannot pack bf16 weights"
)


@packs
@pytest.mark.parametrize("rows", [1, 2, 6, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_is_the_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(64, 96, bias=bias).to(BF16)
    inputs = torch.randn(2, rows, 64, dtype=BF16)
    exact = nn.functional.linear(inputs.double(), linear.weight.double(), None if not bias else linear.bias.double())
    packed = PackedLinear(linear, keep_weight=True)(inputs)
    assert packed.dtype is BF16
    torch.testing.assert_close(packed.double(), exact, rtol=2**-7, atol=1e-2)


@packs
def test_packing_a_model_keeps_its_head_and_its_text(tiny: Any) -> None:
    model = tiny.build_model("qwen2").to(BF16)
    prompt = tiny.prompt(1)
    with torch.no_grad():
        before = model(prompt[None]).logits.float()
        assert pack_linears(model) > 0
        after = model(prompt[None]).logits.float()
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert ModelHead(model).can_gather
    torch.testing.assert_close(after, before, rtol=0.05, atol=0.05 * float(before.abs().max()))


def test_fp32_models_are_left_alone(tiny: Any) -> None:
    model = tiny.build_model("llama")
    assert pack_linears(model) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_grouped_attention_changes_no_token(tiny: Any, family: str) -> None:
    """fp32, prompts longer than a sliding window, blocks of one and of several rows."""
    plain, grouped = tiny.build_model(family), tiny.build_model(family)
    if not use_grouped_attention(grouped):
        pytest.skip(f"the tiny {family} has no grouped queries")
    assert grouped.config._attn_implementation == NAME
    draft = tiny.perturb(plain, 0.3)
    for seed in range(3):
        prompt = tiny.prompt(seed, 40)
        expected = tiny.plain_generate(plain, prompt, 30)
        for length in (0, 4):
            engine = Engine(grouped, tiny.word_tokenizer(), DraftModel(draft))
            result = engine.generate(prompt, rule="strict", draft_length=length, max_tokens=30)
            assert result.token_ids == expected


def test_grouped_attention_is_exercised_by_some_family(tiny: Any) -> None:
    assert any(use_grouped_attention(tiny.build_model(name)) for name in ("llama", "qwen2", "mistral"))


@packs
def test_int4_rows_are_the_weights_rounded_to_16_levels() -> None:
    """Against a dequantisation written out group by group."""
    torch.manual_seed(0)
    linear = nn.Linear(2 * GROUP, 32, bias=True).to(BF16)
    weight = linear.weight.detach().clone()
    expected = torch.empty_like(weight, dtype=torch.float64)
    for i in range(32):
        for g in range(2):
            group = weight[i, g * GROUP : (g + 1) * GROUP].double()
            step = (group.max() - group.min()) / 15
            expected[i, g * GROUP : (g + 1) * GROUP] = ((group - group.min()) / step).round() * step + group.min()
    layer = Int4RowLinear(PackedLinear(linear, keep_weight=False), weight)
    rows = layer(torch.eye(2 * GROUP, dtype=BF16)[:1])  # reads the first column of the weights
    spread = (weight.amax() - weight.amin()) / 15
    assert (rows[0].double() - linear.bias.double() - expected[:, 0]).abs().max() < 0.2 * spread
    inputs = torch.randn(1, 2 * GROUP, dtype=BF16)
    error = (layer(inputs).double() - nn.functional.linear(inputs.double(), expected, linear.bias.double())).abs()
    assert error.max() < 0.05


@packs
def test_a_quantised_draft_leaves_strict_decoding_lossless(tiny: Any) -> None:
    target = tiny.build_model("llama")
    draft = tiny.build_model("llama").to(BF16)
    try:
        assert quantize_draft(draft) > 0
    except ModelError:
        pytest.fail("the tiny draft's layers should take a 4-bit copy")
    prepare_for_decoding(draft)
    result = Engine(target, tiny.word_tokenizer(), DraftModel(draft)).generate(
        tiny.prompt(1), rule="strict", max_tokens=40, ignore_eos=True
    )
    assert result.token_ids == tiny.plain_generate(target, tiny.prompt(1), 40, eos_token_id=None)
    assert result.statistics.acceptance_rate > 0


def test_a_draft_that_cannot_be_quantised_is_refused(tiny: Any) -> None:
    with pytest.raises(ModelError, match="draft_weights='dense'"):
        quantize_draft(tiny.build_model("llama"))
