"""A comparison as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dropmatch.cli.comparison import PLAIN, STRICT, Method, PromptRecord, Record, Total, totals
from dropmatch.cli.settings import Settings
from dropmatch.environment import versions


def as_dict(
    prompts: Sequence[PromptRecord],
    settings: Settings,
    methods: Sequence[Method],
    repeats: int,
    machine: dict[str, Any],
    complete: bool,
) -> dict[str, Any]:
    """Everything that was measured, and what it was measured with."""
    shared = {name: value for name, value in settings.as_dict().items() if name != "rule"}  # each method has its own
    return {
        "complete": complete,
        "settings": {**shared, "repeats": repeats},
        "versions": versions(),
        "machine": machine,
        "methods": [asdict(method) for method in methods],
        "prompts": [
            {
                "prompt": prompt.prompt,
                "prompt_tokens": prompt.records[0].result.prompt_tokens,
                "methods": {record.method.name: _record(record, prompt) for record in prompt.records},
            }
            for prompt in prompts
        ],
        "overall": {total.method.name: _total(total, sums) for sums in [totals(prompts)] for total in sums},
    }


def _record(record: Record, prompt: PromptRecord) -> dict[str, Any]:
    plain, strict = prompt.of(PLAIN), prompt.of(STRICT)
    result = record.result.as_dict()
    return {
        **{name: result[name] for name in ("text", "token_ids", "tokens", "finish_reason", "stop_reason")},
        "tokens_per_second": record.tokens_per_second,
        "speedup_over_plain": _ratio(record.tokens_per_second, plain.tokens_per_second if plain else 0.0),
        "speedup_over_strict": _ratio(record.tokens_per_second, strict.tokens_per_second if strict else 0.0),
        "first_difference": asdict(record.difference) if record.difference else None,
        "warnings": record.warnings,
        "runs": [repetition.statistics.as_dict() for repetition in record.results],
    }


def _total(total: Total, totals: Sequence[Total]) -> dict[str, Any]:
    speeds = {other.method.name: other.tokens_per_second for other in totals}
    return {
        "tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "speedup_over_plain": _ratio(total.tokens_per_second, speeds[PLAIN]),
        "speedup_over_strict": _ratio(total.tokens_per_second, speeds.get(STRICT, 0.0)),
        "acceptance_length": total.acceptance_length,
        "lossy_share": total.lossy_share,
        "same_text_as_plain": total.same_text,
    }


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None
