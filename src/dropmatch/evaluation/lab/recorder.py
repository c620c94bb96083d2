"""Keeps the evidence of rounds as they are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropmatch.acceptance import Evidence
from dropmatch.acceptance.distributions import clean_entropy, clean_log_probs, draft_distance
from dropmatch.decoding.verify import following
from dropmatch.environment import versions
from dropmatch.errors import SettingError
from dropmatch.evaluation.lab.record import Record
from dropmatch.heads.dropout import DRAFT_SHORTLIST
from dropmatch.heads.gaussian import DRAFT_TOKENS
from dropmatch.heads.support import common_vocab
from dropmatch.heads.vocabulary import Vocabulary

HEAD_TOKENS = 64  # Gaussian heads can be made for so many of the target's likeliest tokens
CONTEXT = 24  # tokens of text before a row, to read it by


@dataclass(frozen=True)
class _Draft:
    """What is kept of one draft of n tokens, m of them mismatches.

    Attributes:
        exact: [n] bool.
        rows: of the mismatches, by name: m rows each.
        contexts: m texts.
    """

    exact: Tensor
    rows: dict[str, Tensor]
    contexts: list[str]

    def first(self, count: int) -> _Draft:
        """Its first tokens."""
        exact = self.exact[:count]
        m = int((~exact).sum())
        return _Draft(exact, {name: value[:m] for name, value in self.rows.items()}, self.contexts[:m])


class Recorder:
    """An observer of decoding, for `Engine.stream(..., observer=recorder)`.

    It is told of each generation by `begin`, `add` after each round, and `end` unless it was left before its end. Of
    drafts it keeps what `Statistics` counts.

    Args:
        engine: whose rounds are recorded.
        tokens: how many of the target's likeliest tokens are kept a row.
        dropout_heads: keep the head's rows for all of them, as dropout heads need, and not for Gaussian heads only.

    Raises:
        SettingError: too few tokens.
    """

    def __init__(self, engine: Any, tokens: int = 2048, *, dropout_heads: bool = False) -> None:
        if tokens < HEAD_TOKENS:
            raise SettingError(f"a record keeps at least {HEAD_TOKENS} tokens a row, got {tokens}")
        self._engine, self._tokens, self._dropout_heads = engine, tokens, dropout_heads
        self._rounds: list[_Draft | None] = []  # None: nothing was drafted
        self._draft: _Draft | None = None  # of the round that runs
        self._committed = 0  # tokens of the last round
        self._head_ids: set[int] = set()
        self._vocab: int | None = None
        self._draft_vocab: int | None = None
        self._sequence: list[int] = []  # the text so far, prompt included

    @property
    def _drafts(self) -> list[_Draft]:
        return [draft for draft in self._rounds if draft is not None]

    def __len__(self) -> int:
        """Mismatches so far."""
        return sum(len(draft.contexts) for draft in self._drafts)

    def begin(self, prompt: Tensor) -> None:
        """A generation begins; prompt: [T] ids."""
        self._sequence, self._draft = prompt.tolist(), None

    def add(self, tokens: list[int]) -> None:
        """A round has committed tokens: its draft is kept."""
        self._rounds.append(self._draft)
        self._draft, self._committed = None, len(tokens)
        self._sequence += tokens

    def end(self) -> None:
        """The text has ended: what the last draft has behind its end is no part of it."""
        last = self._rounds[-1]
        if last is not None:
            self._rounds[-1] = last.first(self._committed)

    def __call__(self, evidence: Evidence, exact: Tensor) -> None:
        """One draft of n tokens; exact: [n] bool."""
        index = (~exact).nonzero().flatten()  # [m]
        rows, contexts = dict[str, Tensor](), list[str]()
        if len(index):
            rows = self._kept(evidence.rows(index)) | _small(evidence, *following(exact), index)
            drafted = evidence.draft_tokens.tolist()
            contexts = [self._context(drafted[:place]) for place in index.tolist()]
        # last and at once: Ctrl-C may come anywhere before
        self._draft = _Draft(exact.cpu(), rows, contexts)

    def record(self, **about: Any) -> Record:
        """What was recorded.

        Args:
            about: what else to say of it: names of the models, settings.

        Raises:
            SettingError: no draft differed from the target.
        """
        if not len(self):
            raise SettingError("there is nothing to record: no draft token differed from the target's")
        drafts = self._drafts
        tensors = _places([draft.exact for draft in drafts])
        kept = [draft.rows for draft in drafts if draft.rows]
        tensors |= {name: torch.cat([rows[name] for rows in kept]) for name in kept[0]}
        head = self._engine.head
        ids = torch.tensor(sorted(self._head_ids))
        if head.can_gather:
            rows, bias = head.rows(ids[None].to(self._engine.model.device))
            tensors |= {"head_ids": ids.int(), "head_rows": rows[0].cpu()}
            tensors |= {} if bias is None else {"head_bias": bias[0].cpu()}
        judged = {*tensors["draft_tokens"].tolist(), *tensors["clean_tokens"].tolist()}
        return Record(
            tensors,
            {
                **about,
                "vocab": self._vocab or head.vocab_size,
                "draft_vocab": self._draft_vocab,
                "tokens": min(self._tokens, head.vocab_size),
                "head_tokens": min(HEAD_TOKENS, head.vocab_size),
                "dropout_heads": self._dropout_heads,
                "drafter": type(self._engine.drafter).__name__,
                "scale": head.finish.scale,
                "cap": head.finish.cap,
                "texts": {str(token): self._engine.tokenizer.decode([token]) for token in sorted(judged)},
                "contexts": [context for draft in drafts for context in draft.contexts],
                "versions": versions(),
            },
        )

    def _context(self, drafted: list[int]) -> str:
        """What stands before a draft token."""
        return self._engine.tokenizer.decode((self._sequence + drafted)[-CONTEXT:])

    def _kept(self, rows: Evidence) -> dict[str, Tensor]:
        """What is kept of m mismatches."""
        if rows.bias is not None:
            raise SettingError("requests with logits processors (min_tokens, constraints) cannot be recorded")
        vocab = self._vocab = common_vocab(rows)  # what no rule looks beyond
        likeliest = Vocabulary(rows.clean_logits[:, :vocab]).likeliest(min(self._tokens, vocab))[1]  # [m, M]
        parts, head_parts = [likeliest, rows.draft_tokens[:, None]], [likeliest[:, :HEAD_TOKENS]]
        if rows.draft_logits is not None:
            drafted = Vocabulary(rows.draft_logits[:, :vocab]).likeliest(min(DRAFT_SHORTLIST, vocab))[1]
            parts.append(drafted)
            head_parts += [rows.draft_tokens[:, None], drafted[:, :DRAFT_TOKENS]]
        ids = torch.cat(parts, dim=1)  # [m, S]
        wanted = ids if self._dropout_heads else torch.cat([*head_parts, rows.draft_tokens[:, None]], dim=1)
        self._head_ids.update(wanted.flatten().tolist())
        clean, clean_rest = Vocabulary(rows.clean_logits[:, :vocab]).split(ids)
        dtype = rows.clean_logits.dtype
        kept = {"hidden": rows.hidden, "ids": ids.int(), "clean": clean.to(dtype), "clean_rest": clean_rest}
        if rows.draft_logits is not None:
            draft, draft_rest = Vocabulary(rows.draft_logits[:, :vocab]).split(ids)
            self._draft_vocab = vocab
            kept |= {"draft": draft.to(rows.draft_logits.dtype), "draft_rest": draft_rest}
        kept |= _over_whole_vocabulary(rows)
        return {name: value.cpu() for name, value in kept.items()}


def _over_whole_vocabulary(rows: Evidence) -> dict[str, Tensor]:
    """What rules see of the whole vocabulary, as numbers of m rows.

    One row at a time, as verdicts are asked on a CPU: several are added up in another order.
    """
    found: dict[str, list[Tensor]] = {"clean_entropy": [], "draft_distance": []}
    for i in range(len(rows)):
        row = rows.rows(slice(i, i + 1))
        log_p = clean_log_probs(row)  # [1, V]
        found["clean_entropy"].append(clean_entropy(row, log_p))
        if row.draft_logits is not None:
            found["draft_distance"].append(draft_distance(row, log_p))
    return {name: torch.cat(values) for name, values in found.items() if values}


def _places(drafts: list[Tensor]) -> dict[str, Tensor]:
    """Where each of the R draft tokens stands: its draft, and its row if it is a mismatch; drafts: [n] bool each."""
    exact = torch.cat(drafts)
    block = torch.arange(len(drafts)).repeat_interleave(torch.tensor([len(draft) for draft in drafts]))
    row = torch.where(exact, -1, (~exact).cumsum(0) - 1)
    return {"block": block.int(), "exact": exact, "row": row.int()}


def _small(evidence: Evidence, followed: Tensor, remaining: Tensor, index: Tensor) -> dict[str, Tensor]:
    """What is one number a row: of n rows those in index [m]."""
    allowed = torch.ones_like(evidence.draft_tokens, dtype=torch.bool) if evidence.allowed is None else evidence.allowed
    values = {
        "draft_tokens": evidence.draft_tokens,
        "clean_tokens": evidence.clean_tokens,
        "seeds": evidence.seeds,
        "positions": evidence.positions,
        "allowed": allowed,
        "followed": followed,
        "remaining": remaining,
    }
    return {name: value[index].cpu() for name, value in values.items()}
