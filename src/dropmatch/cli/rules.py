"""`dropmatch rules`: the acceptance rules there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from dropmatch.cli.console import output_console
from dropmatch.config import AcceptanceConfig

if TYPE_CHECKING:
    from dropmatch.acceptance import Rule


def rules() -> None:
    """List the acceptance rules, for --rule and --rules."""
    from dropmatch.acceptance import get_rule, rule_names

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("rule", "lossless", "drafter", "accepts a draft token when"):
        table.add_column(heading)
    for name in rule_names():
        rule = get_rule(name)
        table.add_row(
            name,
            "yes" if rule.lossless else "no",
            "a model" if rule.needs_draft_distribution else "any",
            f"{rule.summary}; {_settings(rule)}",
        )
    output_console().print(table)


def _settings(rule: Rule) -> str:
    """What it takes, with defaults."""
    taken = [f"{each.name}={each.default}" for each in rule.parameters]
    if rule.needs_heads:
        taken = [f"K={AcceptanceConfig.heads}", f"p={AcceptanceConfig.dropout}", *taken]
    return f"takes {', '.join(taken)}" if taken else "takes no settings"
