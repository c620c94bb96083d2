"""Files of JSON lines that grow while something runs, and may be cut off when it is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write some lines at once, in place of one at the end that was not written out."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"\n", b""):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(text.encode("utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if it is not there; one at its end that was not written out is no line.

    Raises:
        SettingError: a line is damaged; the message has its number.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    found = []
    # not splitlines, which also splits at the line separators of Unicode
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise SettingError(f"{path}, line {number} is damaged ({error}): remove it to go on") from error
    return found
