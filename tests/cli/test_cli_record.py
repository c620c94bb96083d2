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
from dropmatch.evaluation.lab import record as record_module

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


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit(9)])
def test_an_error_keeps_the_rounds_before_it(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    begin, prompts_begun = Recorder.begin, list[int]()

    def failing(self: Recorder, prompt: Any) -> None:
        if len(prompts_begun) == 2:
            raise error
        prompts_begun.append(len(prompt))
        begin(self, prompt)

    monkeypatch.setattr(Recorder, "begin", failing)
    out = tmp_path / "out.safetensors"
    prompts = write_prompts(tmp_path / "prompts.jsonl", "w10", "w11", "w12")
    result = run("record", str(out), "--prompts", str(prompts), "--max-tokens", "60", *pair.args())
    assert result.exit_code != 0
    record = Record.load(out)
    assert record.about["prompts"] == 2
    assert f"{out.name}: {len(record)} rows of {record.blocks} rounds on 2 prompts" in result.stderr


def test_the_file_is_there_and_whole_while_prompts_are_decoded(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SIGKILL would leave: looked at before each prompt, and in the midst of writing."""
    out, begin, seen = tmp_path / "out.safetensors", Recorder.begin, list[int]()
    write = record_module.save_file

    def looking(self: Recorder, prompt: Any) -> None:
        seen.append(Record.load(out).about["prompts"] if out.exists() else 0)
        begin(self, prompt)

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        before = out.read_bytes() if out.exists() else None
        write(tensors, path, metadata)
        path.write_bytes(path.read_bytes()[:100])
        assert (out.read_bytes() if out.exists() else None) == before
        write(tensors, path, metadata)

    monkeypatch.setattr(Recorder, "begin", looking)
    monkeypatch.setattr(record_module, "save_file", half)
    prompts = write_prompts(tmp_path / "prompts.jsonl", *(f"w{i}" for i in range(10, 28)))
    result = run("record", str(out), "--prompts", str(prompts), "--max-tokens", "10", *pair.args())
    assert result.exit_code == 0, result.exception
    assert seen == [0] * 8 + [8] * 8 + [16] * 2
    assert Record.load(out).about["prompts"] == 18
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "prompts.jsonl"]


def test_ctrl_c_before_the_first_round_leaves_nothing(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Recorder, prompt: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "begin", interrupted)
    result = run("record", str(tmp_path / "out.safetensors"), *pair.args())
    assert result.exit_code == 130
    assert "nothing to record" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_replay_says_what_is_close_only_and_what_it_cannot_ask(run: Run, pair: Pair, tmp_path: Path) -> None:
    out, file = tmp_path / "out.safetensors", tmp_path / "replay.json"
    prompts = write_prompts(tmp_path / "prompts.jsonl", *(f"w{i}" for i in range(10, 16)))
    assert run("record", str(out), "--prompts", str(prompts), *pair.args()).exit_code == 0
    result = run("replay", str(out), "typical:threshold=0.01", "fuzzy", "margin", "--json", str(file), width=140)
    assert result.exit_code == 0, result.exception
    assert "close to the live ones only" not in result.stdout
    found = json.loads(file.read_text())["rules"]["typical:threshold=0.01"]
    low, high = found["intervals"]["acceptance_length"]
    assert f"{low:.2f}-{high:.2f}" in result.stdout
    assert f" {found['exact_agreement_pct']:.1f} %" in result.stdout

    record = Record.load(out)
    for name in ("clean_entropy", "draft_distance"):
        del record.tensors[name]
    record.save(out)
    result = run("replay", str(out), "typical:threshold=0.01", "fuzzy", "margin", width=200)
    assert result.exit_code == 0, result.exception
    assert "Verdicts of typical:threshold=0.01, fuzzy are close to the live ones only" in result.stdout
    for rule, message in (
        ("js:evaluation=eager", "evaluation='eager' asks about exact matches too"),
        ("fly", "rule 'fly' with window=6 needs at least 7 draft tokens a round and draft_length is 5"),
    ):
        result = run("replay", str(out), rule, width=200)
        assert result.exit_code == 2
        assert message in result.stderr
