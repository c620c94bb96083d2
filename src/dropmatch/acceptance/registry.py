"""Rules by name. Another package adds one with `register`; an entry point is not needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence, Verdict
    from dropmatch.config import AcceptanceConfig
    from dropmatch.heads import Cluster

    Judge = Callable[[Evidence, Cluster | None, AcceptanceConfig], Verdict]


@dataclass(frozen=True)
class Parameter:
    """A number that a rule takes besides K and p.

    Attributes:
        name: one of `dropmatch.config.RULE_PARAMETERS`.
        default: its value where the user gives none.
        low, high: the smallest and the largest value.
        meaning: a few words for help and errors.
    """

    name: str
    default: float
    low: float
    high: float
    meaning: str

    def check(self, value: object) -> None:
        """Refuse a value; where the default is an integer only integers will do.

        Raises:
            SettingError: it is no number in [low, high].
        """
        kind = int if isinstance(self.default, int) else (int, float)
        fine = isinstance(value, kind) and not isinstance(value, bool) and self.low <= value <= self.high
        if not fine:
            what = "an integer" if kind is int else "a number"
            raise SettingError(
                f"{self.name} ({self.meaning}) must be {what} from {self.low:g} to {self.high:g}, got {value!r}"
            )


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: how users choose it.
        judge: pure function (evidence of N rows, their cluster of heads, settings) -> verdict of N rows.
        summary: one line for `--help`.
        needs_heads: whether it looks at heads; if not, its cluster is None.
        needs_draft_distribution: whether it refuses drafters that have none.
        needs_block: whether it looks at what follows in the draft (`Evidence.followed` and `remaining`).
        lossless: whether it accepts exact matches only.
        parameters: numbers that it takes besides K and p.
    """

    name: str
    judge: Judge
    summary: str
    needs_heads: bool = True
    needs_draft_distribution: bool = False
    needs_block: bool = False
    lossless: bool = False
    parameters: tuple[Parameter, ...] = ()

    def check_drafter(self, has_distribution: bool, drafter: str = "this drafter") -> None:
        """Refuse a drafter that does not offer what the rule compares.

        Raises:
            SettingError: the rule needs the draft's distribution, and the drafter has none.
        """
        if self.needs_draft_distribution and not has_distribution:
            raise SettingError(
                f"rule {self.name!r} compares distributions, and {drafter} has none: use rule 'naive' or 'strict', "
                "or draft with a model"
            )

    def check_window(self, window: int | None, draft_length: int) -> None:
        """Refuse drafts too short for what the rule looks at behind a token.

        Raises:
            SettingError: the rule could never accept more than exact matches.
        """
        if self.needs_block and window is not None and window >= draft_length:
            raise SettingError(
                f"rule {self.name!r} with window={window} needs at least {window + 1} draft tokens a round and "
                f"draft_length is {draft_length}: raise draft_length (L), or lower window"
            )


_rules: dict[str, Rule] = {}


def register(rule: Rule) -> Rule:
    """Make a rule known by its name.

    Raises:
        SettingError: the name is taken.
    """
    if rule.name in _rules:
        raise SettingError(f"an acceptance rule named {rule.name!r} is registered already")
    _rules[rule.name] = rule
    return rule


def get_rule(name: str) -> Rule:
    """The rule of that name.

    Raises:
        SettingError: no rule has it; the message lists those that exist.
    """
    if not isinstance(name, str) or name not in _rules:
        raise SettingError(f"unknown rule {name!r}; the rules are: {', '.join(rule_names())}")
    return _rules[name]


def rule_names() -> list[str]:
    """Names of all rules, sorted."""
    return sorted(_rules)
