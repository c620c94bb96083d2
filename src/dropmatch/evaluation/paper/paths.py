"""Texts decoded through one head of the LM head: at each position the token is the argmax of head i (equation 3).

Greedy and without a draft. The masks of a position are those that a verdict there would be asked with, so head i is
the i-th of the K heads of `heads_mode="dropout"` under the same seed. p = 0 is plain greedy decoding.

All paths of one prompt are decoded together, a token at a time: they are equally long until they end, so that one
forward reads the weights for all of them. B paths, T tokens so far, d units in the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.stopping import StopRules
from dropmatch.evaluation.backends.base import Output
from dropmatch.evaluation.backends.hf import HuggingFace, cut
from dropmatch.evaluation.tasks import Example
from dropmatch.masks import dropout_masks


@dataclass(frozen=True)
class Path:
    """A way through the LM head.

    Attributes:
        dropout: p; 0 is no dropout, whatever the head and the seed.
        head: which of the heads, from 0.
        seed: mask seed.
    """

    dropout: float
    head: int = 0
    seed: int = 0


NO_DROPOUT = Path(0.0)


def all_paths(dropouts: Sequence[float], heads: int, seeds: Sequence[int]) -> list[Path]:
    """No dropout first, then K heads for each p and seed."""
    return [NO_DROPOUT, *(Path(p, head, seed) for p in dropouts if p for seed in seeds for head in range(heads))]


class _Forked(CachedModel):
    """A model with the caches of several sequences of one length."""

    def fork(self, times: int) -> None:
        """One sequence becomes `times` equal ones."""
        self._cache.batch_repeat_interleave(times)

    def select(self, rows: Tensor) -> None:
        """Keep some of the sequences: [n] int64."""
        self._cache.batch_select_indices(rows)

    def step(self, tokens: Tensor) -> None:
        """Add one token to each: [B]."""
        self.model(input_ids=tokens[:, None], use_cache=True, return_dict=True, **{self._cache_argument: self._cache})
        self.length += 1
        self.rollback(self.length)  # sliding windows drop what is out of them


@torch.inference_mode()
def decode_paths(engine: Any, example: Example, paths: Sequence[Path], max_tokens: int) -> list[Output]:
    """The text of an example through each of the paths.

    Args:
        engine: of the Hugging Face kind; its drafter is not used.
        example: its stop strings and budget hold.
        paths: B of them.
        max_tokens: the most tokens.

    Raises:
        SettingError: prompt and tokens do not fit the model's context.
    """
    prompt = HuggingFace(engine).encode(example)  # [T]
    budget = min(max_tokens, example.max_tokens or max_tokens)
    stop = StopRules(
        max_tokens=budget,
        eos_token_ids=engine.eos_token_ids(),
        stop_strings=example.stop,
        decode=lambda ids: engine.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )
    model = _Forked(engine.model)
    model.check_room(prompt.shape[0] + budget, "target")
    generated: list[list[int]] = [[] for _ in paths]
    finish = ["length"] * len(paths)
    alive = list(range(len(paths)))
    with engine.head.capture():
        model.extend(prompt, keep=1)
        model.rollback(model.length)
        hidden = engine.head.last_hidden().expand(len(paths), -1)  # [B, d]
        model.fork(len(paths))
        while True:
            dropped = through_heads(hidden, [paths[i] for i in alive], model.length)
            tokens = engine.head.full(dropped).float().argmax(dim=-1)  # [B]
            going = []
            for row, (path, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
                generated[path].append(token)
                reason = stop.reason(prompt, generated[path])
                if reason is None:
                    going.append(row)
                else:
                    finish[path] = reason[0]
            if not going:
                break
            if len(going) < len(alive):
                rows = torch.tensor(going, device=tokens.device)
                model.select(rows)
                tokens, alive = tokens[rows], [alive[row] for row in going]
            model.step(tokens)
            hidden = engine.head.last_hidden()
    texts = [
        engine.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in generated
    ]
    return [
        Output(cut(text, example.stop), len(ids), end) for text, ids, end in zip(texts, generated, finish, strict=True)
    ]


def through_heads(hidden: Tensor, paths: Sequence[Path], position: int) -> Tensor:
    """h⁽ⁱ⁾ = h ⊙ m⁽ⁱ⁾ / (1 - p) (equation 2), each row on its own path, for the token at `position`.

    Args:
        hidden: [B, d].
        paths: B of them.
        position: index in the sequence of the token that is chosen, prompt included.

    Returns:
        [B, d] in the dtype of the hidden state.
    """
    rows_of: dict[float, list[int]] = {}
    for row, path in enumerate(paths):
        rows_of.setdefault(path.dropout, []).append(row)
    dropped = hidden.clone()
    for dropout, rows in rows_of.items():
        if dropout == 0.0:
            continue
        seeds = sorted({paths[row].seed for row in rows})
        heads = 1 + max(paths[row].head for row in rows)
        keys = torch.tensor(seeds, device=hidden.device)
        masks = dropout_masks(keys, torch.full_like(keys, position), heads, hidden.shape[1], dropout)  # [seeds, K, d]
        keep = torch.stack([masks[seeds.index(paths[row].seed), paths[row].head] for row in rows])  # [n, d]
        index = torch.tensor(rows, device=hidden.device)
        dropped[index] = (hidden[index].float() * keep / (1.0 - dropout)).to(hidden.dtype)
    return dropped
