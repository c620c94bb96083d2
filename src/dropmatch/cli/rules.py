"""`dropmatch rules`: the acceptance rules there are."""

from __future__ import annotations

from rich import box
from rich.table import Table

from dropmatch.cli.console import output_console


def rules() -> None:
    """List the acceptance rules, for --rule and --rules."""
    from dropmatch.acceptance import get_rule, rule_names

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("rule", "lossless", "heads", "drafter", "accepts a draft token when"):
        table.add_column(heading)
    for name in rule_names():
        rule = get_rule(name)
        table.add_row(
            name,
            "yes" if rule.lossless else "no",
            "K" if rule.needs_heads else "none",
            "a model" if rule.needs_draft_distribution else "any",
            rule.summary,
        )
    output_console().print(table)
