"""What a task is: things to generate texts for, and how good the texts are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

Prompt = str | list[dict[str, str]]


def user_message(text: str) -> Prompt:
    """A text as chat messages."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Example:
    """One text to generate.

    Attributes:
        id: names it within its task; the same in every run.
        prompt: text that is sent as it is, or chat messages for the model's template; of a later turn of a
            conversation, what the user says in each turn up to it.
        stop: texts that end the generation.
        max_tokens: the most tokens that the task asks for; None leaves it to the run.
        data: what scoring needs.
        after: of a later turn, the examples of the turns before it.
        replies: their texts, once something was said: see `following`.
    """

    id: str
    prompt: Prompt
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()

    @property
    def whole(self) -> Prompt:
        """What the model is given: the prompt, of a later turn with the replies in it."""
        if not self.after:
            return self.prompt
        said = [[message] for message in self.prompt if isinstance(message, dict)]
        for user, reply in zip(said, self.replies, strict=False):
            user.append({"role": "assistant", "content": reply})
        return [message for turn in said for message in turn]


def following(example: Example, texts: Mapping[str, str]) -> Example:
    """An example after what was said in the turns before it.

    Raises:
        KeyError: a text is not there.
    """
    return replace(example, replies=tuple(texts[i] for i in example.after)) if example.after else example


def digest(example: Example) -> str:
    """Of what decides about an example's text beside the settings of a run and the replies before it."""
    what = json.dumps([example.prompt, example.stop, example.max_tokens], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:16]


class Task(Protocol):
    """A set of examples and a score.

    Attributes:
        name: how users choose it, and how reports call it.
        metric: name of the score; None for open-ended tasks.

    A task whose score runs texts as programs says so with `runs_programs = True`: that may take long.
    """

    name: str
    metric: str | None

    def examples(self, limit: int | None) -> list[Example]:
        """The first `limit` examples, or all.

        Raises:
            SettingError: the data cannot be found or read; the message names file, line and field.
        """
        ...

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """For each example and the text generated for it, the score in [0, 1]; None of an open-ended task."""
        ...
