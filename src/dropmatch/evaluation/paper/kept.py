"""Files that keep what an analysis has come to, so that a run can go on: JSON lines, as they grow.

A file of results has a line with their settings, then one for each result with a digest of what its example was. A
line at its end that was not written out is no line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.environment import machine, versions
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.lines import append_lines, read_lines
from dropmatch.evaluation.tasks import Example, digest

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)


class Kept:
    """A file of results.

    Args:
        file: None keeps nothing.
        about: the settings that decide about the results: models, task, budget.
        what: what they are, for errors.
        option: which option names the file, likewise.

    Attributes:
        machine: versions and machine that the first of them were made with; empty if nobody has said.
    """

    def __init__(self, file: Path | None, about: Mapping[str, Any], what: str, option: str) -> None:
        self._file, self._about, self._what, self._option = file, dict(about), what, option
        self._begun = False  # the line of settings is there
        self._examples = dict[str, str]()  # digests by id
        self.machine: dict[str, Any] = {}

    def load(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Tell of each result that is there.

        Raises:
            SettingError: they are of other settings, or the file is damaged.
        """
        if self._file is None or not self._file.exists() or not self._file.stat().st_size:
            return
        lines = read_lines(self._file)
        try:
            before = lines[0]
            for name, value in self._about.items():
                if name not in before or before[name] != value:
                    raise SettingError(
                        f"{self._file} holds {self._what} with {name}={before.get(name)!r}, and now it is {value!r}: "
                        f"give another {self._option}, or the same settings"
                    )
            self.machine = dict(before.get("machine") or {})
            for line in lines[1:]:
                self._examples[line["id"]] = line["prompt"]
                take(line)
        except SettingError:
            raise
        except (*_DAMAGE, IndexError) as error:
            raise SettingError(
                f"{self._file} is no file of {self._what} ({error!r}): give another {self._option}"
            ) from error
        self._begun = True

    def on(self, device: Any) -> None:
        """Results are made on this device from now on."""
        self.machine = self.machine or {**versions(), **machine(device)}

    def add(self, example: Example, **values: Any) -> None:
        """Keep a result: values by name."""
        self._examples[example.id] = digest(example)
        if self._file is None:
            return
        # the settings come with the first result: a run that fails before it binds no later one
        settings = [] if self._begun else [{**self._about, "machine": self.machine}]
        append_lines(self._file, [*settings, {"id": example.id, "prompt": self._examples[example.id], **values}])
        self._begun = True

    def check_examples(self, examples: Iterable[Example]) -> None:
        """Refuse examples that were decoded as something else: no result must count as that of another prompt.

        Raises:
            SettingError: one has another prompt, or another end, than its results were made with.
        """
        for example in examples:
            now = digest(example)
            if self._examples.get(example.id, now) != now:
                raise SettingError(
                    f"{self._file} holds {self._what} of example {example.id} for another prompt: its data or its task "
                    f"has changed since. Give another {self._option}, or the same data"
                )


class Numbers:
    """Numbers by what they are of.

    Args:
        file: where they are kept; None keeps them in memory only.

    Raises:
        SettingError: the file holds something else.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        try:
            lines = [] if file is None else read_lines(file)
            self._found: dict[str, float] = {str(line["of"]): float(line["value"]) for line in lines}
        except _DAMAGE as error:
            raise SettingError(f"{file} is no file of numbers ({error!r}): move it away") from error

    def all_of(
        self, of: Sequence[Sequence[str]], find: Callable[[list[int]], Sequence[float | None]]
    ) -> tuple[list[float | None], bool]:
        """Numbers of some things, and whether any was not there.

        Args:
            of: n things, each told apart by its texts.
            find: what finds out about some of them, by their index; a None is not kept.
        """
        keys = [hashlib.sha256(json.dumps(list(each)).encode()).hexdigest()[:32] for each in of]
        missing = {key: i for i, key in enumerate(keys) if key not in self._found}
        unknown = set[str]()
        if missing:
            values = dict(zip(missing, find(list(missing.values())), strict=True))
            known = {key: float(value) for key, value in values.items() if value is not None}
            unknown = missing.keys() - known.keys()
            if self._file is not None:
                append_lines(self._file, [{"of": key, "value": value} for key, value in known.items()])
            self._found |= known
        return [None if key in unknown else self._found[key] for key in keys], bool(missing)
