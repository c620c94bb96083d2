"""What a benchmark refuses before a model is loaded, and what is then left behind: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_support import Batched, write_prompts
from typer.testing import CliRunner

from dropmatch.cli.app import app
from dropmatch.engines.vllm import environment
from dropmatch.evaluation.bench import worker

ENGINES = ("hf", "vllm")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one would be started, the test has failed."""

    def started(*args: Any) -> Any:
        raise AssertionError("an engine is started")

    monkeypatch.setattr(worker, "_huggingface", started)
    monkeypatch.setattr(worker, "_wait", started)
    monkeypatch.setattr(environment, "require_vllm", lambda: True)


def bench(tmp_path: Path, *words: str, engine: str = "hf") -> str:
    """What is said on stderr by a command that is refused."""
    out = tmp_path / "results" / "first"
    found = CliRunner().invoke(
        app, ["bench", "--target", "big", "--draft", "small", "--engine", engine, "--out", str(out), *words]
    )
    assert found.exit_code == 2, (found.stderr, found.exception)
    assert not out.parent.exists()
    return found.stderr


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "w5"}\n{"prompt": 3}\n', "line 2: the field 'prompt' must be a non-empty str, got 3"),
        ("", "is empty: give one JSON object a line"),
        ('{"prompt": "w5"\n', "line 1: no valid JSON"),
        ('{"text": "w5"}\n', "line 1: the field 'prompt' is missing"),
        ('{"prompt": "w5", "id": 1}\n{"prompt": "w6", "id": 1}\n', "several examples have the id '1'"),
        (None, "cannot read"),
    ],
)
def test_data_that_will_not_do(tmp_path: Path, engine: str, content: str | None, message: str) -> None:
    good, bad = write_prompts(tmp_path / "good.jsonl", 2), tmp_path / "bad.jsonl"
    if content is not None:
        bad.write_text(content)
    assert message in bench(tmp_path, "--task", str(good), "--task", str(bad), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rules", "js,fly"], "fly: rule 'fly' with window=6 needs at least 7 draft tokens"),
        (["--rules", "js", "--draft", "prompt-lookup"], "js: rule 'js' compares distributions, and prompt-lookup"),
    ],
)
def test_cells_that_cannot_work(tmp_path: Path, engine: str, words: list[str], message: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    assert message in bench(tmp_path, "--task", str(prompts), *words, engine=engine)


def test_a_model_that_cannot_be_had_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out"
    words = ["bench", "--task", str(prompts), "--out", str(out), "--target", str(tmp_path / "none")]
    found = CliRunner().invoke(app, [*words, "--draft", "prompt-lookup", "--rules", "naive"])
    assert found.exit_code == 1, found.stderr
    assert not out.exists()


def test_what_other_examples_were_decoded_as_is_seen_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(Batched):
        def about(self) -> dict[str, Any]:
            return {}

    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out"
    words = ["bench", "--target", "big", "--draft", "small", "--rules", "js", "--task", str(prompts), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_huggingface", lambda plan: Known())
        assert CliRunner().invoke(app, words).exit_code == 0
    prompts.write_text('{"prompt": "w99"}\n')
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2, found.stderr
    assert "for another prompt" in found.stderr
    assert (out / "records.jsonl").exists()
