"""Texts through heads for all examples of a task, kept in a file if one is given, so that a run can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path as File
from typing import Any

from dropmatch.evaluation.backends.base import Output
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.paper.kept import Kept
from dropmatch.evaluation.paper.paths import Path, decode_paths
from dropmatch.evaluation.tasks import Example

TOGETHER = 32  # paths decoded at once
Key = tuple[str, Path]  # example's id


class Texts:
    """Texts by example and path.

    Args:
        file: where they are kept; None keeps them in memory only.
        about: the settings that decide about them: models, task, budget.

    Attributes:
        kept: the file.

    Raises:
        SettingError: the file holds texts of other settings, or is damaged.
    """

    def __init__(self, file: File | None, about: Mapping[str, Any]) -> None:
        self._found = dict[Key, Output]()
        self.kept = Kept(file, about, "texts", "--texts")
        self.kept.load(self._take)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def of(self, example: Example, path: Path) -> Output:
        """The text of an example on a path."""
        return self._found[example.id, path]

    def whole(self, examples: Sequence[Example], paths: Sequence[Path]) -> list[Example]:
        """The examples whose texts on all of the paths are there."""
        return [example for example in examples if all((example.id, path) in self for path in paths)]

    def add(self, example: Example, path: Path, output: Output) -> None:
        """Keep one."""
        self._found[example.id, path] = output
        kept = {"text": output.text, "tokens": output.tokens, "finish": output.finish}
        self.kept.add(example, **asdict(path), **kept)

    def _take(self, line: dict[str, Any]) -> None:
        path = Path(line["dropout"], line["head"], line["seed"])
        self._found[line["id"], path] = Output(line["text"], line["tokens"], line["finish"])


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
        engine: of the Hugging Face kind; None if nothing is missing.
        examples: of a task.
        paths: what each is decoded through.
        max_tokens: the most tokens of a text.
        texts: where they go.
        progress: counts examples.
        together: how many paths are decoded at once.

    Raises:
        SettingError: an example has changed since its texts were kept, or a prompt does not fit the model's context.
    """
    texts.kept.check_examples(examples)
    if engine is not None:
        texts.kept.on(engine.model.device)
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
