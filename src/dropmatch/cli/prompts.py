"""Prompts to compare on: from options, from a file, or built in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dropmatch.errors import SettingError

BUILT_IN = (
    "A baker makes 48 rolls in the morning. He sells a third of them before noon and half of the rest in the "
    "afternoon. How many rolls are left in the evening? Think step by step.",
    "Write a Python function that merges overlapping intervals, given as a list of (start, end) pairs. Add a "
    "docstring and an example.",
    "Why is it hard to fall asleep after a long evening in front of a screen? Answer in one paragraph.",
)


def collect(texts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts given one by one, then those of the file; the built-in ones if there are neither.

    Raises:
        SettingError: a prompt is empty, or the file cannot be read.
    """
    if any(not text.strip() for text in texts):
        raise SettingError("--prompt must not be empty")
    found = [*texts, *(read_prompts(file) if file is not None else ())]
    return found or list(BUILT_IN)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: JSON lines with a "prompt" each, or plain text, one a line.

    A file is taken as JSON lines if its name ends in .jsonl or its first line begins with "{".

    Raises:
        SettingError: it cannot be read or holds no prompt; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(f"cannot read the prompts in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"cannot read the prompts in {path}: it is no UTF-8 text") from error
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise SettingError(f'{path} holds no prompts: give one a line, or JSON lines with a "prompt" each')
    if path.suffix == ".jsonl" or lines[0][1].startswith("{"):
        return [_prompt_of(line, f"{path}, line {i}") for i, line in lines]
    return [line for _, line in lines]


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingError(f"{place}: no valid JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise SettingError(f'{place}: expected an object with a non-empty text under "prompt"')
    return prompt
