"""The head of a model: it reproduces the model's logits, whatever comes after it (case 21)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dropmatch import Engine
from dropmatch.drafting import DraftModel
from dropmatch.engines.hf.engine import HeadsModeWarning
from dropmatch.engines.hf.head import ModelHead
from dropmatch.errors import ModelError, SettingError


class Wrapped(nn.Module):
    """A head without `.weight`, as quantised or adapted ones are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


@torch.no_grad()
def captured(model: Any, head: ModelHead, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The head's input and the model's logits at every position."""
    with head.capture():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        return head.hidden(ids.shape[0]), logits


@torch.no_grad()
def assert_reproduces(model: Any, ids: Tensor, tolerance: float = 1e-4) -> None:
    """full and gather on the clean hidden states are the model's own logits."""
    head = ModelHead(model)
    hidden, logits = captured(model, head, ids)
    torch.testing.assert_close(head.full(hidden), logits, rtol=tolerance, atol=tolerance)
    assert head.vocab_size == logits.shape[1]
    if head.can_gather:
        picked = torch.stack([torch.randperm(logits.shape[1])[:20] for _ in range(ids.shape[0])])
        made = head.gather(hidden[:, None].repeat(1, 3, 1), picked)
        expected = logits.gather(1, picked)[:, None].repeat(1, 3, 1)
        torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance)
        rows, bias = head.rows(picked)
        linear = torch.einsum("nd,nsd->ns", hidden, rows) + (0.0 if bias is None else bias)
        torch.testing.assert_close(head.finish(linear), logits.gather(1, picked), rtol=tolerance, atol=tolerance)


def test_the_models_logits_are_reproduced(tiny: Any, family: str) -> None:
    assert_reproduces(tiny.pair(family)[0], tiny.prompt(1, 30))


@pytest.mark.parametrize("peak", [0.01, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "llama"])
def test_reproduced_however_large_the_logits_are(tiny: Any, family: str, peak: float) -> None:
    """Small logits hide a soft-cap or a scale from a loose comparison with the probe's logits."""
    model = tiny.build_model(family, peak=peak)
    ids = tiny.prompt(1, 30)
    head = ModelHead(model)
    hidden, logits = captured(model, head, ids)
    with torch.no_grad():
        torch.testing.assert_close(head.full(hidden), logits, rtol=1e-4, atol=1e-6 * peak)


def test_a_soft_cap_that_the_probe_hardly_shows(tiny: Any) -> None:
    """Gemma 2's cap of 30 changes logits of 4 by 0.6 %, those of 40 by 40 %: dropout makes such ones."""
    model = tiny.build_model("gemma2", peak=1.2, final_logit_softcapping=30.0)
    head = ModelHead(model)
    hidden, _ = captured(model, head, tiny.prompt(1, 8))
    with torch.no_grad():
        large = head.full(hidden * 40)
    assert float(large.abs().max()) <= 30.0


def test_a_head_with_a_bias(tiny: Any) -> None:
    model = tiny.build_model("llama")
    model.lm_head.bias = nn.Parameter(torch.randn(tiny.VOCAB))
    assert_reproduces(model, tiny.prompt(2))


def test_tied_embeddings(tiny: Any) -> None:
    assert_reproduces(tiny.build_model("llama", tie_word_embeddings=True), tiny.prompt(2))


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_case_21_a_head_without_a_weight(tiny: Any, rule: str) -> None:
    """The module is called, not its weight; a shortlist is refused before the first token."""
    plain = tiny.build_model("llama", vocab_size=600)
    wrapped = tiny.perturb(plain, 0.0)
    wrapped.lm_head = Wrapped(wrapped.lm_head)
    drafter, tokenizer = DraftModel(tiny.perturb(plain, 0.05)), tiny.word_tokenizer(600)
    assert_reproduces(wrapped, tiny.prompt(1))
    engine = Engine(wrapped, tokenizer, drafter)
    assert not engine.head.can_gather
    with pytest.raises(SettingError, match=r"shortlist.*full"):
        engine.stream(tiny.prompt(1), rule=rule, support="shortlist", shortlist_size=32)
    options = {"rule": rule, "verdict": "sampled", "max_tokens": 30, "dropout": 0.4, "seed": 3}
    reference = Engine(plain, tokenizer, drafter).generate(tiny.prompt(1), support="full", **options)
    for support in ("auto", "full"):
        result = engine.generate(tiny.prompt(1), support=support, shortlist_size=32, **options)
        assert result.token_ids == reference.token_ids
    assert reference.statistics.lossy > 0
    assert engine.generate(tiny.prompt(1), rule="strict", support="shortlist", max_tokens=4).token_ids


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_case_21_a_head_without_rows_is_denoised_with_dropout_heads_and_says_so(tiny: Any, rule: str) -> None:
    plain = tiny.build_model("llama")
    wrapped = tiny.perturb(plain, 0.0)
    wrapped.lm_head = Wrapped(wrapped.lm_head)
    drafter, tokenizer = DraftModel(tiny.perturb(plain, 0.05)), tiny.word_tokenizer()
    options = {"rule": rule, "verdict": "denoised", "max_tokens": 30, "dropout": 0.2}
    with pytest.warns(HeadsModeWarning, match=r"dropout heads over the full vocabulary.*64 x K"):
        result = Engine(wrapped, tokenizer, drafter).generate(tiny.prompt(1), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadsModeWarning)
        reference = Engine(plain, tokenizer, drafter).generate(tiny.prompt(1), heads_mode="dropout", **options)
    assert result.token_ids == reference.token_ids
    assert result.statistics.lossy > 0


def test_case_21_unknown_changes_after_the_head_are_refused(tiny: Any) -> None:
    """A model that does something to its logits that dropmatch cannot know."""
    model = tiny.build_model("llama")
    forward = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5 + 0.3
        return output

    model.forward = shifted
    with pytest.raises(ModelError, match="after the LM head"):
        Engine(model, tiny.word_tokenizer())


def test_a_model_without_a_head_is_refused(tiny: Any) -> None:
    with pytest.raises(ModelError, match="no LM head"):
        Engine(tiny.build_model("llama").model, tiny.word_tokenizer())


def test_an_encoder_decoder_is_refused(tiny: Any) -> None:
    with pytest.raises(ModelError, match="encoder-decoder"):
        Engine(tiny.build_model("t5"), tiny.word_tokenizer())
    with pytest.raises(ModelError, match="encoder-decoder"):
        DraftModel(tiny.build_model("t5"))


def test_a_model_with_a_recurrent_state_is_refused(tiny: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="recurrent"):
        Engine(model, tiny.word_tokenizer())


def test_capture_forgets_at_its_end(tiny: Any) -> None:
    model = tiny.pair("llama")[0]
    head = ModelHead(model)
    captured(model, head, tiny.prompt(1))
    with pytest.raises(AssertionError):
        head.hidden(1)
    assert not model.lm_head._forward_pre_hooks


def test_noisy_heads_are_warned_about(tiny: Any) -> None:
    """Heavy dropout on a small hidden state lets a uniform draft pass; light dropout does not."""
    from dropmatch.engines.hf.engine import NoisyHeadsWarning

    # a flat target with rare matches asks the rule at every position
    target = tiny.build_model("llama", peak=2.0)
    engine = Engine(target, tiny.word_tokenizer(), DraftModel(tiny.perturb(target, 0.4)))
    with pytest.warns(NoisyHeadsWarning, match="dropout p=0.9.*token_floor"):
        engine.generate(tiny.prompt(1), rule="js", dropout=0.9, token_floor=0, max_tokens=60, ignore_eos=True)


def test_clean_heads_are_not_warned_about(tiny: Any, recwarn: pytest.WarningsRecorder) -> None:
    target = tiny.build_model("llama", peak=6.0)
    engine = Engine(target, tiny.word_tokenizer(), DraftModel(tiny.perturb(target, 0.4)))
    result = engine.generate(tiny.prompt(1), rule="js", dropout=0.02, max_tokens=60, ignore_eos=True)
    assert result.statistics.judged >= 16
    assert not [w for w in recwarn if "uniform draft" in str(w.message)]


def test_noisy_heads_warning_points_at_the_caller(tiny: Any) -> None:
    from dropmatch.engines.hf.engine import NoisyHeadsWarning

    target = tiny.build_model("llama", peak=2.0)
    engine = Engine(target, tiny.word_tokenizer(), DraftModel(tiny.perturb(target, 0.4)))
    with pytest.warns(NoisyHeadsWarning) as caught:
        engine.generate(tiny.prompt(1), rule="js", dropout=0.9, token_floor=0, max_tokens=60, ignore_eos=True)
    assert caught[0].filename == __file__
