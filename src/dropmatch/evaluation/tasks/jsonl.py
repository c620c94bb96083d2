"""Rows of JSONL files, checked field by field."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError


def read_rows(path: Path, required: Mapping[str, type | tuple[type, ...]]) -> list[dict[str, Any]]:
    """The rows of a file.

    Args:
        path: one JSON object a line; blank lines are skipped. A name that ends in .gz is unpacked.
        required: fields that each must have, and of what type.

    Raises:
        SettingError: the file cannot be read, has no rows, or one is malformed: the message names line and field.
    """
    return [row for _, row in placed_rows(path, required)]


def placed_rows(path: Path, required: Mapping[str, type | tuple[type, ...]]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with the place that errors name; see `read_rows`."""
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            rows.append((place, _row(line, place, required)))
    if not rows:
        raise SettingError(f"{path} is empty: give one JSON object a line")
    return rows


def check_fields(
    row: Mapping[str, Any], place: str, required: Mapping[str, type | tuple[type, ...]], inside: str = ""
) -> None:
    """Refuse a row that lacks a field or has another type there.

    Args:
        row: fields by name.
        place: where it stands.
        required: as of `read_rows`.
        inside: what precedes the names in messages, as "meta.".

    Raises:
        SettingError: it names place and field.
    """
    for name, kind in required.items():
        if name not in row:
            raise SettingError(f"{place}: the field {inside + name!r} is missing")
        if not isinstance(row[name], kind) or row[name] == "":
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            shown = repr(row[name])
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise SettingError(f"{place}: the field {inside + name!r} must be a non-empty {kinds}, got {shown}")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SettingError(f"cannot read {path}: it is no gzip file ({error})") from error
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"cannot read {path}: it is no UTF-8 text") from error


def _row(line: str, place: str, required: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SettingError(f"{place}: no valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise SettingError(f"{place}: expected an object, got {type(row).__name__}")
    check_fields(row, place, required)
    return row
