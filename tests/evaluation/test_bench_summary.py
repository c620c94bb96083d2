"""What the records of a benchmark come to, and its reports."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_support import Batched, Quiet, Words, plan_of, run

from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import best, summarise
from dropmatch.evaluation.bench.tables import sheets
from dropmatch.evaluation.statistics import paired
from dropmatch.evaluation.tasks import Example


def test_the_summary_is_what_the_records_say(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js:p=0.4", max_tokens=20)
    store, _ = run(plan, tmp_path, HuggingFace(tiny.engine()), Words(prompts, tokens=20))
    task = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    for cell in plan.rules:
        outputs = [store.groups["words", cell, n].outputs[0] for n in range(5)]
        entry = task["cells"][cell]
        rounds, accepted = sum(o["rounds"] for o in outputs), sum(o["accepted"] for o in outputs)
        assert entry["acceptance_length"] == pytest.approx(1 + accepted / rounds)
        interval = entry["acceptance_length_interval"]
        assert interval["low"] <= interval["value"] == pytest.approx(1 + accepted / rounds)
        each = [1 + o["accepted"] / o["rounds"] for o in outputs]
        assert min(each) <= interval["low"] <= interval["high"] <= max(each)
        assert entry["score"]["value"] == pytest.approx(sum(len(o["text"].split()) >= 20 for o in outputs) / 5)
        assert entry["truncated"] == sum(o["finish"] == "length" for o in outputs)
        first = entry["accepted_by_position"][0]
        assert first == pytest.approx(sum(n for o in outputs for k, n in o["lengths"].items() if int(k) > 0) / rounds)
        assert sum(entry["accepted_by_position"]) == pytest.approx(accepted / rounds)
    speeds = [
        (a["tokens"] / store.groups["words", "js:p=0.4", n].seconds)
        / (b["tokens"] / store.groups["words", "strict", n].seconds)
        for n in range(5)
        for a, b in [(store.groups["words", cell, n].outputs[0] for cell in ("js:p=0.4", "strict"))]
    ]
    assert task["cells"]["js:p=0.4"]["over_strict"]["value"] == pytest.approx(sorted(speeds)[2])


def test_speeds_of_several_draft_lengths_are_compared_with_one(prompts: list[str], tmp_path: Path) -> None:
    class Longer(Batched):
        """At L=8 strict takes three times as long, and js twice as long as strict at L=5."""

        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            seconds = {("strict", 5): 1.0, ("strict", 8): 3.0, ("js", 5): 0.8, ("js", 8): 2.0}
            group = super().generate(examples, options, max_tokens)
            return Group(group.outputs, seconds[options["rule"], options["draft_length"]])

    plan = plan_of("js", "js:L=8", max_tokens=8)
    store, _ = run(plan, tmp_path, Longer(), Words(prompts, tokens=1))
    task = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    assert task["cells"]["js:L=8"]["over_strict"]["value"] == pytest.approx(1.5)
    assert task["cells"]["js:L=8"]["over_first"]["value"] == pytest.approx(0.5)
    assert task["best"] == "js"
    (sheet,) = sheets({"tasks": {"words": task}})
    column = sheet.headings.index("speed over strict of its L")
    shown = {row[0]: row[column : column + 2] for row in sheet.rows}
    assert shown["strict"] == ("1", "1")
    assert shown["strict:L=8"][0] == "1"
    assert shown["strict:L=8"][1].startswith("0.33")


def test_a_cell_without_its_strict_one_has_no_speed(prompts: list[str], tmp_path: Path) -> None:
    class Dead(Batched):
        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            if (options["rule"], options["draft_length"]) == ("strict", 8) and max_tokens > 8:
                raise RuntimeError("gone")
            return super().generate(examples, options, max_tokens)

    plan = plan_of("js", "js:L=8", max_tokens=20)
    store, _ = run(plan, tmp_path, Dead(), Words(prompts))
    task = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    (sheet,) = sheets({"tasks": {"words": task}})
    assert {row[0]: row[2] for row in sheet.rows}["js:L=8"] == ""
    assert task["cells"]["js:L=8"]["over_first"]  # faster, perhaps, and compared with nothing
    assert task["best"] != "js:L=8"


def test_speeds_are_compared_where_cells_ran_by_turns(prompts: list[str], tmp_path: Path) -> None:
    """What was decoded on another day is compared in its texts only."""

    class Fast(Batched):
        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            group = super().generate(examples, options, max_tokens)
            return Group(group.outputs, 0.5 if options["rule"] == "strict" else 0.25)

    task = Words(prompts, tokens=1)
    run(plan_of("js", max_tokens=8, limit=2), tmp_path, Fast(), task)
    run(plan_of("js", "naive", max_tokens=8, limit=4), tmp_path, Fast(), task)
    plan = plan_of("js", "naive", max_tokens=8)
    found = summarise(plan, Store(tmp_path, plan), {"words": "length"})["tasks"]["words"]
    assert found["cells"]["js"]["over_strict"] == {"value": 2.0, "low": 2.0, "high": 2.0, "pairs": 2}
    assert found["cells"]["naive"]["over_strict"]["pairs"] == 1  # of its two groups
    (sheet,) = sheets({"tasks": {"words": found}})
    assert {row[0]: row[2] for row in sheet.rows} == {"strict": "1", "js": "2.00 (2 groups)", "naive": "2.00 (1 group)"}

    again = tmp_path / "again"
    run(plan_of(max_tokens=8), again, Fast(), task)
    run(plan_of("js", max_tokens=8), again, Fast(), task)
    plan = plan_of("js", max_tokens=8)
    found = summarise(plan, Store(again, plan), {"words": "length"})["tasks"]["words"]
    assert found["cells"]["js"]["over_strict"] is None
    assert found["cells"]["js"]["against_strict"]["n"] == 5
    assert found["best"] is None
    (sheet,) = sheets({"tasks": {"words": found}})
    assert any(note.startswith("No speed for js: decoded at another time than strict") for note in sheet.notes)


def test_a_rule_of_several_seeds_wins_by_their_mean() -> None:
    def cell(rule: str, speed: float, **more: Any) -> dict[str, Any]:
        over = {"value": speed, "low": speed, "high": speed, "pairs": 9}
        return {"rule": {"rule": rule}, "over_first": over, "over_strict": over, "flags": [], **more}

    cells = {
        "strict": cell("strict", 1.0),
        "naive": cell("naive", 1.3),
        "js:verdict=sampled:mask_seed=0": cell("js", 1.5),
        "js:verdict=sampled:mask_seed=1": cell("js", 1.0),
    }
    assert best(cells) == "naive"
    cells["js:verdict=sampled:mask_seed=1"] = cell("js", 1.2)
    assert best(cells) == "js:verdict=sampled"
    cells["js:verdict=sampled:mask_seed=1"]["flags"] = ["loops"]
    assert best(cells) == "naive"


def test_few_losses_are_not_measurable() -> None:
    entry = asdict(paired([1.0] * 100, [0.0] * 4 + [1.0] * 96))
    assert entry["difference"]["high"] < 0  # the bootstrap is too sure
    one = {"value": 1.0, "low": 1.0, "high": 1.0}
    cells = {
        "strict": {"rule": {"rule": "strict"}, "over_first": one, "flags": []},
        "js": {"rule": {"rule": "js"}, "over_first": {**one, "value": 1.2}, "flags": [], "against_strict": entry},
    }
    cells["js"]["over_strict"] = one
    assert best(cells) == "js"
    cells["js"]["against_strict"] = asdict(paired([1.0] * 100, [0.0] * 8 + [1.0] * 92))
    assert best(cells) is None


class Looping(Batched):
    """Fast, and out of order when lossy."""

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        group = super().generate(examples, options, max_tokens)
        if options["rule"] == "strict":
            return group
        return Group([Output("so it goes " * 9, 40, "length", 2, 5, 2, 1, {"js": 2}, {1: 2}) for _ in examples], 0.1)


def test_a_cell_whose_texts_loop_is_flagged_and_never_the_best(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js", max_tokens=20)
    store, _ = run(plan, tmp_path, Looping(), Words(prompts, tokens=1))
    task = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    assert task["cells"]["js"]["over_strict"]["value"] > 10
    assert task["best"] is None
    assert [flag.split(" are ")[1] for flag in task["cells"]["js"]["flags"]] == [
        "looping, 0 % of strict's",
        "cut off, 0 % of strict's",
    ]


def test_the_reports_open_by_themselves(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js:sampled", "js:sampled:L=8", "naive", max_tokens=20, seeds=[0, 1])
    store, _ = run(plan, tmp_path, Batched(), Words(prompts))
    write_report(plan, store, {"words": "length"})
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:href", "href"))
    assert not re.search(r"@import|url\((?!#)", page)
    assert page.count("<table>") == 2
    assert "js:verdict=sampled:mask_seed=1" in page
    drawn = sorted(tmp_path.glob("*.svg"))
    pytest.importorskip("matplotlib")
    assert len(drawn) == 4 == page.count("<svg")
    for path in drawn:
        ElementTree.parse(path)
    summary = json.loads((tmp_path / "report.json").read_text())
    assert summary["tasks"]["words"]["seeds"]["js:verdict=sampled"]["seeds"] == 2


def test_tasks_of_any_name_have_figures_of_their_own(prompts: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["データ/一", "データ/二", "data/2", "data 2"]
    tasks = [Words(prompts) for _ in names]
    for task, name in zip(tasks, names, strict=True):
        task.name = name
    plan = plan_of("js", max_tokens=20, tasks=names)
    store = Store(tmp_path, plan)
    Runner(plan, plan.rules, tasks, Batched(), store).run(Quiet())
    write_report(plan, store, dict.fromkeys(names, "length"))
    links = re.findall(r"!\[(.+): (.+)\]\((.+)\)", (tmp_path / "report.md").read_text())
    assert {name for name, _, _ in links} == set(names)
    files = [file for _, _, file in links]
    assert len(set(files)) == len(links) == len(list(tmp_path.glob("*.svg")))
    assert "data-2-speed-and-quality.svg" in files
