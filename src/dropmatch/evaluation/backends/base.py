"""What the evaluation asks of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dropmatch.errors import DropMatchError, SettingError
from dropmatch.evaluation.tasks import Example
from dropmatch.evaluation.tasks.base import Prompt


class EngineLost(DropMatchError):
    """An engine that decodes nothing any more: only another process can go on."""


@dataclass(frozen=True)
class Output:
    """One generated text.

    Attributes:
        text: without special tokens.
        tokens: how many were generated.
        finish: "stop", or "length" where the budget cut it.
        rounds, proposed, accepted, lossy: counts over committed tokens, as in `Statistics`.
        reasons: accepted draft tokens by reason.
        lengths: rounds by how many draft tokens they accepted.
    """

    text: str
    tokens: int
    finish: str
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    lossy: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The texts of examples that were decoded together.

    Attributes:
        outputs: by example.
        seconds: wall time of all, prefill included.
    """

    outputs: list[Output]
    seconds: float


def budget_of(example: Example, max_tokens: int) -> int:
    """The most tokens of an example: the run's, or the task's own if they are fewer."""
    return min(max_tokens, example.max_tokens or max_tokens)


def at_most(example: Example, max_tokens: int) -> tuple[Prompt, int]:
    """What the model may be given, before there are replies: a prompt, and the most tokens that they add to it."""
    turns = len(example.after)
    return replace(example, replies=(".",) * turns).whole, turns * budget_of(example, max_tokens)


@contextmanager
def naming(example: Example) -> Iterator[None]:
    """Errors inside name the example."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"example {example.id}: {error}") from error


class Backend(Protocol):
    """An engine with a target and a drafter.

    Attributes:
        name: "hf" or "vllm".
        group: how many examples are decoded and timed together.
    """

    name: str
    group: int

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse settings before the first token.

        Args:
            options: fields of `AcceptanceConfig` and `DraftConfig`, "rule" among them.

        Raises:
            SettingError: they cannot be honoured.
        """
        ...

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None:
        """Refuse examples that cannot be decoded, before the first token.

        Raises:
            SettingError: chat messages that no chat template takes, or a prompt that leaves no room for its tokens; the
                message names the example.
        """
        ...

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        """Decode examples greedily, each until its stop strings or `max_tokens`.

        Raises:
            SettingError: the settings or a prompt cannot be honoured.
            EngineLost: something went wrong, and the engine with it; after any other error it goes on.
        """
        ...

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """Mean log-probability a token that the target without dropout gives each text; None of an empty text.

        Raises:
            EngineLost: as of `generate`.
        """
        ...

    def about(self) -> dict[str, Any]:
        """Versions and machine, for the report."""
        ...
