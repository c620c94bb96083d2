"""A rule with its settings as one word, for command lines and files: `js:p=0.2:K=3`, `typical:threshold=0.1`.

    RULE[:NAME=VALUE]...

NAME is a field of `AcceptanceConfig` or `DraftConfig`, or one of the papers' letters (p, K, L, m, M); `denoised` and
`sampled` alone stand for verdict=...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import SettingError

LETTERS = {"p": "dropout", "K": "heads", "L": "draft_length", "m": "gaussian_tokens", "M": "shortlist_size"}
WORDS = {"denoised": ("verdict", "denoised"), "sampled": ("verdict", "sampled")}
_KNOWN = tuple(field.name for kind in (AcceptanceConfig, DraftConfig) for field in fields(kind) if field.name != "rule")


def parse_rule(text: str) -> dict[str, Any]:
    """Options by name, "rule" first; their values are checked by the settings that they go into.

    Raises:
        SettingError: the text is not of this form.
    """
    name, *parts = (part.strip() for part in text.split(":"))
    if not name:
        raise SettingError(f"{text!r} names no rule: write RULE or RULE:NAME=VALUE, as in js:p=0.2")
    options: dict[str, Any] = {"rule": name}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and key in WORDS:
            key, value = WORDS[key]
        elif not equals or not value:
            raise SettingError(
                f"{text!r}: {part!r} is no setting: write NAME=VALUE, as in js:p=0.2:K=3, or denoised or sampled"
            )
        key = LETTERS.get(key, key)
        if key not in _KNOWN:
            letters = ", ".join(f"{letter} for {meant}" for letter, meant in LETTERS.items())
            raise SettingError(f"{text!r}: unknown setting {key!r}; there are {', '.join(_KNOWN)} ({letters})")
        if key in options:
            raise SettingError(f"{text!r} sets {key} twice")
        options[key] = _value(value)
    return options


def rule_text(options: Mapping[str, Any]) -> str:
    """The shortest text that `parse_rule` turns into these options."""
    letters = {meant: letter for letter, meant in LETTERS.items()}
    rest = {key: value for key, value in options.items() if key != "rule" and value is not None}
    return ":".join([options["rule"], *(f"{letters.get(key, key)}={value}" for key, value in rest.items())])


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
