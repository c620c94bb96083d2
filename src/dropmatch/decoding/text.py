"""Token ids to text, one token at a time."""

from __future__ import annotations

from typing import Any


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
