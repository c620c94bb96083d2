"""Table 2: how many of the K heads agree, and how sure they are then.

The size of the majority is how many heads choose the token of equation 7. The paper does not say of what its "mean
probabilities conditioned on alignment" are. Here they are what the heads' p⁽ⁱ⁾ give that token, in the mean over all K
heads and over the rows of that size; the mean over the heads that agree alone, and the centroid's, stand beside them.

The paper's ratios are of the cases "if heads are not dispersed", that is of the rows that equation 6 does not accept,
where equation 7 decides; those of all draft rows stand beside them. See `draft_rows` for which rows these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.draft_rows import Rows
from dropmatch.evaluation.paper.settings import over_seeds, spread_text


def majorities(by_seed: Mapping[int, Rows], heads: int) -> dict[str, Any]:
    """Table 2 of the rows of each mask seed.

    Returns:
        For JSON: for the populations `not_dispersed` and `all`, over seeds: how many `rows`, and by size of the
        majority `ratio_pct`, and `probability` by all heads, `of_agreeing` heads and `of_centroid` (None where no
        seed has such a row).
    """
    return {
        "not_dispersed": _over(by_seed, heads, lambda rows: ~rows.inside),
        "all": _over(by_seed, heads, lambda rows: rows.position >= 0),
    }


def _over(by_seed: Mapping[int, Rows], heads: int, which: Any) -> dict[str, Any]:
    parts = [rows.only(which(rows)) for rows in by_seed.values()]
    sizes: dict[str, dict[str, Any]] = {}
    for size in range(1, heads + 1):
        masks = [rows.agreeing == size for rows in parts]
        sizes[str(size)] = {
            "rows": sum(int(mask.sum()) for mask in masks),
            "ratio_pct": over_seeds(
                [
                    100 * int(mask.sum()) / len(rows) if len(rows) else None
                    for rows, mask in zip(parts, masks, strict=True)
                ]
            ),
        }
        for name, field in (("probability", "of_heads"), *((each, each) for each in ("of_agreeing", "of_centroid"))):
            values = [_mean(getattr(rows, field)[mask]) for rows, mask in zip(parts, masks, strict=True)]
            sizes[str(size)][name] = over_seeds(values)
    return {"rows": sum(map(len, parts)), "sizes": sizes}


def _mean(values: Tensor) -> float | None:
    """[n]; None of nothing."""
    return float(values.double().mean()) if len(values) else None


def majority_sheet(found: dict[str, Any], task: str, seeds: int) -> Sheet:
    """Table 2 as texts: a row for each size of the majority."""
    few, every = found["not_dispersed"], found["all"]
    rows: list[tuple[str, ...]] = []
    for size, entry in few["sizes"].items():
        paper = published.MAJORITY.get(int(size)) if len(few["sizes"]) == published.HEADS else None
        rows.append(
            (
                size,
                spread_text(entry["ratio_pct"], 2),
                spread_text(entry["probability"], 3),
                spread_text(entry["of_agreeing"], 3),
                spread_text(entry["of_centroid"], 3),
                spread_text(every["sizes"][size]["ratio_pct"], 2),
                spread_text(every["sizes"][size]["probability"], 3),
                f"{paper[0]:.2f}" if paper else "",
                f"{paper[1]:.3f}" if paper else "",
            )
        )
    headings = (
        "heads agreeing",
        "ratio %",
        "mean probability",
        "of those agreeing",
        "of the centroid",
        "all rows: ratio %",
        "mean probability",
        "paper: ratio %",
        "mean probability",
    )
    notes = [
        f"{few['rows']} draft rows that eq. 6 does not accept (the paper: if heads are not dispersed), of "
        f"{every['rows']} draft rows in all.",
        "Mean probability of the majority token: by all heads, by those that agree on it, and by their centroid (the "
        "paper does not say which it has). The paper: Llama-3.1-70B-Instruct, HumanEval.",
    ]
    if seeds > 1:
        notes.append(f"Mean over {seeds} mask seeds, and the least and the greatest.")
    return Sheet(f"Table 2: how many heads agree, {task}", headings, rows, notes)
