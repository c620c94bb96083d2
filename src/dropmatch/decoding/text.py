"""Prompts to token ids, and token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.errors import SettingError


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a text as it is, or of chat messages by the model's template; the assistant's last one goes on.

    Raises:
        SettingError: messages are given, and there is no chat template or it refuses them.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError("the tokenizer has no chat template: pass prompts as text, on the command line with --raw")
    goes_on = isinstance(prompt[-1], Mapping) and prompt[-1].get("role") == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=False
        )
    except Exception as error:  # templates are programs, and raise what they like
        raise SettingError(
            f"the model's chat template refuses these messages ({error}): pass prompts as text, on the command line "
            "with --raw"
        ) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Detokenizer:
    """Text of a growing sequence: each token yields what has become certain.

    A token may be part of a character, and what a token adds may depend on the one before it; so the last few
    tokens are decoded together and text is held back while it ends in half a character.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # tokens from here on are decoded together
        self._done = 0  # tokens before this one have yielded their text

    def add(self, token: int) -> str:
        """Text that the token makes certain, possibly empty."""
        self._ids.append(token)
        known, text = self._decode(self._context, self._done), self._decode(self._context, None)
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(known) :]

    def rest(self) -> str:
        """Text held back so far: half a character at the very end."""
        known, text = self._decode(self._context, self._done), self._decode(self._context, None)
        self._context = self._done = len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, end: int | None) -> str:
        return self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
