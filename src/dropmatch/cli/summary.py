"""One line about a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dropmatch.engines.hf.result import GenerationResult


def summarize(result: GenerationResult) -> str:
    """Speed, acceptance length, lossy share and finish reason, with the mean log-probability if known."""
    s = result.statistics
    parts = [
        f"{s.generated} tokens in {s.seconds:.1f} s ({s.tokens_per_second:.1f} tokens/s)",
        f"acceptance length {s.acceptance_length:.2f}",
        f"lossy {s.lossy} of {s.generated} ({100 * s.lossy_share:.1f} %)",
        f"finish: {result.finish_reason}",
    ]
    if result.logprobs:
        parts.insert(3, f"mean log-probability {sum(result.logprobs) / len(result.logprobs):.3f}")
    return ", ".join(parts)
