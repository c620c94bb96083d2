"""Table 3: how far draft and heads are from the centroid, by which equation accepts.

Dispersed: draft rows that equation 6 accepts (Figure 4a). Concentrated: those that equation 7 alone accepts (4b).
Of each the mean of JS(draft ‖ centroid), and of JS(head ‖ centroid) over all heads; that of the farthest head, with
which equation 6 compares, is shown too. See `draft_rows` for which rows these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.draft_rows import Rows
from dropmatch.evaluation.paper.settings import over_seeds, spread_text

KINDS = {"dispersed": "accepted by eq. 6", "concentrated": "accepted by eq. 7 only", "rejected": "accepted by neither"}


def divergences(by_seed: Mapping[int, Rows]) -> dict[str, Any]:
    """Table 3 of the rows of each mask seed.

    Returns:
        For JSON: `rows`; for `dispersed`, `concentrated` and `rejected` rows, over seeds: how many `rows`, their
        share in % of all, and the mean JS of `draft`, `heads` and `farthest_head` (None where there are none).
    """
    found: dict[str, Any] = {"rows": sum(map(len, by_seed.values()))}
    for kind in KINDS:
        parts = [rows.only(_mask(rows, kind)) for rows in by_seed.values()]
        entry: dict[str, Any] = {"rows": sum(map(len, parts))}
        entry["share_pct"] = over_seeds(
            [100 * len(part) / len(rows) for part, rows in zip(parts, by_seed.values(), strict=True)]
        )
        for name, field in (("draft", "distance"), ("heads", "heads_mean"), ("farthest_head", "radius")):
            means = [float(getattr(part, field).double().mean()) if len(part) else None for part in parts]
            entry[name] = over_seeds(means)
        found[kind] = entry
    return found


def _mask(rows: Rows, kind: str) -> Any:
    """[N] bool."""
    if kind == "dispersed":
        return rows.inside
    return ~rows.inside & (rows.majority if kind == "concentrated" else ~rows.majority)


def divergence_sheet(found: dict[str, Any], task: str, seeds: int) -> Sheet:
    """Table 3 as texts."""
    rows: list[tuple[str, ...]] = []
    for kind, meaning in KINDS.items():
        entry, paper = found[kind], published.DIVERGENCE.get(kind)
        rows.append(
            (
                f"{kind}: {meaning}",
                str(entry["rows"]),
                spread_text(entry["share_pct"], 1),
                *(spread_text(entry[name], 4) for name in ("draft", "heads", "farthest_head")),
                *((f"{paper[0]:.4f}", f"{paper[1]:.4f}") if paper else ("", "")),
            )
        )
    headings = ("draft rows", "n", "%", "JS of draft", "of heads", "of the farthest", "paper: draft", "heads")
    notes = [
        f"Mean JS divergence to the centroid (natural logarithm) over {found['rows']} draft rows. The paper: "
        "Llama-3.1 8B/70B."
    ]
    if seeds > 1:
        notes.append(f"Mean over {seeds} mask seeds, and the least and the greatest; n counts all seeds.")
    return Sheet(f"Table 3: JS divergence to the centroid, {task}", headings, rows, notes)
