"""Problems of HumanEval and HumanEval+, from a local file or from EvalPlus's download."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.tasks.jsonl import check_fields, placed_rows

OVERRIDE = "HUMANEVAL_OVERRIDE_PATH"  # EvalPlus's own


def read_problems(path: Path | None, plus: bool) -> dict[str, dict[str, Any]]:
    """Problems by id, in the file's order.

    Each has prompt, entry_point, canonical_solution and either `suites`, lists of inputs (base, then plus), with
    atol; or `test`, the source of the original test.

    Args:
        path: a file; None is EvalPlus's download, or the file that $HUMANEVAL_OVERRIDE_PATH names.
        plus: with the inputs that EvalPlus added.

    Raises:
        SettingError: no data, or a row lacks something: the message names place and field.
    """
    if path is None and os.environ.get(OVERRIDE):
        path = Path(os.environ[OVERRIDE])
    rows = _downloaded() if path is None else placed_rows(path, {"prompt": str})
    found: dict[str, dict[str, Any]] = {}
    for place, row in rows:
        name, problem = _problem(row, place, plus)
        if name in found:
            raise SettingError(f"{place}: there is a {name!r} above already: give each problem once")
        found[name] = problem
    return found


def _downloaded() -> list[tuple[str, dict[str, Any]]]:
    from evalplus.data import get_human_eval_plus

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = get_human_eval_plus(err_incomplete=False)
    except Exception as error:
        raise SettingError(
            f"cannot download HumanEval+ ({type(error).__name__}: {error}): get HumanEvalPlus.jsonl.gz from the "
            f"releases of github.com/evalplus/humanevalplus_release and give its path as data or in ${OVERRIDE}"
        ) from error
    return [(f"EvalPlus's download, {name}", row) for name, row in rows.items()]


def _problem(row: Mapping[str, Any], place: str, plus: bool) -> tuple[str, dict[str, Any]]:
    """Of a row as EvalPlus and OpenAI release it, or with `id` and the rest in `meta`."""
    if "task_id" in row:
        check_fields(row, place, {"task_id": str, "prompt": str})
        name, values, inside = row["task_id"], row, ""
    else:
        check_fields(row, place, {"id": str, "prompt": str, "meta": dict})
        name, values, inside = row["id"], row["meta"], "meta."
    check_fields(values, place, {"entry_point": str, "canonical_solution": str}, inside)
    problem = {"prompt": row["prompt"]} | {key: values[key] for key in ("entry_point", "canonical_solution")}
    if not plus and "base_input" not in values and "test" in values:
        check_fields(values, place, {"test": str}, inside)
        return name, {**problem, "test": values["test"]}
    suites = ["base_input", "plus_input"] if plus else ["base_input"]
    check_fields(values, place, {**dict.fromkeys(suites, list), "atol": (int, float)}, inside)
    for suite in suites:
        if not all(isinstance(arguments, list) for arguments in values[suite]):
            raise SettingError(f"{place}: the field {inside + suite!r} must be a list of lists of arguments")
    if not values["base_input"]:
        raise SettingError(f"{place}: the field {inside + 'base_input'!r} is empty: a problem needs an input")
    return name, {**problem, "suites": [values[suite] for suite in suites if values[suite]], "atol": values["atol"]}
