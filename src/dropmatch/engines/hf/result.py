"""What a generation returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.verify import DraftTokenTrace


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: token id.
        text: text that it made certain; half a character is held back until the token that completes it.
        reason: why it was committed: "exact", "sampled", "js", "majority", "naive", ..., "correction", "bonus".
        lossy: whether lossless decoding would have refused it.
        logprob: log-probability that the clean target gives it; None unless asked for.
    """

    id: int
    text: str
    reason: str
    lossy: bool
    logprob: float | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A finished (or interrupted) generation.

    Attributes:
        text: the generated text, special tokens left out; the decoded `token_ids`.
        token_ids: the generated ids, the token that ended the sequence included.
        finish_reason: "stop" (end-of-sequence token, stop string or stopping criterion), "length", or
            "abort" if the stream was left before its end.
        stop_reason: the token id or string that stopped it, if one did.
        prompt_tokens: length of the prompt.
        tokens: the same tokens with text and reason.
        statistics: counts and times.
        trace: per round, the verdict on every draft token; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    tokens: list[Token]
    statistics: Statistics
    trace: list[list[DraftTokenTrace]] | None = None

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities under the clean target, one a token; None unless asked for."""
        values = [token.logprob for token in self.tokens if token.logprob is not None]
        return values if values else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.prompt_tokens,
            "tokens": [asdict(token) for token in self.tokens],
            "statistics": self.statistics.as_dict(),
            "trace": None if self.trace is None else [[asdict(entry) for entry in r] for r in self.trace],
        }
