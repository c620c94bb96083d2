"""Files of JSON lines that grow while something runs, and may be cut off when it is killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write some lines at once."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if it is not there; one at its end that was not written out is cut off.

    Raises:
        SettingError: a line is damaged; the message has its number.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    found = []
    # not splitlines, which also splits at the line separators of Unicode
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise SettingError(f"{path}, line {number} is damaged ({error}): remove it to go on") from error
    return found
