"""What Tables 2 and 3 count: the draft rows of a speculative run, each asked of all heads.

Equations 6 and 7 are asked at draft positions and only there, and Table 2 is about rows that equation 6 does not
accept, which needs the draft's distribution: hence a speculative run by the rule `js`, and no plain decoding.

Every draft row up to the first rejection of its round is asked, exact matches too, as in the paper (eager evaluation).
The text itself goes on by lazy evaluation, which asks the rule where the draft differs and nowhere else: at a row with
the same prefix both emit the same token, and where an eager run refuses the target's own token, its next draft begins
with the row that is the next one here. So the rows are those of an eager run, but for which positions are bonus
positions, and hardly any heads are evaluated twice.

N rows, K heads, S tokens in the support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dropmatch.acceptance import Evidence
from dropmatch.config import AcceptanceConfig
from dropmatch.divergence import js_divergence
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.tasks import Example
from dropmatch.heads import Head, build_cluster, rows_per_chunk

_INTEGERS, _YES_OR_NO = ("position", "token", "agreeing"), ("exact", "majority")


@dataclass(frozen=True)
class Rows:
    """Draft rows and what the heads say there; all on the CPU.

    Attributes:
        position: [N] int64 index of the draft token in its sequence.
        token: [N] int64 the draft token.
        exact: [N] bool, it is the target's own.
        agreeing: [N] int64 how many heads choose the majority token (equation 7).
        of_heads: [N] fp32 what all heads give it, in the mean.
        of_agreeing: [N] fp32 likewise of the heads that choose it.
        of_centroid: [N] fp32 what the centroid gives it.
        distance: [N] fp32 JS(draft ‖ centroid).
        heads_mean: [N] fp32 JS(head ‖ centroid), mean over heads.
        radius: [N] fp32 the largest of them.
        majority: [N] bool, the draft token is the majority token.
    """

    position: Tensor
    token: Tensor
    exact: Tensor
    agreeing: Tensor
    of_heads: Tensor
    of_agreeing: Tensor
    of_centroid: Tensor
    distance: Tensor
    heads_mean: Tensor
    radius: Tensor
    majority: Tensor

    def __len__(self) -> int:
        return self.position.shape[0]

    @property
    def inside(self) -> Tensor:
        """Accepted by equation 6: [N] bool."""
        return self.distance <= self.radius

    def only(self, mask: Tensor) -> Rows:
        """Some of the rows: [N] bool."""
        return Rows(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def as_lists(self) -> dict[str, list[Any]]:
        """Ready for JSON, by name; fp32 loses nothing there."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @staticmethod
    def from_lists(values: Mapping[str, Sequence[Any]]) -> Rows:
        """The rows of `as_lists`.

        Raises:
            KeyError, TypeError, ValueError: they are none.
        """
        columns = {}
        for field in fields(Rows):
            dtype = torch.bool if field.name in _YES_OR_NO else torch.float32
            columns[field.name] = torch.tensor(
                values[field.name], dtype=torch.int64 if field.name in _INTEGERS else dtype
            )
        if len({column.shape for column in columns.values()}) > 1:
            raise ValueError("columns of several lengths")
        return Rows(**columns)

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """Rows after each other; at least one part."""
        return Rows(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Rows)})


def ask_heads(evidence: Evidence, exact: Tensor, config: AcceptanceConfig, head: Head) -> Rows:
    """All numbers of n rows; exact: [n] bool.

    Rows are taken in chunks, as verdicts are.
    """
    size = rows_per_chunk(evidence, config, head)
    parts = [
        _ask(evidence.rows(slice(i, i + size)), exact[i : i + size], config, head)
        for i in range(0, len(evidence), size)
    ]
    return Rows.join(parts)


def _ask(rows: Evidence, exact: Tensor, config: AcceptanceConfig, head: Head) -> Rows:
    cluster = build_cluster(rows, config, head)
    centroid, heads = cluster.centroid_log_probs, cluster.head_log_probs()  # [n, S], [n, K, S]
    tokens = cluster.head_tokens()  # [n, K]
    majority = cluster.majority_tokens(tokens)  # [n]
    agrees = tokens == majority[:, None]  # [n, K]
    place = majority[:, None] if cluster.token_ids is None else _place(cluster.token_ids, majority)  # [n, 1]
    given = heads.gather(2, place[:, None].expand(-1, heads.shape[1], -1)).squeeze(2).exp()  # [n, K]
    spread = js_divergence(heads, centroid[:, None])  # [n, K]
    values = {
        "position": rows.positions,
        "token": rows.draft_tokens,
        "exact": exact,
        "agreeing": agrees.sum(dim=1),
        "of_heads": given.mean(dim=1),
        "of_agreeing": (given * agrees).sum(dim=1) / agrees.sum(dim=1),
        "of_centroid": cluster.centroid_log_prob_of(majority).exp(),
        "distance": js_divergence(cluster.draft_log_probs(), centroid),
        "heads_mean": spread.mean(dim=1),
        "radius": spread.amax(dim=1),
        "majority": majority == rows.draft_tokens,
    }
    return Rows(**{name: value.cpu() for name, value in values.items()})


def _place(token_ids: Tensor, tokens: Tensor) -> Tensor:
    """Where tokens stand in a support, the first place of each: [n, S], [n] -> [n, 1]."""
    return (token_ids == tokens[:, None]).int().argmax(dim=1, keepdim=True)


def draft_rows(
    engine: Any, example: Example, config: AcceptanceConfig, draft_length: int, max_tokens: int
) -> tuple[Rows, int]:
    """Decode an example by a rule, and ask the heads about its draft rows.

    Args:
        engine: of the Hugging Face kind, with a drafter that has a distribution.
        example: what is decoded, greedily.
        config: the rule and its heads.
        draft_length: L.
        max_tokens: the most tokens.

    Returns:
        The rows, none if nothing was drafted, and how many tokens the text has.

    Raises:
        SettingError: the drafter has no distribution, or the prompt does not fit.
    """
    asked: list[Rows] = []

    def keep(evidence: Evidence, exact: Tensor) -> None:
        asked.append(ask_heads(evidence, exact, config, engine.head))

    options = {name: value for name, value in vars(config).items() if value is not None}
    stream = engine.stream(
        HuggingFace(engine).encode(example),
        stop=example.stop or None,
        trace=True,
        observer=keep,
        max_tokens=min(max_tokens, example.max_tokens or max_tokens),
        draft_length=draft_length,
        **options,
    )
    for _ in stream:
        pass
    if not asked:
        return Rows.from_lists({field.name: [] for field in fields(Rows)}), len(stream.result.token_ids)
    rows = Rows.join(asked)
    # what stands behind a rejection, or behind the end of the text, is no part of it
    reached = [entry.reason != "not reached" for entries in stream.trace for entry in entries]
    end = stream.result.prompt_tokens + len(stream.result.token_ids)
    return rows.only(torch.tensor(reached) & (rows.position < end)), len(stream.result.token_ids)
