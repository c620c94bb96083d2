"""The LM head of a model in vLLM, as the acceptance core wants it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmatch.errors import ModelError
from dropmatch.heads import gathered_logits

PROBE_ROWS, PROBE_TOKENS = 2, 64


class VllmHead:
    """Everything between hidden state and logits, by vLLM's own `compute_logits`.

    That covers tensor parallelism, soft-caps, scales and quantised heads. Rows are gathered only from a plain
    head, and only after a probe has found the gathered logits equal to `compute_logits`' own; under tensor
    parallelism each rank then brings what it holds, and n x K x S logits (dropout heads) or n x S rows (Gaussian
    heads) are summed instead of n x K x V logits gathered.

    Args:
        model: the target, as vLLM loaded it.
        hidden_size: d.
        dtype: of the hidden states.
        device: where they are.

    Raises:
        ModelError: the model gives no logits on this rank.
    """

    def __init__(self, model: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(PROBE_ROWS, hidden_size, generator=generator).to(device, dtype)  # [n, d]
        logits = model.compute_logits(hidden)
        if logits is None:
            raise ModelError(
                "compute_logits gives no logits on this rank: dropmatch needs a platform that gathers logits on "
                "every tensor-parallel rank"
            )
        self.vocab_size: int = logits.shape[1]
        self._head, self._processor = _plain_head(model)
        self.can_gather = self._head is not None and self._gathers_right(hidden, logits, generator)

    @classmethod
    @torch.inference_mode()
    def of(cls, runner: Any) -> VllmHead:
        """The head of a model runner's target.

        Raises:
            ModelError: the model gives no logits on this rank.
        """
        config = runner.vllm_config.model_config
        return cls(runner.model, config.get_hidden_size(), config.dtype, runner.device)

    def full(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V]."""
        return self._model.compute_logits(hidden)

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[n, K, d], [n, S] -> [n, K, S]."""
        head = self._head
        local, mine = self._local(token_ids)
        logits = gathered_logits(hidden, local, head.weight, head.bias)
        if mine is not None:
            logits = _sum_over_ranks(logits.masked_fill(~mine[:, None], 0.0))
        return self.finish(logits)

    def rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, S] -> [n, S, d], [n, S]."""
        head = self._head
        local, mine = self._local(token_ids)
        weight = F.embedding(local, head.weight)
        bias = None if head.bias is None else head.bias[local]
        if mine is None:
            return weight, bias
        weight = _sum_over_ranks(weight.masked_fill(~mine[:, :, None], 0.0))
        return weight, None if bias is None else _sum_over_ranks(bias.masked_fill(~mine, 0.0))

    def finish(self, logits: Tensor) -> Tensor:
        """Any shape."""
        processor = self._processor
        if processor.soft_cap is not None:
            logits = torch.tanh(logits / processor.soft_cap) * processor.soft_cap
        return logits if processor.scale == 1.0 else logits * processor.scale

    def _local(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where tokens are on this rank, and which are: [n, S] -> [n, S], [n, S] bool; None if all are."""
        head = self._head
        if head.tp_size == 1:
            return token_ids, None
        shard = head.shard_indices
        mine = (token_ids >= shard.org_vocab_start_index) & (token_ids < shard.org_vocab_end_index)
        return torch.where(mine, token_ids - shard.org_vocab_start_index, 0), mine

    def _gathers_right(self, hidden: Tensor, logits: Tensor, generator: torch.Generator) -> bool:
        """Whether gathered logits are those of `compute_logits`: [n, d], [n, V]."""
        ids = torch.randint(self.vocab_size, (PROBE_ROWS, PROBE_TOKENS), generator=generator).to(hidden.device)
        made = self.gather(hidden[:, None], ids).squeeze(1).float()  # [n, S]
        wanted = logits.float().gather(1, ids)
        return bool((made - wanted).abs().max() <= 1e-2 * wanted.abs().max().clamp_min(1e-6))


def _plain_head(model: Any) -> tuple[Any, Any]:
    """The head module and its logits processor, or (None, None) where the head is not a plain matrix."""
    for owner in (model, getattr(model, "language_model", None)):
        head, processor = getattr(owner, "lm_head", None), getattr(owner, "logits_processor", None)
        if head is None or processor is None:
            continue
        method = type(getattr(head, "quant_method", None)).__name__
        weight = getattr(head, "weight", None)
        plain = method in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
        # an fp32 head over bf16 hidden states would be rounded otherwise here
        same_type = processor.head_dtype in (None, getattr(weight, "dtype", None))
        if plain and same_type and isinstance(weight, Tensor) and weight.dim() == 2 and weight.numel():
            return head, processor
    return None, None


def _sum_over_ranks(logits: Tensor) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(logits.contiguous())
