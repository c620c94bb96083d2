"""Rows of JSONL files, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError


def read_rows(path: Path, required: Mapping[str, type | tuple[type, ...]]) -> list[dict[str, Any]]:
    """The rows of a file.

    Args:
        path: one JSON object a line; blank lines are skipped.
        required: fields that each must have, and of what type.

    Raises:
        SettingError: the file cannot be read, has no rows, or one is malformed: the message names line and field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"cannot read {path}: it is no UTF-8 text") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}", required))
    if not rows:
        raise SettingError(f"{path} is empty: give one JSON object a line")
    return rows


def _row(line: str, place: str, required: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SettingError(f"{place}: no valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise SettingError(f"{place}: expected an object, got {type(row).__name__}")
    for name, kind in required.items():
        if name not in row:
            raise SettingError(f"{place}: the field {name!r} is missing")
        if not isinstance(row[name], kind) or row[name] == "":
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise SettingError(f"{place}: the field {name!r} must be a non-empty {kinds}, got {row[name]!r}")
    return row
