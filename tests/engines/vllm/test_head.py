"""vLLM's LM head: gathered logits are those of `compute_logits`, on one rank and on two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from verifier_batches import JS
from verifier_reference import expected
from verifier_support import CPU, UNITS, make_ask, run
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor as vllm_logits
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding

from acceptance.support import random_head
from dropmatch.engines.vllm.head import VllmHead
from dropmatch.errors import ModelError


class Model:
    """A model as vLLM loads it, as far as its head: `vocab` tokens."""

    def __init__(
        self, vocab: int, units: int = 16, *, bias: bool = False, uses_bias: bool = True, **finish: Any
    ) -> None:
        with set_current_vllm_config(VllmConfig()):
            self.lm_head = vllm_embedding.ParallelLMHead(vocab, units, bias=bias)
            self.logits_processor = vllm_logits.LogitsProcessor(vocab, **finish)
        weight = torch.randn(vocab, units, generator=torch.Generator().manual_seed(3))
        shard = self.lm_head.shard_indices
        mine = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        self.lm_head.weight.data.fill_(99.0)  # padding is never to be read
        self.lm_head.weight.data[: weight[mine].shape[0]] = weight[mine]
        if bias:
            values = torch.linspace(-2, 2, vocab)
            self.lm_head.bias.data.fill_(99.0)
            self.lm_head.bias.data[: values[mine].shape[0]] = values[mine]
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        self.uses_bias = uses_bias and bias

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden, self.lm_head.bias if self.uses_bias else None)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_world_size", lambda: 1)


FINISHES: list[dict[str, Any]] = [
    {},
    {"soft_cap": 5.0},
    {"scale": 0.25},
    {"soft_cap": 3.0, "scale": 2.0},
    {"bias": True},
    {"bias": True, "soft_cap": 3.0, "scale": -0.5},
]


def gather_like_full(head: VllmHead, vocab: int, units: int = 16) -> None:
    """Whether gathered logits are the columns of the full ones, for any ids, repeated or not."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(3, 4, units, generator=generator)  # [n, K, d]
    ids = torch.randint(vocab, (3, 50), generator=generator)
    ids[:, :2] = torch.tensor([0, vocab - 1])
    full = head.full(hidden.flatten(0, 1)).unflatten(0, (3, 4))  # [n, K, V]
    wanted = full.gather(2, ids[:, None].expand(-1, 4, -1))
    made = head.gather(hidden, ids)
    assert made.shape == (3, 4, 50)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    rows, bias = head.rows(ids)  # [n, S, d], [n, S]
    linear = torch.einsum("nkd,nsd->nks", hidden, rows) + (0.0 if bias is None else bias[:, None])
    torch.testing.assert_close(head.finish(linear), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_gathered_logits_are_columns_of_compute_logits(finish: dict[str, Any]) -> None:
    model = Model(100, **finish)
    head = VllmHead(model, 16, torch.float32, CPU)
    assert head.can_gather
    assert head.vocab_size == 100
    hidden = torch.randn(5, 16)
    assert torch.equal(head.full(hidden), model.compute_logits(hidden))
    gather_like_full(head, 100)


class TwoRanks:
    """Two tensor-parallel ranks, each in a thread of its own."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.barrier = threading.Barrier(2, timeout=20)
        self.slots: list[Any] = [None, None]
        self.summed: list[int] = []

    def exchange(self, value: Tensor) -> list[Tensor]:
        self.slots[self.local.rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def all_gather(self, value: Tensor) -> Tensor:
        return torch.cat(self.exchange(value), dim=-1)

    def all_reduce(self, value: Tensor) -> Tensor:
        assert value.is_contiguous()
        self.summed.append(value.numel())
        first, second = self.exchange(value)
        return first + second

    def run(self, work: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            self.local.rank = number
            try:
                work()
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors


@pytest.mark.parametrize("finish", FINISHES, ids=str)
@pytest.mark.parametrize("vocab", [100, 128, 190])
def test_gathered_logits_of_two_ranks_are_columns_of_compute_logits(
    finish: dict[str, Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TwoRanks()
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_rank", lambda: ranks.local.rank)
    monkeypatch.setattr(vllm_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(vllm_logits, "tensor_model_parallel_all_gather", ranks.all_gather)
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", ranks.all_reduce)
    made = threading.Lock()
    models: list[Model] = []

    def work() -> None:
        with made:  # vLLM's current config is global
            model = Model(vocab, **finish)
            models.append(model)
        product = model.lm_head.quant_method.apply

        def one_at_a_time(*args: Any, **kwargs: Any) -> Tensor:
            with made:  # vLLM's packed products on a CPU are not for two threads at once
                return product(*args, **kwargs)

        model.lm_head.quant_method.apply = one_at_a_time
        head = VllmHead(model, 16, torch.float32, CPU)
        assert head.can_gather
        gather_like_full(head, vocab)

    ranks.run(work)
    assert models[0].lm_head.weight.shape[0] < vocab
    # the probe, n x K x S logits of dropout heads, n x S rows and biases of Gaussian ones: never the vocabulary
    biases = {3 * 50} if finish.get("bias") else set()
    assert set(ranks.summed) == {2 * 64, 3 * 4 * 50, 3 * 50 * 16} | biases


@pytest.mark.usefixtures("one_rank")
def test_case_21_heads_that_are_no_plain_matrix_are_not_gathered_from() -> None:
    def quantised(model: Model) -> None:
        model.lm_head.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T)

    def without_weight(model: Model) -> None:
        weight = model.lm_head.weight.data
        del model.lm_head.weight
        model.lm_head.quant_method.apply = lambda layer, x, bias: x @ weight.T

    def upcast(model: Model) -> None:
        model.logits_processor.head_dtype = torch.float64

    def changed_afterwards(model: Model) -> None:
        made = model.compute_logits
        model.compute_logits = lambda hidden: made(hidden) + 1.5  # type: ignore[method-assign,assignment]

    def headless(model: Model) -> None:
        apply, head, processor = model.compute_logits, model.lm_head, model.logits_processor
        model.compute_logits = lambda hidden: processor(head, hidden, None)  # type: ignore[method-assign,assignment]
        del model.lm_head, apply

    for change in (quantised, without_weight, upcast, changed_afterwards, headless):
        model = Model(100)
        change(model)
        head = VllmHead(model, 16, torch.float32, CPU)
        assert not head.can_gather, change.__name__
        assert head.full(torch.randn(2, 16)).shape == (2, 100)
        assert head.vocab_size == 100


@pytest.mark.usefixtures("one_rank")
def test_a_head_whose_bias_the_model_ignores_is_found_by_the_probe() -> None:
    assert not VllmHead(Model(100, bias=True, uses_bias=False), 16, torch.float32, CPU).can_gather


@pytest.mark.usefixtures("one_rank")
def test_the_head_of_a_multimodal_models_language_model_is_found() -> None:
    inner = Model(100, soft_cap=4.0)
    head = VllmHead(SimpleNamespace(language_model=inner, compute_logits=inner.compute_logits), 16, torch.float32, CPU)
    assert head.can_gather
    gather_like_full(head, 100)


@pytest.mark.usefixtures("one_rank")
def test_a_head_in_bf16_passes_the_probe() -> None:
    model = Model(100, soft_cap=4.0)
    model.lm_head.weight.data = model.lm_head.weight.data.bfloat16()
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    head = VllmHead(model, 16, torch.bfloat16, CPU)
    assert head.can_gather
    assert head.gather(torch.randn(1, 2, 16).bfloat16(), torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_a_rank_without_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="compute_logits"):
        VllmHead(SimpleNamespace(compute_logits=lambda hidden: None), 16, torch.float32, CPU)


def test_the_verifier_judges_with_vllms_head_as_with_a_plain_one(one_rank: None) -> None:
    """The shortlist through `VllmHead.gather`, next to the reference's own head."""
    model = Model(400, UNITS)
    plain = random_head(400, UNITS, 1.0)
    plain.weight = model.lm_head.weight.data[:400]
    head = VllmHead(model, UNITS, torch.float32, CPU)
    batch = [
        make_ask(f"r{i}", [1, 0, 2], i, head=plain, options={**JS, "dropmatch_shortlist_size": 32}) for i in range(8)
    ]
    with patch("verifier_support.VOCAB", 400):
        outcome = run(batch, head=head)  # type: ignore[arg-type]
        answers = expected(batch, outcome, head=plain)
    assert outcome.tokens == {name: tokens for name, (tokens, _) in answers.items()}
    assert any("js" in report.accepted for report in outcome.report.values())
