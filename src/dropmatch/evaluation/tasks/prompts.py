"""Open-ended tasks: any file of prompts. There is no right answer, so there is no score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dropmatch.evaluation.tasks.base import Example, user_message
from dropmatch.evaluation.tasks.jsonl import read_rows


class Prompts:
    """Prompts of a JSONL file; `id` is optional.

    Args:
        path: the file.
        chat: each is a user's message; else a text to be continued.
        name: how reports call it; default: the file's name and its folder's.
    """

    metric: str | None = None

    def __init__(self, path: Path, chat: bool = True, name: str | None = None) -> None:
        self.path, self._chat = Path(path), chat
        self.name = name or f"{self.path.parent.name}/{self.path.stem}".lstrip("/")

    def examples(self, limit: int | None) -> list[Example]:
        """The first prompts of the file."""
        rows = read_rows(self.path, {"prompt": str})[:limit]
        return [
            Example(str(row.get("id", number)), user_message(row["prompt"]) if self._chat else row["prompt"])
            for number, row in enumerate(rows, start=1)
        ]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """None for each."""
        return [None] * len(texts)
