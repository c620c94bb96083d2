"""The trace of a generation: one line of JSON per round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from dropmatch.decoding.verify import DraftTokenTrace
    from dropmatch.engines.hf.result import Token


class TraceWriter:
    """Writes rounds as they come.

    Args:
        file: where to.
        tokenizer: for the text of draft tokens.
    """

    def __init__(self, file: TextIO, tokenizer: Any) -> None:
        self._file, self._tokenizer, self._rounds = file, tokenizer, 0

    def add(self, draft: Sequence[DraftTokenTrace], committed: Sequence[Token]) -> None:
        """Write one round: the verdicts on its draft tokens, and the tokens that it committed."""
        line = {
            "round": self._rounds,
            "draft": [self._entry(entry, cut=i >= len(committed)) for i, entry in enumerate(draft)],
            "committed": [
                {"id": token.id, "text": self._text(token.id), "reason": token.reason, "lossy": token.lossy}
                | ({} if token.logprob is None else {"logprob": token.logprob})
                for token in committed
            ],
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
        self._rounds += 1

    def _entry(self, entry: DraftTokenTrace, cut: bool) -> dict[str, Any]:
        """cut: it lies behind the token that ended the text."""
        verdict = "accepted" if entry.accepted else "not reached" if entry.reason == "not reached" else "rejected"
        return {
            "id": entry.token,
            "text": self._text(entry.token),
            "verdict": "cut" if entry.accepted and cut else verdict,
            "reason": entry.reason,
            "exact": entry.exact,
            "clean_id": entry.clean_token,
            "clean_text": self._text(entry.clean_token),
            "js": entry.js,
            "radius": entry.radius,
            "votes": entry.votes,
            "probability": entry.probability,
            "uniform_passes": entry.uniform_passes,
            "frequency": entry.frequency,
        }

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))


@contextmanager
def opened_for_writing(path: Path | None) -> Iterator[TextIO | None]:
    """The file, emptied; opened before models are loaded, so that a bad path shows at once.

    Raises:
        SettingError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise SettingError(f"cannot write {path}: {error.strerror}") from error
    with file:
        yield file
