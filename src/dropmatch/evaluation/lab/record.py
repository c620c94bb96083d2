"""A record: what rules need of some real rounds, in one safetensors file.

Of a draft token that is the clean one nothing but that is kept. Of the others, the N rows: the hidden state; the
logits of target and draft for the S likeliest tokens of either, and the log-sum-exp of the rest; and once, for
all of them, the rows of the LM head that heads are made with. When a row is rebuilt over the vocabulary, the rest is
spread evenly over the tokens that were not kept. Two rules look at the whole vocabulary and would notice: what they
look at there, an entropy (typical) and a divergence (fuzzy), is kept as a number a row. Records of earlier versions
lack these numbers: the entropy is then no smaller and the divergence no larger than the live one, though close to
it, so that these two rules may accept a little more.

R draft tokens in all, N of them mismatches, S tokens kept a row, U rows of the head, V tokens in the vocabulary.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dropmatch.acceptance import Evidence, get_rule
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import Finish, gathered_logits

FORMAT = "dropmatch record 1"
WHOLE_VOCABULARY = {
    "typical": "clean_entropy",
    "fuzzy": "draft_distance",
}  # the number that makes a rule's verdict exact


@dataclass(frozen=True)
class Record:
    """Recorded rounds.

    Attributes:
        tensors: by name. Of the R draft tokens: `block` (which draft), `exact` bool, `row` (which of the N rows, -1
            for an exact match). Of the N rows: `hidden` [N, d], `ids`, `clean`, `draft` [N, S] (`draft` is absent if
            the drafter has no distribution), `clean_rest`, `draft_rest` [N], `draft_tokens`, `clean_tokens`,
            `seeds`, `positions`, `followed`, `remaining` [N], `allowed` [N] bool; `clean_entropy`, `draft_distance` [N]
            as `Evidence` has them, absent from records of earlier versions. Of the head: `head_ids` [U], in order,
            `head_rows` [U, d], `head_bias` [U]; absent if it has no rows to gather.
        about: target, draft, settings and versions; `vocab` and `draft_vocab`; `tokens`, how many of the target's
            likeliest tokens were kept, and `dropout_heads`, whether the head's rows are kept for all of them;
            `scale` and `cap` of `Finish`; `texts`, what the tokens judged say, by id; `contexts`, what stands before
            each row.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def __len__(self) -> int:
        """N."""
        return self.tensors["draft_tokens"].shape[0]

    @property
    def blocks(self) -> int:
        """How many drafts."""
        return int(self.tensors["block"].max()) + 1 if len(self.tensors["block"]) else 0

    def save(self, path: Path) -> None:
        """Write the file: aside first, so that one that is there stays whole until the new one is."""
        metadata = {"format": FORMAT, "about": json.dumps(self.about, ensure_ascii=False)}
        aside = path.with_name(f"{path.name}.tmp")
        save_file({name: value.contiguous() for name, value in self.tensors.items()}, aside, metadata)
        os.replace(aside, path)

    @staticmethod
    def load(path: Path) -> Record:
        """Read a file.

        Raises:
            SettingError: it cannot be read, or is no record.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise SettingError(f"{path} is no record: make one with dropmatch record")
                names = file.keys()
                return Record({name: file.get_tensor(name) for name in names}, json.loads(metadata["about"]))
        except (OSError, SafetensorError) as error:
            raise SettingError(f"cannot read the record {path}: {error}") from error

    @property
    def draft_length(self) -> int:
        """L, or the longest draft where nothing says what L was."""
        told = (self.about.get("settings") or {}).get("draft_length")
        return told or int(self.tensors["block"].bincount().max())

    def approximates(self, config: AcceptanceConfig) -> bool:
        """Whether verdicts are close to the live ones only, since a number is missing."""
        number = WHOLE_VOCABULARY.get(config.rule)
        return number is not None and number not in self.tensors

    @cached_property
    def head(self) -> RecordedHead | None:
        """The LM head as far as it was recorded; None if it has no rows."""
        return RecordedHead(self) if "head_rows" in self.tensors else None

    def check(self, config: AcceptanceConfig) -> None:
        """Refuse settings that need more than was recorded.

        Raises:
            SettingError: the rule needs the draft's distribution or heads that are not there, more tokens, longer
                drafts, or exact matches.
        """
        rule, kept = get_rule(config.rule), self.about["tokens"]
        if config.evaluation == "eager":
            raise SettingError(
                "evaluation='eager' asks about exact matches too, of which a record keeps nothing: leave it out"
            )
        rule.check_drafter("draft" in self.tensors, "the drafter of this record")
        try:
            rule.check_window(config.window, self.draft_length)
        except SettingError as error:
            raise SettingError(f"this record's drafts are too short: {error}") from None
        if (config.candidates or 0) > kept:
            raise SettingError(f"candidates={config.candidates} needs more tokens than this record keeps ({kept})")
        if not rule.needs_heads:
            return
        if self.head is None:
            raise SettingError(
                f"rule {rule.name!r} looks at heads, and this record has none: rows of that LM head cannot be gathered"
            )
        if config.wants_gaussian:
            most = kept if self.about["dropout_heads"] else self.about["head_tokens"]
            if config.gaussian_tokens > most:
                raise SettingError(
                    f"gaussian_tokens={config.gaussian_tokens} needs more tokens than this record keeps rows of the LM "
                    f"head for ({most})"
                )
        elif not self.about["dropout_heads"]:
            raise SettingError(
                "this record keeps the LM head's rows for Gaussian heads only: record with --dropout-heads, or use "
                "verdict=denoised or heads_mode=gaussian"
            )
        elif config.support == "full":
            raise SettingError("support='full' looks at the whole vocabulary, which no record keeps: use 'shortlist'")
        elif config.shortlist_size > kept:
            raise SettingError(
                f"shortlist_size={config.shortlist_size} needs more tokens than this record keeps ({kept})"
            )

    def evidence(self, rows: slice) -> Evidence:
        """Some of the N rows, over the whole vocabulary."""
        t = {name: value[rows] for name, value in self.tensors.items() if not name.startswith("head_")}
        ids = t["ids"].long()
        small = ["draft_tokens", "clean_tokens", "seeds", "positions", "allowed", "followed", "remaining"]
        small += [name for name in WHOLE_VOCABULARY.values() if name in t]
        return Evidence(
            hidden=t["hidden"],
            clean_logits=_spread(ids, t["clean"], t["clean_rest"], self.about["vocab"]),
            draft_logits=_spread(ids, t["draft"], t["draft_rest"], self.about["draft_vocab"]) if "draft" in t else None,
            **{name: t[name] for name in small},
        )


class RecordedHead:
    """Rows of an LM head.

    Args:
        record: has them.
    """

    can_gather = True

    def __init__(self, record: Record) -> None:
        self.vocab_size = record.about["vocab"]
        self.finish = Finish(record.about["scale"], record.about["cap"])
        self._ids = record.tensors["head_ids"].long()  # [U]
        self._rows, self._bias = record.tensors["head_rows"], record.tensors.get("head_bias")  # [U, d], [U]

    def full(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V].

        Raises:
            SettingError: always: no record keeps the whole head.
        """
        raise SettingError("a record does not keep the whole LM head")

    def gather(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[n, K, d], [n, S] -> [n, K, S]."""
        return self.finish(gathered_logits(hidden, self._places(token_ids), self._rows, self._bias))

    def rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, S] -> [n, S, d], [n, S]."""
        places = self._places(token_ids)
        return self._rows[places], None if self._bias is None else self._bias[places]

    def _places(self, token_ids: Tensor) -> Tensor:
        """Where tokens stand among those kept: [n, S] -> [n, S]."""
        places = torch.searchsorted(self._ids, token_ids.contiguous()).clamp_max(len(self._ids) - 1)
        if not torch.equal(self._ids[places], token_ids):
            raise SettingError("these settings need rows of the LM head that this record does not keep")
        return places


def _spread(ids: Tensor, logits: Tensor, rest: Tensor, vocab: int) -> Tensor:
    """Logits over the vocabulary from those of some tokens: [N, S], [N, S], [N] -> [N, V] fp32."""
    known = torch.zeros(ids.shape[0], vocab, dtype=torch.bool).scatter_(1, ids, True)
    level = rest - (vocab - known.sum(dim=1)).clamp_min(1).log()  # [N]
    # where an id stands twice both have the same logit
    return level[:, None].expand(-1, vocab).clone().scatter_(1, ids, logits.float())
