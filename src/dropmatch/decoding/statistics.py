"""What a generation did, counted over committed tokens only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counts of one generation.

    Tokens that are cut off by an end-of-sequence token, a stop string or the token budget are neither
    accepted nor proposed.

    Attributes:
        rounds: verification passes of the target.
        proposed: draft tokens proposed.
        accepted: draft tokens accepted.
        generated: tokens committed.
        reasons: accepted draft tokens by reason (exact, sampled, js, majority, naive, ...).
        lossy: accepted draft tokens that lossless decoding would have refused.
        lengths: rounds by how many draft tokens they accepted.
        judged: rows that the rule was asked about.
        compared: those of them whose draft distribution was compared with the heads.
        uniform_passes: compared rows where even a uniform draft would have passed.
        draft_seconds: time spent drafting.
        verify_seconds: time spent in the target's forward.
        judge_seconds: time spent on the verdict.
        seconds: wall time of the whole generation.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    generated: int = 0
    lossy: int = 0
    judged: int = 0
    compared: int = 0
    uniform_passes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    judge_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """tau = 1 + accepted / rounds: committed tokens per round, correction or bonus included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens, in [0, 1]; 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def lossy_share(self) -> float:
        """Lossy acceptances over generated tokens, in [0, 1]."""
        return self.lossy / self.generated if self.generated else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time, prefill included."""
        return self.generated / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts and rates, ready for JSON."""
        fields = {name: value for name, value in vars(self).items() if name not in ("reasons", "lengths")}
        rates = ("acceptance_length", "acceptance_rate", "lossy_share", "tokens_per_second")
        return {
            **fields,
            "reasons": dict(self.reasons),
            "lengths": dict(self.lengths),
            **{name: getattr(self, name) for name in rates},
        }
