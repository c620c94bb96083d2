"""What a process is at, noted so that another one knows which cell took it down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dropmatch.evaluation.bench.store import write_file

NAME = ".under-way.json"


@dataclass(frozen=True)
class Step:
    """Part of a run.

    Attributes:
        task, cell: of which.
        scoring: its texts are read again; else they are made.
    """

    task: str
    cell: str
    scoring: bool = False


Note = Callable[[Step], None]


def note(folder: Path, step: Step, error: str = "") -> None:
    """Note what is done now, or how it ended."""
    write_file(folder / NAME, json.dumps({**asdict(step), "error": error}) + "\n")


def noted(folder: Path) -> tuple[Step, str] | None:
    """What was done last, and how it ended ("" if that is not known); None if nothing is noted."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    error = found.pop("error")
    return Step(**found), error


def forget(folder: Path) -> None:
    """Remove the note."""
    (folder / NAME).unlink(missing_ok=True)
