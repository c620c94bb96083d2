"""Plans: what cells a grid has, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import (
    Plan,
    TaskChoice,
    baseline,
    cells,
    combinations,
    options,
    parse_tasks,
    with_setting,
    without_seed,
)
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.worker import check_cells, tasks_of

TASKS = {"target": "big", "tasks": ["a.jsonl"]}


def test_a_grid_is_every_combination() -> None:
    grid = {"rule": ["js", "naive"], "p": [0.1, 0.3], "L": 10}
    assert combinations(grid) == ["js:p=0.1:L=10", "js:p=0.3:L=10", "naive:p=0.1:L=10", "naive:p=0.3:L=10"]
    assert combinations({}) == []


def test_strict_is_there_once_for_each_draft_length() -> None:
    assert cells(["js", "naive:L=10"], ()) == ("strict", "strict:L=10", "js", "naive:L=10")
    assert cells(["strict", "js"], ()) == ("strict", "js")
    assert cells([], ()) == ("strict",)
    assert cells(["js:p=0.2", "js:dropout=0.2"], ()) == ("strict", "js:p=0.2")
    # the usual length and the usual p may be said or not
    assert cells(["js:L=5", "js:L=10"], ()) == ("strict", "strict:L=10", "js", "js:L=10")
    assert cells(["js", "js:p=0.3", "js:K=5:p=0.3"], ()) == ("strict", "js")
    assert baseline("js:p=0.2:L=10") == "strict:L=10"
    assert baseline("js:p=0.2") == "strict"


def test_seeds_make_cells_of_sampled_verdicts_only() -> None:
    found = cells(["js", "js:sampled", "typical", "naive:mask_seed=7"], [0, 1])
    sampled = "js:verdict=sampled"
    assert found == (
        "strict", "js", f"{sampled}:mask_seed=0", f"{sampled}:mask_seed=1", "typical", "naive:mask_seed=7"
    )  # fmt: skip
    assert without_seed(f"{sampled}:mask_seed=1") == sampled


def test_one_file_is_one_task() -> None:
    assert TaskChoice("./data//a.jsonl").name == TaskChoice("data/a.jsonl").name == "data/a.jsonl"
    assert TaskChoice("gsm8k").name == "gsm8k"


def test_a_cell_is_settings() -> None:
    assert options("js:p=0.2:L=10") == (AcceptanceConfig(dropout=0.2), DraftConfig(draft_length=10))


def test_a_plan_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "target: big\ndraft: small\nengine: vllm\nbatch: 4\nlimit: 20\n"
        "tasks:\n  - a.jsonl\n  - {name: b.jsonl, limit: 3, max_tokens: 9}\n"
        "  - {name: c, data: c.jsonl, fewshot_data: d.jsonl, num_fewshot: 5}\n"
        "rules: [typical, 'js:sampled']\ngrid: {rule: [js], p: [0.1, 0.2]}\nseeds: [0, 1]\n"
    )
    plan = Plan.from_values(Plan.read(path))
    assert (plan.target, plan.draft, plan.engine, plan.batch) == ("big", "small", "vllm", 4)
    sampled = ("js:verdict=sampled:mask_seed=0", "js:verdict=sampled:mask_seed=1")
    assert plan.rules == ("strict", "typical", *sampled, "js:p=0.1", "js:p=0.2")
    assert plan.task(plan.tasks[0]) == TaskChoice("a.jsonl", None, 20, None)
    assert plan.task(plan.tasks[1]) == TaskChoice("b.jsonl", None, 3, 9)
    assert plan.task(plan.tasks[2]) == TaskChoice("c", "c.jsonl", 20, None, fewshot_data="d.jsonl", num_fewshot=5)
    assert parse_tasks(["a.jsonl", "gsm8k=x.jsonl"]) == [
        {"name": "a.jsonl", "data": None},
        {"name": "gsm8k", "data": "x.jsonl"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [a\n", "no valid YAML"),
        ("- js\n", "expected settings by name"),
        ("target: big\ntask: [a]\n", "unknown setting 'task'.*tasks"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(SettingError, match=message):
        Plan.read(tmp_path / "plan.yaml")
    with pytest.raises(SettingError, match="cannot read the plan"):
        Plan.read(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": []}, "at least one task"),
        ({"tasks": "a.jsonl"}, "tasks must be a list"),
        ({"tasks": [{"limit": 3}]}, "a task is a name, or settings out of name"),
        ({"tasks": [{"name": "a", "shots": 3}]}, "a task is a name"),
        ({"rules": "js"}, "rules must be a list"),
        ({"rules": ["jss"]}, "unknown rule 'jss'"),
        ({"rules": ["js:p=1.5"]}, r"dropout \(p\) must be a number"),
        ({"rules": ["js:threshold=0.5"]}, "no meaning for rule 'js'"),
        ({"grid": {"p": [0.1]}}, "grid needs the rules"),
        ({"engine": "sglang"}, "engine must be one of: hf, vllm"),
        ({"batch": 4}, "batch=4 has no meaning with engine='hf'"),
        ({"engine": "vllm", "device": "cuda:1"}, "device='cuda:1' has no meaning with engine='vllm'"),
        ({"engine": "vllm", "draft_weights": "int4"}, "draft_weights='int4' has no meaning"),
        ({"batch": 0}, "batch must be an integer of at least 1"),
        ({"limit": 2.5}, "limit must be an integer"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"rules": ["js", "naive:mask_seed=3", "typical"], "seeds": [1]}, "seeds are of sampled verdicts, and none"),
        ({"batch": None, "engine": "vllm"}, "batch must be an integer of at least 1: leave it out"),
        ({"tasks": [{"name": 5}]}, "a task's name must be a text, got 5"),
        ({"tasks": [{"name": "a", "limit": -5}]}, "a: limit must be an integer of at least 1, got -5"),
        ({"tasks": [{"name": "a", "max_tokens": 0}]}, "a: max_tokens must be an integer of at least 1, got 0"),
        ({"tasks": [{"name": "a", "limit": "10"}]}, "a: limit must be an integer"),
        ({"tasks": [{"name": "a", "num_fewshot": -1}]}, "a: num_fewshot must be an integer of at least 0, got -1"),
        ({"tasks": [{"name": "a", "num_fewshot": True}]}, "a: num_fewshot must be an integer"),
        ({"tasks": [{"name": "a", "fewshot_data": 5}]}, "a task's fewshot_data must be a text, got 5"),
        ({"rules": [None]}, "a rule is a text as js:p=0.2, got None"),
        ({"rules": ["js:sampled"], "seeds": ["1"]}, "seeds must be integers, got '1'"),
        ({"raw": "no"}, "raw must be true or false, got 'no'"),
        ({"tasks": [{"name": "a", "metric": 5}]}, "a task's metric must be a text, got 5"),
        ({"tasks": [{"name": "a", "filter": ""}]}, "a task's filter must be a text, got ''"),
        ({"tasks": [{"name": "a", "unsafe_code": "yes"}]}, "a: unsafe_code must be true or false, got 'yes'"),
    ],
)
def test_what_cannot_be_run_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Plan.from_values({**TASKS, **values})


@pytest.mark.parametrize(
    ("rules", "more", "message"),
    [
        (["js", "js:L=0"], {}, r"strict:L=0: draft_length \(L\) must be at least 1 with vLLM"),
        (["js:L=8:draft_stop_probability=0.4"], {}, "only draft_length"),
        (["fly:L=3"], {}, r"fly:L=3: .*window=6 needs at least 7 draft tokens"),
        (
            ["naive", "fuzzy"],
            {"draft": "prompt-lookup"},
            "fuzzy: rule 'fuzzy' compares distributions, and prompt-lookup",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_an_engine_starts(
    rules: list[str], more: dict[str, Any], message: str
) -> None:
    plan = Plan.from_values({**TASKS, "engine": "vllm", "rules": rules, **more})
    with pytest.raises(SettingError, match=message):
        check_cells(plan)


@pytest.mark.parametrize("name", ["a.jsonl", "humaneval", "humaneval_plus"])
@pytest.mark.parametrize("setting", [{"num_fewshot": 0}, {"fewshot_data": "b.jsonl"}])
def test_few_shots_are_refused_where_there_are_none(name: str, setting: dict[str, Any]) -> None:
    plan = Plan.from_values({**TASKS, "tasks": [{"name": name, **setting}]})
    with pytest.raises(SettingError, match=f"{next(iter(setting))} has no meaning for .*{name}"):
        tasks_of(plan)


def test_a_folder_of_before_tasks_had_so_many_settings_is_still_read(tmp_path: Path) -> None:
    plan = Plan.from_values(TASKS)
    Store(tmp_path, plan).keep_plan()
    values = json.loads((tmp_path / "plan.json").read_text())
    for task in values["tasks"]:
        for name in ("fewshot_data", "num_fewshot", "metric", "filter", "unsafe_code"):
            del task[name]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert Plan.load(tmp_path) == plan
    Store(tmp_path, plan).keep_plan()
    assert Plan.load(tmp_path) == plan


def test_a_plan_is_kept_as_json() -> None:
    plan = Plan.from_values({**TASKS, "rules": ["js:p=0.2", "typical"], "limit": 3})
    assert Plan.of_json(plan.to_json()) == plan


def test_what_a_rule_does_not_look_at_makes_no_cell_of_its_own() -> None:
    grid = {"rule": ["js", "typical", "margin", "strict"], "p": [0.1, 0.2], "K": [3, 5]}
    assert cells(combinations(grid), ()) == (
        "strict", "js:p=0.1:K=3", "js:p=0.1:K=5", "js:p=0.2:K=3", "js:p=0.2:K=5", "typical:p=0.1:K=3",
        "margin:p=0.1:K=3",
    )  # fmt: skip
    assert cells(["js", "js:verdict=denoised", "js:heads_mode=gaussian", "js:M=64", "js:p=0.30"], ()) == (
        "strict",
        "js",
    )
    sampled = cells(["js:sampled:m=64", "js:heads_mode=dropout", "js:support=shortlist", "js:support=full:M=64"], ())
    assert sampled == ("strict", "js:verdict=sampled:m=64", "js:support=full:M=64")
    assert cells(["strict:p=0.1", "strict:evaluation=eager:token_floor=0.5"], ()) == ("strict",)
    different = ("typical", "typical:threshold=0.5", "typical:token_floor=0.5", "typical:evaluation=eager", "js:m=64")
    assert cells(different, ()) == ("strict", *different)
    big = 2**62
    assert len(cells([f"js:mask_seed={big}", f"js:mask_seed={big + 1}"], ())) == 3


def test_plain_decoding_is_one_cell_and_no_baseline_of_drafts() -> None:
    assert cells(["strict:L=0", "js", "js:L=0:p=0.1"], ()) == ("strict", "strict:L=0", "js")
    assert cells(["strict:L=0"], ()) == ("strict:L=0",)
    assert baseline("js") == "strict"


def test_names_that_are_none_are_told_with_those_near_them() -> None:
    with pytest.raises(SettingError, match="unknown setting 'max_token'; did you mean max_tokens"):
        Plan.from_values({**TASKS, "max_token": 5})
    with pytest.raises(SettingError, match="target must be the name of a model, got None"):
        Plan.from_values({"tasks": ["a"]})


def test_a_setting_of_the_command_line_is_for_all_tasks_or_for_one() -> None:
    tasks = ["gsm8k_cot", {"name": "a", "limit": 3}]
    assert with_setting(tasks, "filter", ["strict-match", "a=none"]) == [
        {"name": "gsm8k_cot", "filter": "strict-match"},
        {"name": "a", "limit": 3, "filter": "none"},
    ]
    assert [task["unsafe_code"] for task in with_setting(tasks, "unsafe_code", [True])] == [True, True]
    with pytest.raises(SettingError, match="filter: there is no task 'b' here; there are gsm8k_cot, a"):
        with_setting(tasks, "filter", ["b=none"])


@pytest.mark.parametrize("name", ["a.jsonl", "humaneval"])
@pytest.mark.parametrize("setting", ["metric", "filter"])
def test_a_score_is_refused_where_there_is_nothing_to_choose(name: str, setting: str) -> None:
    plan = Plan.from_values({**TASKS, "tasks": [{"name": name, setting: "x", "unsafe_code": True}]})
    with pytest.raises(SettingError, match=f"{setting} has no meaning for .*{name}.*: there is nothing to choose"):
        tasks_of(plan)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": ["fly:L=3"]}, r"fly:L=3: .*window=6 needs at least 7 draft tokens"),
        ({"rules": ["js"], "draft": "prompt-lookup"}, "js: rule 'js' compares distributions, and prompt-lookup"),
        ({"draft": None}, "nothing drafts for big: name a model, or prompt-lookup, as draft"),
        ({"draft": "none"}, "nothing drafts for big"),
    ],
)
def test_cells_that_cannot_work_are_refused_with_any_engine(values: dict[str, Any], message: str) -> None:
    for engine in ("hf", "vllm"):
        with pytest.raises(SettingError, match=message):
            check_cells(Plan.from_values({**TASKS, "draft": "small", "engine": engine, **values}))
    check_cells(Plan.from_values({**TASKS, "rules": ["strict:L=0"]}))  # which drafts nothing
