"""`dropmatch record`: what is refused before the first token, and what Ctrl-C leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Pair

from dropmatch import Engine
from dropmatch.config import AcceptanceConfig
from dropmatch.evaluation.lab import Record, Recorder, replay

Run = Callable[..., Any]


def write_prompts(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_a_prompt_that_is_too_long_is_refused_before_the_first_is_decoded(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("something is decoded")

    monkeypatch.setattr(Recorder, "begin", fail)
    prompts = write_prompts(tmp_path / "prompts.jsonl", "w10", "w11 " * 32768, "w12")
    result = run("record", str(tmp_path / "out.safetensors"), "--prompts", str(prompts), *pair.args())
    assert result.exit_code == 2, result.exception
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: prompt 2 of 3: prompt and max_tokens together are ")


def test_ctrl_c_keeps_the_rounds_that_are_done(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, rounds = Recorder.add, list[int]()

    def interrupted(self: Recorder, tokens: list[int]) -> None:
        if len(rounds) == 30:
            raise KeyboardInterrupt
        rounds.append(len(tokens))
        add(self, tokens)

    monkeypatch.setattr(Recorder, "add", interrupted)
    out = tmp_path / "out.safetensors"
    prompts = write_prompts(tmp_path / "prompts.jsonl", "w10", "w11", "w12")
    result = run("record", str(out), "--prompts", str(prompts), "--max-tokens", "60", *pair.args())
    assert result.exit_code == 130, result.exception
    record = Record.load(out)
    assert f"{len(record)} rows of {record.blocks} rounds on {record.about['prompts']} prompts" in result.stderr
    assert len(record) == len(record.about["contexts"]) > 0
    replay(record, AcceptanceConfig("naive"))


def test_what_stands_behind_the_end_of_a_text_is_left_out(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "eos_token_ids", lambda self: frozenset(range(5, 160, 7)))
    out = tmp_path / "out.safetensors"
    prompts = write_prompts(tmp_path / "prompts.jsonl", *(f"w{i}" for i in range(10, 30)))
    result = run("record", str(out), "--prompts", str(prompts), "--max-tokens", "200", *pair.args())
    assert result.exit_code == 0, result.exception
    sizes = Record.load(out).tensors["block"].bincount()
    assert 1 <= int(sizes.min()) < int(sizes.max()) == 5
