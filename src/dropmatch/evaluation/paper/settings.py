"""What the analyses share: the paper's settings of a rule, and numbers over mask seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.statistics import Interval
from dropmatch.rule_text import rule_text

Spread = dict[str, float]  # value (mean over seeds), low and high (the least and the greatest)


def sampled(rule: str, heads: int, dropout: float, seed: int, support: str = "full") -> AcceptanceConfig:
    """A rule that is asked as in the paper: one set of K random dropout heads decides.

    Raises:
        SettingError: a value out of range.
    """
    return AcceptanceConfig(
        rule=rule,
        heads=heads,
        dropout=dropout,
        verdict="sampled",
        heads_mode="dropout",
        support=support,
        mask_seed=seed,
    )


def sampled_text(rule: str, heads: int, dropout: float, draft_length: int, evaluation: str = "lazy") -> str:
    """The same as the text of a cell of a benchmark, whose plan adds the mask seed."""
    options = {"rule": rule, "heads": heads, "dropout": dropout, "verdict": "sampled", "heads_mode": "dropout"}
    if evaluation != AcceptanceConfig.evaluation:
        options["evaluation"] = evaluation
    return rule_text({**options, "draft_length": draft_length})


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Mean, least and greatest of the values that there are; None if there are none."""
    known = [value for value in values if value is not None]
    return asdict(Interval(mean(known), min(known), max(known))) if known else None


def spread_text(spread: Spread | None, digits: int, scale: float = 1.0) -> str:
    """The mean, and in brackets the least and the greatest where they differ from it; "-" of nothing."""
    if spread is None:
        return "-"
    middle, low, high = (f"{scale * spread[name]:.{digits}f}" for name in ("value", "low", "high"))
    return middle if low == high else f"{middle} [{low}, {high}]"


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse mask seeds that say nothing.

    Raises:
        SettingError: there are none, or one is given twice.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise SettingError(f"seeds must be different integers, got {', '.join(map(str, seeds)) or 'none'}")


def check_dropouts(dropouts: Sequence[float]) -> None:
    """Refuse dropout probabilities that are none, or given twice.

    Raises:
        SettingError: a value out of range.
    """
    if not dropouts or len(set(dropouts)) < len(dropouts):
        raise SettingError(f"dropout (p) must be different numbers, got {', '.join(map(str, dropouts)) or 'none'}")
    for dropout in dropouts:
        AcceptanceConfig(rule="naive", dropout=dropout)
