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
class Rule:
    """An acceptance rule.

    Attributes:
        name: how users choose it.
        judge: pure function (evidence of N rows, their cluster of heads, settings) -> verdict of N rows.
        summary: one line for `--help`.
        needs_heads: whether it looks at heads; if not, its cluster is None.
        needs_draft_distribution: whether it refuses drafters that have none.
        lossless: whether it accepts exact matches only.
    """

    name: str
    judge: Judge
    summary: str
    needs_heads: bool = True
    needs_draft_distribution: bool = False
    lossless: bool = False

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
