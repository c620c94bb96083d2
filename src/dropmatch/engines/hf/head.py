"""The LM head of a transformers model, as the acceptance core wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmatch.errors import ModelError
from dropmatch.heads import Finish, gathered_logits
from dropmatch.models.packing import PackedLinear

_known: WeakKeyDictionary[Any, ModelHead] = WeakKeyDictionary()


class ModelHead:
    """Everything between hidden state and logits: the head module and what the model does after it.

    Heads are made by calling the model's own head module (quantised and adapted ones too), not its weight.
    Rows are gathered only where the module is a plain linear layer.

    Args:
        model: a causal LM of transformers.

    Raises:
        ModelError: the model has no output embeddings, or dropmatch cannot reproduce its logits from them.
    """

    @classmethod
    def of(cls, model: Any) -> ModelHead:
        """The head of a model, made once for as long as the model keeps that head."""
        known = _known.get(model)
        if known is None or known._module is not model.get_output_embeddings():
            known = _known[model] = cls(model)
        return known

    def __init__(self, model: Any) -> None:
        module = model.get_output_embeddings()
        if module is None:
            raise ModelError(f"{type(model).__name__} has no LM head (get_output_embeddings() is None)")
        self._module: nn.Module = module
        self._captured: Tensor | None = None
        self.can_gather = type(module) in (nn.Linear, PackedLinear)
        self.finish = self._find_finish(model)
        self.vocab_size = self._probe_size

    @contextmanager
    def capture(self) -> Iterator[None]:
        """While active, each forward of the model leaves the head's input in `hidden()`."""

        def remember(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._captured = inputs[0]

        handle = self._module.register_forward_pre_hook(remember)
        try:
            yield
        finally:
            handle.remove()
            self._captured = None

    def hidden(self, rows: int) -> Tensor:
        """The head's input at the last `rows` positions of the last forward: [rows, d]."""
        assert self._captured is not None, "no forward since capture() began"
        return self._captured[0, -rows:]

    def last_hidden(self) -> Tensor:
        """The head's input at the last position of each of the B sequences of the last forward: [B, d]."""
        assert self._captured is not None, "no forward since capture() began"
        return self._captured[:, -1]

    def full(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V]."""
        return self.finish(self._module(hidden))

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[n, K, d], [n, S] -> [n, K, S]."""
        weight, bias = self._module.weight, self._module.bias
        logits = gathered_logits(hidden, token_ids, weight, bias)  # type: ignore[arg-type]
        return self.finish(logits)

    def rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, S] -> [n, S, d], [n, S]."""
        weight, bias = self._module.weight, self._module.bias
        return F.embedding(token_ids, weight), None if bias is None else bias[token_ids]  # type: ignore

    def _find_finish(self, model: Any) -> Finish:
        """The function that turns the head's output into the model's logits, found by trying it."""
        token = torch.tensor([[0, 1]], device=model.device)
        with torch.no_grad(), self.capture():
            logits = model(input_ids=token, use_cache=False).logits[0].float()  # [2, V]
            raw = self._module(self.hidden(2))
        self._probe_size = logits.shape[1]
        candidates = _candidates(model.config.get_text_config())
        errors = [_error(finish(raw).float(), logits) for finish in candidates]
        best = min(errors)
        if best <= 1e-2:
            # where small logits cannot tell two apart, the config's own soft-cap or scale comes first
            return next(c for c, error in zip(candidates, errors, strict=True) if error <= 2 * best)
        raise ModelError(
            f"{type(model).__name__} changes its logits after the LM head in a way that dropmatch does not "
            "know, so dropout heads would not be its own (without dropout they must reproduce its logits). "
            "Known: nothing, a soft-cap, a scale. Please report the model."
        )


def _candidates(config: Any) -> list[Finish]:
    """What models do after the head, by the names that their configs use; most special first."""
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            scales += [float(value), 1.0 / float(value)]
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "softcap", "logit_softcap")]
    found = [float(cap) for cap in caps if isinstance(cap, (int, float)) and cap]
    return [Finish(scale, cap) for cap in [*found, None] for scale in reversed(scales)]


def _error(made: Tensor, logits: Tensor) -> float:
    """Largest difference over the largest logit: [n, V'], [n, V] -> infinite if the sizes differ."""
    if made.shape != logits.shape:
        return float("inf")
    return float((made - logits).abs().max() / logits.abs().max().clamp_min(1e-30))
