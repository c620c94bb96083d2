"""What tables and figures call a cell: its own text, and its floor where that would leave it open."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import STRICT, in_full, without_seed
from dropmatch.rule_text import parse_rule, rule_text


def labels(cells: Iterable[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Names of cells, and of rules less their mask seeds.

    The default of the floor depends on the verdict, and was another one in earlier versions. So a floor is named
    that is not the rule's usual one, or where cells of one rule have several.

    Args:
        cells: of one report.
        settings: of a cell, all of them, as they were when it was run; where they are not known, as they are now.
    """
    floors = {}
    for cell in cells:
        kept = settings.get(cell, {}).get("token_floor")
        floors[cell] = float(in_full(cell)["token_floor"] if kept is None else kept)
    of_rule: dict[str, set[float]] = defaultdict(set)
    for cell, floor in floors.items():
        of_rule[parse_rule(cell)["rule"]].add(floor)
    found = {}
    for cell, floor in floors.items():
        rule = parse_rule(cell)
        told = len(of_rule[rule["rule"]]) > 1 or floor != AcceptanceConfig(rule=rule["rule"]).floor
        if told and rule["rule"] != STRICT:
            rule.setdefault("token_floor", f"{floor:g}")
        found[cell] = rule_text(rule)
        found[without_seed(cell)] = rule_text({**rule, "mask_seed": None})
    return found


def settings_of(folder: Path) -> dict[str, dict[str, Any]]:
    """All settings of the cells that a benchmark's folder holds, as they were when they were run.

    Raises:
        SettingError: its plan cannot be read.
    """
    path = folder / "plan.json"
    if not path.exists():
        return {}
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")).get("cells", {})
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
    return found
