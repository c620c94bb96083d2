"""Rules asked about recorded rows again, and what becomes of the recorded drafts under each.

A record was made along the text of one rule. Under another the text would have gone on otherwise after the first
token that only one of them accepts, so the acceptance length of a replay is that of the same drafts, not of a run.
Its intervals are of other drafts along such texts, drawn anew from the recorded ones.

R draft tokens in all, N of them mismatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmatch.acceptance import Verdict, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.lab.record import Record
from dropmatch.evaluation.statistics import sums_ratio_intervals
from dropmatch.rule_text import parse_rule

CHUNK = 32
UNLIKELY = 0.05


@dataclass(frozen=True)
class Replayed:
    """A rule's verdicts on a record.

    Attributes:
        verdict: on the N rows.
        reached: [N] bool: rows before which the rule has accepted all of the draft.
        lengths: [blocks] accepted draft tokens of each draft.
    """

    verdict: Verdict
    reached: Tensor
    lengths: Tensor


@torch.no_grad()
def replay(record: Record, config: AcceptanceConfig) -> Replayed:
    """Ask a rule about all rows of a record.

    Raises:
        SettingError: the settings need more than was recorded.
    """
    record.check(config)
    parts = [judge(record.evidence(slice(i, i + CHUNK)), config, record.head) for i in range(0, len(record), CHUNK)]
    verdict = Verdict.join(parts)
    return _followed(record, verdict)


def _followed(record: Record, verdict: Verdict) -> Replayed:
    """What becomes of the drafts."""
    row, block = record.tensors["row"].long(), record.tensors["block"].long()  # [R] each
    accepted = record.tensors["exact"] | (verdict.accept[row.clamp_min(0)] & (row >= 0))  # [R]
    refused = (~accepted).long()
    # refusals before each token in its own draft: those before it in all, less those before the draft's first token
    before = refused.cumsum(0) - refused
    first = torch.searchsorted(block, torch.arange(record.blocks))  # [blocks]
    alive = before == before[first][block]  # [R]
    lengths = torch.zeros(record.blocks, dtype=torch.int64).index_add_(0, block, (alive & accepted).long())
    reached = torch.zeros(len(record), dtype=torch.bool)
    reached[row[alive & (row >= 0)]] = True
    return Replayed(verdict, reached, lengths)


def probabilities(record: Record) -> tuple[Tensor, Tensor]:
    """What the target gives the draft token and the clean token of each row: [N], [N]."""
    t = record.tensors
    log_z = torch.logaddexp(_log_sum(t["ids"], t["clean"]), t["clean_rest"])  # [N]

    def of(tokens: Tensor) -> Tensor:
        place = (t["ids"] == tokens[:, None]).int().argmax(dim=1, keepdim=True)
        return (t["clean"].float().gather(1, place).squeeze(1) - log_z).exp()

    return of(t["draft_tokens"]), of(t["clean_tokens"])


def _log_sum(ids: Tensor, logits: Tensor) -> Tensor:
    """Log-sum-exp of logits [N, S], each id [N, S] counted once: [N]."""
    ordered, order = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return logits.float().gather(1, order).masked_fill(again, -torch.inf).logsumexp(dim=1)


def compare(record: Record, configs: Mapping[str, AcceptanceConfig]) -> dict[str, Any]:
    """Several rules on one record, by name, ready for JSON.

    Of each rule: `acceptance_length`, committed tokens a round of the recorded drafts; `accepted_pct` of the rows it
    reaches; of the tokens it accepts there, `mean_probability` under the target and `unlikely_pct`, the share
    below 0.05; `intervals` of these four by name, 95 % bootstrap intervals over drafts; `alone`, rows that it accepts
    and no other of the rules does; `agreement_pct` with each of the others over all rows; `exact_agreement_pct`, the
    share of all draft tokens that it accepts or refuses as exact match does; `approximate`, whether a number is
    missing in the record that its verdicts need.
    """
    found = {name: replay(record, config) for name, config in configs.items()}
    draft, _ = probabilities(record)
    accepts = torch.stack([each.verdict.accept for each in found.values()])  # [rules, N]
    intervals = _intervals(record, found, draft)
    result = {}
    for i, (name, each) in enumerate(found.items()):
        others = torch.cat([accepts[:i], accepts[i + 1 :]]).any(dim=0)
        taken = each.reached & each.verdict.accept
        liked = draft[taken]
        result[name] = {
            "settings": asdict(configs[name]),
            "acceptance_length": 1.0 + float(each.lengths.double().mean()),
            "reached": int(each.reached.sum()),
            "accepted_pct": _percent(each.verdict.accept, each.reached),
            "mean_probability": float(liked.mean()) if len(liked) else None,
            "unlikely_pct": _percent(liked < UNLIKELY, torch.ones_like(liked, dtype=torch.bool)),
            "intervals": intervals[name],
            "alone": int((accepts[i] & ~others).sum()),
            "exact_agreement_pct": 100 * (1 - int(accepts[i].sum()) / len(record.tensors["block"])),
            "approximate": record.approximates(configs[name]),
            "agreement_pct": {
                other: 100 * float((accepts[i] == accepts[j]).double().mean()) for j, other in enumerate(found)
            },
        }
    exact = _followed(record, Verdict.blank(torch.zeros(len(record), dtype=torch.bool), "exact"))
    return {
        "rounds": record.blocks,
        "draft_tokens": len(record.tensors["block"]),
        "mismatches": len(record),
        "exact_acceptance_length": 1.0 + float(exact.lengths.double().mean()),
        "rules": result,
        "alone": {name: _examples(record, accepts, i) for i, name in enumerate(found)},
    }


def _intervals(record: Record, found: Mapping[str, Replayed], draft: Tensor) -> dict[str, dict[str, Any]]:
    """Low and high of what a rule comes to, by rule and name; draft: [N], what the target gives the draft tokens."""
    block = record.tensors["block"][record.tensors["row"] >= 0].long()  # [N]

    def by_draft(values: Tensor) -> np.ndarray:
        """[N] -> [blocks]"""
        return torch.zeros(record.blocks, dtype=torch.float64).index_add_(0, block, values.double()).numpy()

    names = ("acceptance_length", "accepted_pct", "mean_probability", "unlikely_pct")
    columns = []  # above and below of each ratio
    for each in found.values():
        taken = each.reached & each.verdict.accept
        count = by_draft(taken)
        columns += [
            (1.0 + each.lengths.double().numpy(), np.ones(record.blocks)),
            (100 * count, by_draft(each.reached)),
            (by_draft(taken * draft), count),
            (100 * by_draft(taken & (draft < UNLIKELY)), count),
        ]
    above, below = (np.stack(side, axis=1) for side in zip(*columns, strict=True))
    ends = [None if each is None else [each.low, each.high] for each in sums_ratio_intervals(above, below)]
    return {
        name: dict(zip(names, ends[len(names) * i : len(names) * (i + 1)], strict=True)) for i, name in enumerate(found)
    }


def _percent(yes: Tensor, among: Tensor) -> float | None:
    """[n] bool, [n] bool; None of nothing."""
    return 100 * float((yes & among).sum()) / int(among.sum()) if bool(among.any()) else None


def _examples(record: Record, accepts: Tensor, rule: int) -> list[dict[str, Any]]:
    """Rows that only one rule accepts, the least likely first; accepts: [rules, N]."""
    draft, clean = probabilities(record)
    others = torch.cat([accepts[:rule], accepts[rule + 1 :]]).any(dim=0)
    rows = (accepts[rule] & ~others).nonzero().flatten()
    texts = record.about["texts"]
    return [
        {
            "row": row,
            "context": record.about["contexts"][row],
            "draft": texts[str(int(record.tensors["draft_tokens"][row]))],
            "draft_probability": float(draft[row]),
            "clean": texts[str(int(record.tensors["clean_tokens"][row]))],
            "clean_probability": float(clean[row]),
        }
        for row in rows[draft[rows].argsort()].tolist()
    ]


def settings_of(texts: Sequence[str]) -> dict[str, AcceptanceConfig]:
    """Settings from rules' texts.

    Raises:
        SettingError: a text is none, or stands there twice.
    """
    found: dict[str, AcceptanceConfig] = {}
    for text in texts:
        if text in found:
            raise SettingError(f"{text} is given twice")
        options = parse_rule(text)
        if "draft_length" in options:
            raise SettingError(f"{text}: a record has drafts of one length; leave L out")
        found[text] = AcceptanceConfig.from_options(options)
    return found
