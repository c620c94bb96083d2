"""Reasons on their way from the worker to the counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from dropmatch.engines.vllm import reporting
from dropmatch.engines.vllm.reporting import Reasons, RequestReasons

REASONS = Reasons("js", 5, ["exact", "js", "exact"])


@pytest.mark.parametrize(
    ("delivered", "drafted", "accepted"),
    [
        (4, 5, ["exact", "js", "exact"]),  # and the correction: nothing is cut
        (3, 3, ["exact", "js", "exact"]),  # the correction is cut, and with it what was refused
        (2, 2, ["exact", "js"]),
        (1, 1, ["exact"]),
    ],
)
def test_only_what_is_delivered_counts_as_accepted_or_proposed(
    delivered: int, drafted: int, accepted: list[str]
) -> None:
    assert REASONS.delivered(delivered) == Reasons("js", drafted, accepted)


def test_lossy_tokens_are_told_apart_from_exact_and_sampled_ones() -> None:
    total = RequestReasons()
    total.add(REASONS)
    total.add(Reasons("js", 4, ["sampled", "majority"]))
    assert total.to_dict() == {
        "rule": "js",
        "rounds": 2,
        "draft_tokens": 9,
        "accepted_tokens": 5,
        "lossy_tokens": 2,
        "accepted_by_reason": {"exact": 2, "js": 1, "majority": 1, "sampled": 1},
        "rounds_by_accepted": {"2": 1, "3": 1},
    }


def output(request: str, tokens: list[int], params: Any = None, metrics: Any = None) -> Any:
    """As much of an EngineCoreOutput as reporting looks at."""
    return SimpleNamespace(
        request_id=request, new_token_ids=tokens, kv_transfer_params=params, spec_decode_metrics=metrics
    )


def state(name: str, parent: Any = None) -> Any:
    """As much of a RequestState as reporting looks at; `name` is the user's."""
    return SimpleNamespace(external_req_id=name, parent_req=parent)


def test_the_engine_core_passes_reasons_on_beside_other_parameters() -> None:
    outputs = [output("a", [1, 2], {"remote": 7}), output("b", [3])]
    update = reporting.pass_on(lambda self, scheduled, made: {0: SimpleNamespace(outputs=outputs)})
    made = SimpleNamespace()
    reporting.put_on_output(made, {"a": REASONS})
    update(None, None, made)
    assert outputs[0].kv_transfer_params["remote"] == 7
    assert Reasons(**outputs[0].kv_transfer_params["dropmatch"]) == REASONS
    assert outputs[1].kv_transfer_params is None


def test_an_asynchronous_output_carries_the_reasons_too() -> None:
    inner = SimpleNamespace()
    reporting.put_on_output(SimpleNamespace(_model_runner_output=inner), {"a": REASONS})
    assert inner.dropmatch["a"]["rule"] == "js"


def counter(reason: str) -> float:
    labels = {"rule": "js", "reason": reason, "lossy": "false" if reason == "exact" else "true"}
    return prometheus_client.REGISTRY.get_sample_value("dropmatch:accepted_tokens_total", labels) or 0.0


def test_the_front_end_counts_what_remains_after_a_stop_string_and_hides_its_key_case_2() -> None:
    params = {"dropmatch": {"rule": "js", "drafted": 5, "accepted": ["exact", "js", "exact"]}}
    mine, aborted = output("a", [1, 2, 3, 4], dict(params)), output("gone", [1, 2, 3, 4], dict(params))
    seen = []

    def process(self: Any, outputs: Any) -> Any:
        seen.extend(each.kv_transfer_params for each in outputs)
        del mine.new_token_ids[2:]  # as vLLM does when a stop string ends within the block
        return SimpleNamespace(request_outputs=[])

    before = counter("exact"), counter("js")
    processor = SimpleNamespace(request_states={"a": state("a")})
    reporting.take_off_and_count(process)(processor, [mine, aborted])
    assert seen == [None, None]
    assert (counter("exact"), counter("js")) == (before[0] + 1, before[1] + 1)
    assert processor.dropmatch_requests["a"].drafted == 2
    assert "gone" not in processor.dropmatch_requests


def test_a_finished_request_shows_its_reasons_and_is_forgotten() -> None:
    class Metrics:
        def to_dict(self) -> dict[str, Any]:
            return {"num_spec_steps": 1}

    params = {"dropmatch": {"rule": "js", "drafted": 5, "accepted": ["js"]}}
    done = output("a", [1, 2], params, Metrics())
    processor = SimpleNamespace(request_states={"a": state("user-1")})
    finished = SimpleNamespace(request_id="user-1")

    def process(self: Any, outputs: Any) -> Any:
        self.request_states.clear()
        return SimpleNamespace(request_outputs=[finished])

    reporting.take_off_and_count(process)(processor, [done])
    assert finished.dropmatch == done.spec_decode_metrics.to_dict()["dropmatch"]
    assert done.spec_decode_metrics.to_dict()["num_spec_steps"] == 1
    assert done.spec_decode_metrics.to_dict()["dropmatch"]["accepted_by_reason"] == {"js": 1}
    assert processor.dropmatch_requests == {}


def test_a_request_for_several_texts_is_none_of_them() -> None:
    params = {"dropmatch": {"rule": "js", "drafted": 5, "accepted": ["js"]}}
    processor = SimpleNamespace(request_states={f"{i}_a": state("a", parent=object()) for i in range(2)})
    finished = SimpleNamespace(request_id="a")

    def process(self: Any, outputs: Any) -> Any:
        self.request_states.clear()
        return SimpleNamespace(request_outputs=[finished])

    reporting.take_off_and_count(process)(processor, [output(f"{i}_a", [1, 2], dict(params)) for i in range(2)])
    assert not hasattr(finished, "dropmatch")
    assert processor.dropmatch_requests == {}
