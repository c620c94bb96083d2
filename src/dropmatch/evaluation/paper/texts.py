"""Texts through heads for all examples of a task, kept in a file if one is given, so that a run can go on.

The file has a line with the settings, then one for each text, with a digest of what its example was. A line at its end
that was not written out is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path as File
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends.base import Output
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.paper.paths import Path, decode_paths
from dropmatch.evaluation.tasks import Example, digest

TOGETHER = 32  # paths decoded at once
Key = tuple[str, Path]  # example's id


class Texts:
    """Texts by example and path.

    Args:
        file: where they are kept; None keeps them in memory only.
        about: the settings that decide about them: models, task, budget.

    Raises:
        SettingError: the file holds texts of other settings, or is damaged.
    """

    def __init__(self, file: File | None, about: Mapping[str, Any]) -> None:
        self._file, self._found = file, dict[Key, Output]()
        self._examples = dict[str, str]()  # digests by id
        if file is None:
            return
        if not file.exists() or not file.stat().st_size:
            self._append(dict(about))
            return
        self._load(file, dict(about))

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def of(self, example: Example, path: Path) -> Output:
        """The text of an example on a path."""
        return self._found[example.id, path]

    def add(self, example: Example, path: Path, output: Output) -> None:
        """Keep one."""
        self._found[example.id, path] = output
        self._examples[example.id] = digest(example)
        kept = {"text": output.text, "tokens": output.tokens, "finish": output.finish}
        self._append({"id": example.id, "prompt": self._examples[example.id], **asdict(path), **kept})

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Refuse examples that were decoded as something else: no text must count as the answer to another prompt.

        Raises:
            SettingError: one has another prompt, or another end, than its texts were made with.
        """
        for example in examples:
            now = digest(example)
            if self._examples.get(example.id, now) != now:
                raise SettingError(
                    f"{self._file} holds texts of example {example.id} for another prompt: its data or its task has "
                    "changed since. Give another --texts, or the same data"
                )

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _load(self, file: File, about: dict[str, Any]) -> None:
        data = file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            # not splitlines, which also splits at the line separators of Unicode
            before, *lines = (json.loads(line) for line in whole.decode("utf-8").split("\n")[:-1])
            for name, value in about.items():
                if name not in before or before[name] != value:
                    raise SettingError(
                        f"{file} holds texts with {name}={before.get(name)!r}, and now it is {value!r}: give another "
                        "--texts, or the same settings"
                    )
            for line in lines:
                path = Path(line["dropout"], line["head"], line["seed"])
                self._examples[line["id"]] = line["prompt"]
                self._found[line["id"], path] = Output(line["text"], line["tokens"], line["finish"])
        except SettingError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"{file} is no file of texts ({error!r}): give another --texts") from error
        if len(whole) < len(data):
            with file.open("r+b") as out:
                out.truncate(len(whole))


def decode_all(
    engine: Any,
    examples: Sequence[Example],
    paths: Sequence[Path],
    max_tokens: int,
    texts: Texts,
    progress: Progress,
    together: int = TOGETHER,
) -> None:
    """Decode what is missing, example by example; `progress` is told of each.

    Args:
        engine: of the Hugging Face kind.
        examples: of a task.
        paths: what each is decoded through.
        max_tokens: the most tokens of a text.
        texts: where they go.
        progress: counts examples.
        together: how many paths are decoded at once.

    Raises:
        SettingError: an example has changed since its texts were kept, or a prompt does not fit the model's context.
    """
    texts.check_examples(examples)
    for number, example in enumerate(examples, start=1):
        progress.begin(f"example {number} of {len(examples)}")
        missing = [path for path in paths if (example.id, path) not in texts]
        tokens = 0
        for first in range(0, len(missing), together):
            part = missing[first : first + together]
            outputs = decode_paths(engine, example, part, max_tokens)
            for path, output in zip(part, outputs, strict=True):
                texts.add(example, path, output)
                tokens += output.tokens
        progress.done(tokens, measured=bool(missing))
