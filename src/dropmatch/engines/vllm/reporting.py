"""Reasons for acceptance, from the worker that knows them to the front end that counts what was delivered.

worker        puts them on the ModelRunnerOutput
engine core   moves them onto each request's EngineCoreOutput, under a key of its `kv_transfer_params`
front end     takes them off again, and counts the tokens that remain after end-of-sequence tokens, stop
              strings and the token budget have cut: in Prometheus, and per request in
              `metrics.speculative_decoding` of the response (with --per-request-spec-decode-metrics), or in
              process as the attribute `dropmatch` of a finished `RequestOutput`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

from dropmatch.acceptance.evidence import EXACT, LOSSLESS_REASONS, SAMPLED, reason_name
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm.settings import KEY


@dataclass
class Reasons:
    """Why the draft tokens of one request were accepted in one step.

    Attributes:
        rule: its rule; "off" without one.
        drafted: how many tokens were proposed.
        accepted: a reason for each accepted one, in order.
    """

    rule: str
    drafted: int
    accepted: list[str] = field(default_factory=list)

    def delivered(self, tokens: int) -> Reasons:
        """What is left when only the step's first tokens were delivered; nothing after a cut was proposed either."""
        if tokens > len(self.accepted):  # the correction or bonus token came through, and with it all before
            return self
        return Reasons(self.rule, tokens, self.accepted[:tokens])


def reasons_of(
    first: int, drafted: int, length: int, codes: Mapping[int, int], greedy: bool, config: AcceptanceConfig | None
) -> Reasons:
    """Why the draft tokens of one request were accepted in one step.

    Args:
        first: index of its first row.
        drafted: how many tokens were proposed.
        length: how many tokens came of them, the correction or bonus token included.
        codes: reason codes of the rows that a rule accepted, by index.
        greedy: whether it does not sample.
        config: its settings; None is off.
    """
    own = EXACT if greedy else SAMPLED
    accepted = [codes.get(first + place, own) for place in range(min(drafted, length - 1))]
    return Reasons(
        rule="off" if config is None else config.rule,
        drafted=drafted,
        accepted=[reason_name(code) for code in accepted],
    )


class RequestReasons:
    """What a request's draft tokens came to, step by step; the rule is None until a draft was verified."""

    def __init__(self) -> None:
        self.rule: str | None = None
        self.rounds = 0
        self.drafted = 0
        self.accepted: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()

    def add(self, reasons: Reasons) -> None:
        """Count one step."""
        self.rule = reasons.rule
        self.rounds += 1
        self.drafted += reasons.drafted
        self.accepted.update(reasons.accepted)
        self.lengths[len(reasons.accepted)] += 1

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a response."""
        accepted = sum(self.accepted.values())
        lossy = sum(count for reason, count in self.accepted.items() if reason not in LOSSLESS_REASONS)
        return {
            "rule": self.rule,
            "rounds": self.rounds,
            "draft_tokens": self.drafted,
            "accepted_tokens": accepted,
            "lossy_tokens": lossy,
            "accepted_by_reason": dict(sorted(self.accepted.items())),
            "rounds_by_accepted": {str(length): count for length, count in sorted(self.lengths.items())},
        }


def put_on_output(output: Any, report: Mapping[str, Reasons]) -> None:
    """Worker: let a ModelRunnerOutput (or the asynchronous one around it) carry the reasons."""
    if report:
        for name in ("_model_runner_output", "model_runner_output"):  # of the V1 and the V2 runner
            output = getattr(output, name, output)
        output.dropmatch = {request: asdict(reasons) for request, reasons in report.items()}


def pass_on(update_from_output: Callable[..., Any]) -> Callable[..., Any]:
    """Engine core: `Scheduler.update_from_output` that hands the reasons on to the front end."""

    @wraps(update_from_output)
    def wrapper(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update_from_output(self, scheduler_output, model_runner_output, *args, **kwargs)
        report = getattr(model_runner_output, KEY, None)
        if report:
            for client in outputs.values():
                for output in client.outputs:
                    if output.request_id in report:
                        output.kv_transfer_params = {
                            **(output.kv_transfer_params or {}),
                            KEY: report[output.request_id],
                        }
        return outputs

    return wrapper


def take_off_and_count(process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Front end: `OutputProcessor.process_outputs` that counts the reasons of what it delivers."""

    @wraps(process_outputs)
    def wrapper(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        totals: dict[str, RequestReasons] = self.__dict__.setdefault("dropmatch_requests", {})
        found = []
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if params and KEY in params:
                reasons = Reasons(**params[KEY])
                output.kv_transfer_params = {k: v for k, v in params.items() if k != KEY} or None
                if output.request_id in self.request_states:  # else it was aborted, and nobody gets the tokens
                    found.append((output, reasons))
            if output.spec_decode_metrics is not None:
                total = totals.setdefault(output.request_id, RequestReasons())
                output.spec_decode_metrics = _with_reasons(output.spec_decode_metrics, total)
        states = {output.request_id: self.request_states.get(output.request_id) for output in engine_core_outputs}
        # of several texts for one prompt none is the request's own
        names = {s.external_req_id: name for name, s in states.items() if s is not None and s.parent_req is None}
        try:
            processed = process_outputs(self, engine_core_outputs, *args, **kwargs)
        finally:
            for output, reasons in found:
                if not output.new_token_ids:
                    continue
                delivered = reasons.delivered(len(output.new_token_ids))
                total = totals.setdefault(output.request_id, RequestReasons())
                total.add(delivered)
                _count(delivered)
            ended = {name: totals.pop(name) for name in list(totals) if name not in self.request_states}
        for output in processed.request_outputs:
            own = ended.get(names.get(output.request_id, ""))
            if own is not None:
                output.dropmatch = own.to_dict()
        return processed

    return wrapper


def _with_reasons(metrics: Any, total: RequestReasons) -> Any:
    """vLLM's metrics of a request whose `to_dict` also has the reasons, as they are when it is called."""
    made = type(metrics).to_dict

    class WithReasons(type(metrics)):  # type: ignore[misc]
        def to_dict(self) -> dict[str, Any]:
            return {**made(self), KEY: total.to_dict()}

    metrics.__class__ = WithReasons
    return metrics


_counters: dict[str, Any] = {}


def _count(reasons: Reasons) -> None:
    """Add one step to the counters in Prometheus."""
    counters = _counters or _make_counters()
    counters["drafts"].labels(reasons.rule).inc()
    counters["drafted"].labels(reasons.rule).inc(reasons.drafted)
    for reason, count in Counter(reasons.accepted).items():
        lossy = "false" if reason in LOSSLESS_REASONS else "true"
        counters["accepted"].labels(reasons.rule, reason, lossy).inc(count)


def _make_counters() -> dict[str, Any]:
    from prometheus_client import Counter as Metric

    _counters.update(
        drafts=Metric("dropmatch:drafts", "Drafts verified, by acceptance rule.", ["rule"]),
        drafted=Metric("dropmatch:draft_tokens", "Draft tokens proposed, by acceptance rule.", ["rule"]),
        accepted=Metric(
            "dropmatch:accepted_tokens",
            "Draft tokens accepted and delivered, by acceptance rule and reason; lossy ones are no exact match.",
            ["rule", "reason", "lossy"],
        ),
    )
    return _counters
