"""The processes that run vLLM: what one that ends early leaves, and how the others go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_support import Batched, Words, plan_of, run, write_prompts

from dropmatch.engines.vllm import environment
from dropmatch.evaluation.bench import under_way, worker
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import work_of
from dropmatch.evaluation.bench.store import Store


def test_a_process_that_ends_early_fails_what_it_left(prompts: list[str], tmp_path: Path) -> None:
    """vLLM's: what was done before stays done."""
    plan, task = plan_of("js", "naive:L=8", max_tokens=8), Words(prompts)
    run(plan_of("js", max_tokens=8), tmp_path, Batched(), task)
    for length in (5, 8):
        worker._note_failure(plan, tmp_path, work_of(plan, [task]), length, -11)
    store = Store(tmp_path, plan)
    assert sorted(store.failures) == [("words", "naive:L=8"), ("words", "strict:L=8")]
    assert "with L=8 ended with exit code -11" in store.failures["words", "naive:L=8"]
    # texts without scores: they are done, and their scoring is not
    (tmp_path / "scores.jsonl").unlink()
    worker._note_failure(plan, tmp_path, work_of(plan, [task]), 5, 1)
    assert Store(tmp_path, plan).failures["words", "js"].startswith("scoring: the process that ran vLLM with L=5")
    store, _ = run(plan, tmp_path, Batched(), task)
    assert store.failures == Store(tmp_path, plan).failures == {}


def test_a_cell_that_takes_vllm_down_leaves_the_others(
    prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def fake(command: Sequence[str]) -> list[str]:
        started.append(command[-1])
        return [sys.executable, str(Path(__file__).with_name("vllm_worker.py")), *command[3:]]

    inner = worker._command
    monkeypatch.setattr(worker, "_command", lambda *given: fake(inner(*given)))
    monkeypatch.setattr(environment, "require_vllm", lambda: False)
    file = write_prompts(tmp_path / "prompts.jsonl", 6)
    values = {"target": "t", "draft": "d", "engine": "vllm", "batch": 1, "max_tokens": 20, "tasks": [str(file)]}
    plan = Plan.from_values({**values, "rules": ["naive", "typical", "margin", "topk", "fly:L=8"]})
    folder = tmp_path / "out"
    (task,) = tasks = worker.tasks_of(plan)
    worker.run(plan, folder, tasks)
    store = Store(folder, plan)
    texts = {cell: len(store.texts(task.name, cell)) for cell in plan.rules}
    assert texts == {"strict": 6, "strict:L=8": 6, "naive": 2, "typical": 0, "margin": 6, "topk": 6, "fly:L=8": 6}
    killed = "the process that ran vLLM with L=5 ended with exit code -9 meanwhile"
    assert store.failures == {
        (task.name, "naive"): killed,
        (task.name, "typical"): "EngineDeadError: the GPU has fallen off the bus",
        (task.name, "margin"): f"scoring: {killed}",
    }
    for cell in ("strict", "topk", "fly:L=8"):
        assert all(store.scores[task.name, cell, str(i)] for i in range(1, 7))
    assert [len(json.loads(steps)) for steps in started] == [0, 1, 2, 3, 0]
    assert not list(folder.glob(".under-way*"))
    # tried again by the same command, which finds the rest
    worker.run(plan, folder, tasks)
    assert Store(folder, plan).failures == store.failures
    assert {cell: len(Store(folder, plan).texts(task.name, cell)) for cell in plan.rules} == texts


def test_a_process_that_ends_at_no_cell_is_not_started_again(
    prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("js", max_tokens=8, engine="vllm")
    codes: list[int] = []
    monkeypatch.setattr(worker, "_wait", lambda *given: codes.append(1) or 1)
    monkeypatch.setattr(environment, "require_vllm", lambda: False)
    worker.run(plan, tmp_path, [Words(prompts)])
    assert codes == [1]
    assert sorted(Store(tmp_path, plan).failures) == [("words", "js"), ("words", "strict")]

    # nor is one that was told to end
    def told_to_end(*given: Any) -> int:
        under_way.note(tmp_path, under_way.Step("words", "js"))
        codes.append(130)
        return 130

    monkeypatch.setattr(worker, "_wait", told_to_end)
    worker.run(plan, tmp_path, [Words(prompts)])
    assert codes == [1, 130]
