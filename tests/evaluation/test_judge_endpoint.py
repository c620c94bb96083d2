"""Endpoints that do not take what they are sent: what is asked again without it, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from judge_support import Server, benchmark, judge, result, texts_of

from dropmatch.evaluation.judge.endpoint import _refused

pytest.importorskip("openai", reason="the judge's client needs the openai package")
NO_LIMIT = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
NO_TEMPERATURE = (
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported."
)
TOO_LARGE = (
    "'max_tokens' or 'max_completion_tokens' is too large: 2048. This model's maximum context length is 2048 tokens"
)


def as_reasoning_models(body: dict[str, Any]) -> dict[str, Any] | None:
    """One parameter at a time."""
    for name, message in (("max_tokens", NO_LIMIT), ("temperature", NO_TEMPERATURE)):
        if name in body:
            return {"message": message, "type": "invalid_request_error", "param": name, "code": "unsupported_value"}
    return None


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_what_an_endpoint_does_not_take_is_left_out_from_then_on(tmp_path: Path, concurrency: str) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[4]]", refuses=as_reasoning_models) as server:
        found = judge(folder, server.url, "--concurrency", concurrency, "--max-tokens", "99")
    assert found.exit_code == 0, found.output
    assert result(folder)["cells"]["js"]["score"]["value"] == 4.0
    assert result(folder)["unparsed"] == 0
    sent = [tuple(map(body.get, ("max_tokens", "max_completion_tokens", "temperature"))) for body in server.bodies]
    assert sent[0] == (99, None, 0)
    assert sent.count((None, 99, None)) == len(server.asked) == 11
    if concurrency == "1":
        assert sent == [(99, None, 0), (None, 99, 0), *[(None, 99, None)] * 11]
    assert "wise takes no temperature and was asked at its own" in found.stderr


def test_only_what_is_refused_is_left_out(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))

    def refuses(body: dict[str, Any]) -> dict[str, Any] | None:
        return {"message": NO_LIMIT} if "max_tokens" in body else None

    with Server(lambda asked: "[[4]]", refuses=refuses) as server:
        found = judge(folder, server.url, "--concurrency", "1")
    assert found.exit_code == 0, found.output
    assert len(server.bodies) == 12
    assert all(body["temperature"] == 0 for body in server.bodies)
    assert "takes no temperature" not in found.stderr


def test_a_limit_that_is_too_large_is_no_unknown_parameter(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: (400, TOO_LARGE, {}) if asked.texts == ("j3",) else "[[4]]") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0, found.output
    assert len(server.bodies) == 11
    assert all(body["max_tokens"] == 2048 and body["temperature"] == 0 for body in server.bodies)
    assert result(folder)["cells"]["js"]["unparsed"] == 1


def test_an_endpoint_that_takes_neither_name_is_not_asked_for_ever(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))

    def refuses(body: dict[str, Any]) -> dict[str, Any] | None:
        return {"message": f"{NO_LIMIT} {NO_TEMPERATURE}"}

    with Server(lambda asked: "[[4]]", refuses=refuses) as server:
        found = judge(folder, server.url, "--concurrency", "1")
    assert found.exit_code == 1
    assert "HTTP 400: Unsupported parameter" in found.stderr
    assert len(server.bodies) == 12  # one a question, and the first one twice


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (NO_LIMIT, {"max_tokens"}),
        (NO_TEMPERATURE, {"temperature"}),
        ("openai does not support parameters: ['max_tokens', 'temperature']", {"max_tokens", "temperature"}),
        ("`temperature` is deprecated for this model.", {"temperature"}),
        ("invalid temperature: only 1 is allowed for this model", {"temperature"}),
        ("[{'type': 'extra_forbidden', 'loc': ['body', 'max_tokens'], 'msg': 'Extra inputs are not permitted'}]",
         {"max_tokens"}),
        (TOO_LARGE, set()),
        ("max_tokens is too large: 5000. This model supports at most 4096 completion tokens", set()),
        ("max_tokens must be at least 1, got 0", set()),
        ("Unsupported parameter: 'max_completion_tokens'", set()),
        ("the model is unknown", set()),
    ],
)  # fmt: skip
def test_which_parameters_a_message_refuses(message: str, names: set[str]) -> None:
    assert _refused(message) == names
