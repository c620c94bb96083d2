"""What judges have said of a benchmark's texts: judgements.jsonl in its folder, a line as each answer comes.

A line is of one cell's text, or of two cells' in the order shown, and holds what the judge answered. Judges are told
apart by model, kind and wording; a line about texts that the folder holds no more counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.lines import append_lines, read_lines
from dropmatch.evaluation.judge.prompts import Verdict, version

Key = tuple[str, tuple[str, ...], str]  # task, cells in the order shown, example


@dataclass(frozen=True)
class Judge:
    """Who judges, and how it is asked.

    Attributes:
        model: its name at the endpoint.
        kind: "single" or "pairwise".
        version: of the wording.
    """

    model: str
    kind: str
    version: str

    @staticmethod
    def now(model: str, kind: str) -> Judge:
        """With the present wording."""
        return Judge(model, kind, version(kind))


@dataclass(frozen=True)
class Judgement:
    """One verdict.

    Attributes:
        task: of the text.
        shown: the cell whose text it is, or two in the order shown.
        id: the example.
        texts: a digest of the texts, of a later turn with those of the turns before.
        answers: what the judge said, the last one with the verdict; none where it was not asked.
        verdict: a score, or "first", "second" or "tie"; None if no answer has one.
        references: a digest of the reference answers that were shown; empty without.
    """

    task: str
    shown: tuple[str, ...]
    id: str
    texts: str
    answers: tuple[str, ...]
    verdict: Verdict | None
    references: str = ""

    @property
    def key(self) -> Key:
        """What it is about."""
        return self.task, self.shown, self.id


def digest(texts: Sequence[str]) -> str:
    """Names texts in an order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


class Judgements:
    """The judgements of a benchmark's folder.

    Raises:
        SettingError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "judgements.jsonl"
        self._found: dict[Judge, dict[Key, Judgement]] = defaultdict(dict)
        for number, line in enumerate(read_lines(self.path), start=1):
            try:
                judge = Judge(*(line.pop(name) for name in ("model", "kind", "version")))
                judgement = _judgement(line)
            except (KeyError, TypeError, AttributeError) as error:
                raise SettingError(f"{self.path}, line {number} is no judgement: remove it to go on") from error
            self._found[judge][judgement.key] = judgement

    @property
    def judges(self) -> list[Judge]:
        """All whose judgements are here, in the order in which they came."""
        return list(self._found)

    def add(self, judge: Judge, judgements: Iterable[Judgement]) -> None:
        """Keep some."""
        judgements = list(judgements)
        append_lines(self.path, [asdict(judge) | asdict(each) for each in judgements])
        for each in judgements:
            self._found[judge][each.key] = each

    def get(self, judge: Judge, key: Key, texts: Sequence[str]) -> Judgement | None:
        """What a judge said of these texts."""
        found = self._found[judge].get(key) if judge in self._found else None
        return found if found is not None and found.texts == digest(texts) else None


def _judgement(line: dict[str, Any]) -> Judgement:
    return Judgement(**line | {"shown": tuple(line["shown"]), "answers": tuple(line["answers"])})
