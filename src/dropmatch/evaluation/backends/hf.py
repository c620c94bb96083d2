"""The Hugging Face engine: one example at a time, any draft length per setting."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dropmatch.decoding.cached_model import CachedModel
from dropmatch.engines.hf.engine import Engine
from dropmatch.environment import machine, versions
from dropmatch.evaluation.backends.base import Group, Output, at_most, budget_of, naming
from dropmatch.evaluation.tasks import Example

if TYPE_CHECKING:
    from torch import Tensor


class HuggingFace:
    """Our Hugging Face engine as a backend.

    Args:
        engine: target and drafter.
    """

    name, group = "hf", 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def check(self, options: Mapping[str, Any]) -> None:
        """Start a request with these settings, and leave it before its first token."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._engine.stream([0], max_tokens=1, **options)

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None:
        """Start each losslessly, and leave it before its first token."""
        options = {"rule": "strict"} if self._engine.drafter is not None else {"rule": "strict", "draft_length": 0}
        for example in examples:
            with naming(example):
                prompt, earlier = at_most(example, max_tokens)
                budget = earlier + budget_of(example, max_tokens)
                self._engine.stream(self._engine.encode(prompt), max_tokens=budget, **options)

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        """One after the other."""
        outputs, start = [], time.perf_counter()
        for example in examples:
            budget, stop = budget_of(example, max_tokens), example.stop or None
            result = self._engine.generate(self.encode(example), stop=stop, max_tokens=budget, **options)
            counts = result.statistics
            outputs.append(
                Output(
                    text=cut(result.text, example.stop),
                    tokens=counts.generated,
                    finish=result.finish_reason,
                    rounds=counts.rounds,
                    proposed=counts.proposed,
                    accepted=counts.accepted,
                    lossy=counts.lossy,
                    reasons=dict(counts.reasons),
                    lengths=dict(counts.lengths),
                )
            )
        return Group(outputs, time.perf_counter() - start)

    @torch.inference_mode()
    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """One forward of the target over prompt and text."""
        found: list[float | None] = []
        for example, text in zip(examples, texts, strict=True):
            prompt = self.encode(example)
            ids = self._engine.tokenizer(text, add_special_tokens=False)["input_ids"]
            if not ids:
                found.append(None)
                continue
            answer = torch.tensor(ids, device=prompt.device)
            logits = CachedModel(self._engine.model).extend(torch.cat([prompt, answer]), keep=len(ids) + 1)[:-1]
            total = 0.0
            for rows, tokens in zip(logits.split(64), answer.split(64), strict=True):  # [n, V], [n]
                picked = rows.float().log_softmax(dim=1).gather(1, tokens[:, None])
                total += float(picked.sum())
            found.append(total / len(ids))
        return found

    def about(self) -> dict[str, Any]:
        """Versions and machine."""
        return {"engine": self.name, **versions(), **machine(self._engine.model.device)}

    def encode(self, example: Example) -> Tensor:
        """The prompt of an example: [T] ids."""
        return self._engine.encode(example.whole)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string: harnesses expect it without."""
    for end in stop:
        text = text.split(end, 1)[0]
    return text
