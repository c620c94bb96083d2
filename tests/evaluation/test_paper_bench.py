"""Tables 5 and 6: plans, and what a benchmark's records come to in the paper's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_support import Quiet

from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench.plan import Plan, options
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.paper import batches as table5
from dropmatch.evaluation.paper.batches import batch_plans, batches_sheet, batches_table, measure_batches
from dropmatch.evaluation.paper.speculative import speculative_plan, speculative_sheets, speculative_table
from dropmatch.evaluation.tasks import Example, Task


class Words:
    metric: str | None = "accuracy"

    def __init__(self, name: str, prompts: Sequence[str]) -> None:
        self.name, self._prompts = name, prompts

    def examples(self, limit: int | None) -> list[Example]:
        return [Example(str(i), text) for i, text in enumerate(self._prompts)][:limit]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [float(text.endswith("right")) for text in texts]


class Clockwork:
    """Takes as long as its settings say: 4 s strict, 2 s by js, twice as long at L=10; seed 1 adds a second."""

    name = "fake"

    def __init__(self, group: int = 2) -> None:
        self.group = group
        self.asked: list[Mapping[str, Any]] = []

    def check(self, options: Mapping[str, Any]) -> None: ...

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None: ...

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        self.asked.append(options)
        strict, length = options["rule"] == "strict", options["draft_length"]
        seconds = (4.0 if strict else 2.0) * (2 if length == 10 else 1) + (options["mask_seed"] == 1)
        accepted = 6 if strict else 8
        outputs = [
            Output(
                "right" if strict or int(e.id) % 2 else "wrong", 10, "stop", 2, 10, accepted, 0, {"exact": accepted},
                {accepted // 2: 2},
            )
            for e in examples
        ]  # fmt: skip
        return Group(outputs, seconds * self.group)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [None] * len(texts)


VALUES = {"target": "tiny", "draft": "tinier", "tasks": ["gsm8k_cot"]}


def test_the_plan_of_table_6_has_the_paper_s_cells() -> None:
    plan = speculative_plan(VALUES, [10, 5], 5, 0.3, [0, 1])
    assert plan.rules[:2] == ("strict", "strict:L=10")
    assert len(plan.rules) == 2 + 4
    for rule in plan.rules[2:]:
        acceptance, draft = options(rule)
        assert (acceptance.rule, acceptance.heads, acceptance.dropout) == ("js", 5, 0.3)
        assert (acceptance.verdict, acceptance.heads_mode, acceptance.evaluation) == ("sampled", "dropout", "lazy")
        assert draft.draft_length in (5, 10)
        assert acceptance.mask_seed in (0, 1)
    eager = speculative_plan(VALUES, [5], 5, 0.3, [0], evaluation="eager")
    assert options(eager.rules[1])[0].evaluation == "eager"
    for lengths in ([], [5, 5], [0, 5]):
        with pytest.raises(SettingError, match="draft lengths"):
            speculative_plan(VALUES, lengths, 5, 0.3, [0])


@pytest.fixture
def tasks() -> list[Task]:
    return [Words("gsm8k_cot", [f"w{i}" for i in range(8)])]


def test_speedups_are_over_sd_at_the_smallest_length(tasks: list[Task], tmp_path: Path) -> None:
    plan, store = speculative_plan(VALUES, [5, 10], 5, 0.3, [0, 1]), None
    store = Store(tmp_path, plan)
    Runner(plan, plan.rules, tasks, Clockwork(), store).run(Quiet())
    found = speculative_table(plan, store, {"gsm8k_cot": "accuracy"})
    rows = {(row["method"], row["draft_length"]): row for row in found["tasks"]["gsm8k_cot"]["rows"]}
    assert list(rows) == [("SD", 5), ("SD+DM", 5), ("SD", 10), ("SD+DM", 10)]
    assert rows["SD", 5]["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rows["SD", 10]["speedup"]["value"] == 0.5
    assert rows["SD+DM", 5]["speedup"] == pytest.approx({"value": (2 + 4 / 3) / 2, "low": 4 / 3, "high": 2})
    assert rows["SD+DM", 10]["speedup"] == pytest.approx({"value": (1 + 0.8) / 2, "low": 0.8, "high": 1})
    assert rows["SD", 5]["tau"]["value"] == 4.0
    assert rows["SD+DM", 10]["tau"]["value"] == 5.0
    assert rows["SD", 10]["accuracy"]["value"] == 1.0
    assert rows["SD+DM", 5]["accuracy"]["value"] == 0.5
    (sheet,) = speculative_sheets(found, 2)
    assert all(len(row) == len(sheet.headings) for row in sheet.rows)
    assert sheet.rows[1] == (
        "SD+DM, L=5", "8", "1.67 [1.33, 2.00]", "5.00", "50.0", "1.10 / 5.50 / 94.29", "1.07 / 5.66 / 87.49",
    )  # fmt: skip
    json.dumps(found)


def test_a_part_of_a_run_and_other_tasks_have_their_table_too(tmp_path: Path) -> None:
    open_ended = Words("gsm8k", ["w1", "w2", "w3", "w4"])  # as gsm8k.jsonl is called
    open_ended.metric = None
    plan = speculative_plan({**VALUES, "tasks": ["gsm8k"], "log_likelihood": False}, [5, 7], 5, 0.3, [0])
    store = Store(tmp_path, plan)
    assert speculative_table(plan, store, {"gsm8k": None})["tasks"]["gsm8k"]["rows"] == []
    Runner(plan, plan.rules[:3], [open_ended], Clockwork(), store).run(Quiet())
    found = speculative_table(plan, store, {"gsm8k": None})
    assert [(row["method"], row["draft_length"]) for row in found["tasks"]["gsm8k"]["rows"]] == [
        ("SD", 5), ("SD+DM", 5), ("SD", 7),
    ]  # fmt: skip
    (sheet,) = speculative_sheets(found, 1)
    assert {row[4] for row in sheet.rows} == {"-"}
    assert {row[5:] for row in sheet.rows} == {("", "")}


def test_table_6_on_models_is_what_the_engine_does(tiny: Any, tmp_path: Path) -> None:
    engine, prompt = tiny.engine(), " ".join(f"w{i}" for i in tiny.prompt(3).tolist())
    task = Words("gsm8k_cot", [prompt])
    plan = speculative_plan({**VALUES, "max_tokens": 20}, [3, 6], 4, 0.4, [2])
    store, progress = Store(tmp_path, plan), Quiet()
    Runner(plan, plan.rules, [task], HuggingFace(engine), store).run(progress)
    found = speculative_table(plan, store, {"gsm8k_cot": "accuracy"})
    for row in found["tasks"]["gsm8k_cot"]["rows"]:
        rule: dict[str, Any] = {"rule": "strict"}
        if row["method"] == "SD+DM":
            rule = {"rule": "js", "heads": 4, "dropout": 0.4, "heads_mode": "dropout", "mask_seed": 2}
        live = engine.generate(prompt, max_tokens=20, draft_length=row["draft_length"], **rule)
        assert row["tau"]["value"] == pytest.approx(live.statistics.acceptance_length)
    again, progress = Store(tmp_path, plan), Quiet()
    Runner(plan, plan.rules, [task], HuggingFace(engine), again).run(progress)
    assert (progress.measured, progress.found) == (0, 4)


def run_on_clockwork(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
    """Stands in for the process that runs vLLM."""
    store = Store(folder, plan)
    store.keep_plan()
    Runner(plan, plan.rules, tasks, Clockwork(2 * plan.batch), store).run(Quiet())


def measured(batches: list[int], seeds: list[int], folder: Path) -> dict[str, Any]:
    plans = batch_plans(VALUES, batches, 10, 5, 0.3, seeds)
    measure_batches(plans, folder)
    return batches_table(plans, folder)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tasks: list[Task]) -> None:
    monkeypatch.setattr(table5, "require_vllm", lambda: True)
    monkeypatch.setattr(table5, "run", run_on_clockwork)
    monkeypatch.setattr(table5, "tasks_of", lambda plan: tasks)


def test_the_plans_of_table_5_differ_in_their_batch(vllm: None) -> None:
    plans = batch_plans(VALUES, [1, 4], 10, 5, 0.3, [0])
    assert {batch: (plan.batch, plan.engine) for batch, plan in plans.items()} == {1: (1, "vllm"), 4: (4, "vllm")}
    for plan in plans.values():
        strict, lossy = plan.rules
        assert strict == "strict:L=10"
        assert options(lossy)[0] == AcceptanceConfig(
            "js", verdict="sampled", heads_mode="dropout", mask_seed=0, heads=5, dropout=0.3
        )
        assert options(lossy)[1].draft_length == 10
    for batches in ([], [4, 4]):
        with pytest.raises(SettingError, match="batches must be different integers"):
            batch_plans(VALUES, batches, 10, 5, 0.3, [0])
    with pytest.raises(SettingError, match="batch must be an integer of at least 1"):
        batch_plans(VALUES, [0], 10, 5, 0.3, [0])


def test_table_5_has_the_throughput_over_sd_by_batch(vllm: None, tmp_path: Path) -> None:
    found = measured([1, 4], [0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-1", "batch-4"]
    assert found["task"] == "gsm8k_cot"
    for batch, groups in (("1", 4), ("4", 1)):
        entry = found["batches"][batch]
        assert entry["over_strict"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
        assert entry["groups"] == groups
        assert entry["acceptance_length"] == {"strict": 4.0, "js": 5.0}
        assert entry["failures"] == {}
    sheet = batches_sheet(found, 1)
    assert all(len(row) == len(sheet.headings) for row in sheet.rows)
    assert sheet.rows[0][:4] == ("1", "2.00", "4.00", "5.00")
    assert [row[-1] for row in sheet.rows] == ["1.19", "1.18"]
    seeds = measured([1], [0, 1], tmp_path / "seeds")
    assert seeds["batches"]["1"]["over_strict"] == pytest.approx({"value": (2 + 8 / 5) / 2, "low": 8 / 5, "high": 2})
    json.dumps(seeds)


def test_table_5_of_a_part_of_a_run(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
        if plan.batch == 4:
            Store(folder, plan).keep_plan()
            raise KeyboardInterrupt
        run_on_clockwork(plan, folder, tasks)

    monkeypatch.setattr(table5, "run", stopped)
    plans = batch_plans(VALUES, [1, 4, 8], 10, 5, 0.3, [0])
    with pytest.raises(KeyboardInterrupt):
        measure_batches(plans, tmp_path)
    found = batches_table(plans, tmp_path)
    assert list(found["batches"]) == ["1", "4"]  # nothing was begun of 8
    assert found["batches"]["1"]["over_strict"]["value"] == 2.0
    assert found["batches"]["4"]["over_strict"] is None
    sheet = batches_sheet(found, 1)
    assert [row[0] for row in sheet.rows] == ["1", "4"]
    assert sheet.rows[1][1:7] == ("-", "-", "-", "-", "-", "0")
    assert batches_table(plans, tmp_path / "none")["batches"] == {}
    with pytest.raises(SettingError, match="holds a benchmark with"):
        batches_table(batch_plans({**VALUES, "target": "other"}, [1], 10, 5, 0.3, [0]), tmp_path)


def test_a_batch_that_cannot_be_filled_is_refused(vllm: None, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a batch of 16 needs as many examples, and gsm8k_cot gives 8"):
        measure_batches(batch_plans(VALUES, [4, 16], 10, 5, 0.3, [0]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_vllm_table_5_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dropmatch.engines.vllm import environment

    monkeypatch.setattr(environment, "_installed", lambda name: False)
    with pytest.raises(SettingError, match="vLLM is not installed: pip install"):
        measure_batches(batch_plans(VALUES, [1], 10, 5, 0.3, [0]), tmp_path)
