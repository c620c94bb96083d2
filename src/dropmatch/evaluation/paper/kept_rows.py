"""The draft rows of all examples of a task, kept in a file if one is given: Tables 2 and 3 are made of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.paper.draft_rows import Rows, draft_rows
from dropmatch.evaluation.paper.kept import Kept
from dropmatch.evaluation.tasks import Example

Key = tuple[str, int]  # example's id, mask seed


class KeptRows:
    """Draft rows by example and mask seed.

    Args:
        file: where they are kept; None keeps them in memory only.
        about: the settings that decide about them: models, task, budget, heads.

    Attributes:
        kept: the file.

    Raises:
        SettingError: the file holds rows of other settings, or is damaged.
    """

    def __init__(self, file: Path | None, about: Mapping[str, Any]) -> None:
        self._found = dict[Key, Rows]()
        self.kept = Kept(file, about, "draft rows", "--rows")
        self.kept.load(self._take)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def add(self, example: Example, seed: int, rows: Rows) -> None:
        """Keep those of a text."""
        self._found[example.id, seed] = rows
        self.kept.add(example, seed=seed, rows=rows.as_lists())

    def by_seed(self, examples: Sequence[Example], seeds: Sequence[int]) -> dict[int, Rows]:
        """The rows of all examples that are there, by mask seed; a seed without any is left out.

        Raises:
            SettingError: there are texts, and nothing was drafted.
        """
        there = [(example.id, seed) for seed in seeds for example in examples if (example.id, seed) in self]
        found = {}
        for seed in seeds:
            parts = [self._found[key] for key in there if key[1] == seed and len(self._found[key])]
            if parts:
                found[seed] = Rows.join(parts)
        if there and not found:
            raise SettingError("no token was drafted: raise max_tokens (at least 2) or draft_length (at least 1)")
        return found

    def _take(self, line: dict[str, Any]) -> None:
        self._found[line["id"], int(line["seed"])] = Rows.from_lists(line["rows"])


def decode_rows(
    engine: Any,
    examples: Sequence[Example],
    configs: Sequence[AcceptanceConfig],
    draft_length: int,
    max_tokens: int,
    rows: KeptRows,
    progress: Progress,
) -> None:
    """Decode what is missing: each example under each of some settings that differ in their mask seed.

    Args:
        engine: of the Hugging Face kind, with a drafter that has a distribution; None if nothing is missing.
        examples: of a task.
        configs: the rule and its heads, one for each mask seed.
        draft_length: L.
        max_tokens: the most tokens of an example.
        rows: where they go.
        progress: told of each example and seed.

    Raises:
        SettingError: an example has changed since its rows were kept, the drafter has no distribution, or a prompt
            does not fit.
    """
    rows.kept.check_examples(examples)
    if engine is not None:
        rows.kept.on(engine.model.device)
    # example by example, so that all seeds have the same ones when a run is stopped
    for number, example in enumerate(examples, start=1):
        for config in configs:
            assert config.mask_seed is not None
            progress.begin(f"example {number} of {len(examples)}, mask seed {config.mask_seed}")
            if (example.id, config.mask_seed) in rows:
                progress.done(0, measured=False)
                continue
            found, tokens = draft_rows(engine, example, config, draft_length, max_tokens)
            rows.add(example, config.mask_seed, found)
            progress.done(tokens, measured=True)
