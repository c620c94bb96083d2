"""What the records of a benchmark come to, and its reports."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_support import Batched, Quiet, Words, plan_of, run

from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench.choice import barred, best
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.bench.tables import sheets
from dropmatch.evaluation.statistics import mcnemar, mean_interval, paired
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
    sheet, _ = sheets({"tasks": {"words": found}})
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


def cells_of(**more: Any) -> dict[str, dict[str, Any]]:
    """Strict, and js 1.2 times as fast, with something known about it."""
    one = {"value": 1.0, "low": 1.0, "high": 1.0, "pairs": 9}
    fast = {**one, "value": 1.2, "low": 1.1, "high": 1.3}
    return {
        "strict": {"rule": {"rule": "strict"}, "over_first": one, "flags": []},
        "js": {"rule": {"rule": "js"}, "over_first": fast, "over_strict": fast, "flags": [], **more},
    }


def scores(lost: int, gained: int, n: int = 100) -> dict[str, Any]:
    same = n - lost - gained
    return asdict(paired([1.0] * lost + [0.0] * gained + [1.0] * same, [0.0] * lost + [1.0] * (n - lost)))


def test_a_loss_by_the_test_or_by_the_interval_bars_a_cell() -> None:
    few, some, many = scores(4, 0), scores(11, 3, 82), scores(8, 0)
    assert few["difference"]["high"] < 0 < 0.05 < few["p_value"]
    assert some["difference"]["high"] < 0 < 0.05 < some["p_value"]  # -9.8 points
    assert many["p_value"] < 0.05
    for entry in (few, some, many):
        assert best(cells_of(against_strict=entry)) is None
        assert barred(cells_of(against_strict=entry)) == {"js": ["its score is below strict's"]}
    assert best(cells_of(against_strict=scores(4, 3))) == "js"
    assert barred(cells_of(against_strict=scores(0, 9))) == {}
    # nothing is known yet of some of its texts
    assert barred(cells_of(against_strict=scores(0, 9), unscored=3)) == {"js": ["not all its texts are scored yet"]}


@pytest.mark.parametrize(("high", "expected"), [(-0.01, None), (0.01, "js")])
def test_a_likelihood_below_stricts_bars_a_cell(high: float, expected: str | None) -> None:
    entry = {
        "difference": {"value": -0.05, "low": -0.1, "high": high},
        "lost": 30,
        "gained": 9,
        "p_value": 1e-3,
        "n": 39,
    }
    assert best(cells_of(log_likelihood_against_strict=entry)) == expected


def won(wins: int, losses: int) -> dict[str, Any]:
    values = [1.0] * wins + [0.0] * losses + [0.5] * 20
    return {
        "wins": wins, "losses": losses, "p_value": mcnemar(losses, wins), "win_rate": asdict(mean_interval(values)),
    }  # fmt: skip


def test_what_a_judge_finds_worse_is_barred() -> None:
    def judge(entry: dict[str, Any] | None, refused: str | None = None) -> dict[str, Any]:
        return {"model": "j", "refused": refused, "cells": {} if entry is None else {"js": entry}}

    assert barred(cells_of(), [judge(won(4, 20))]) == {"js": ["j judges it worse"]}
    assert barred(cells_of(), [judge(won(0, 5))]) == {"js": ["j judges it worse"]}  # p = 0.06
    assert barred(cells_of(), [judge(won(9, 12)), judge(won(20, 4)), judge(None)]) == {}
    grades = asdict(paired([7.0] * 30, [6.0] * 20 + [7.0] * 10))
    assert barred(cells_of(), [judge({"score": None, "against": grades})]) == {"js": ["j judges it worse"]}
    assert barred(cells_of(), [judge({"score": None, "against": None})]) == {}
    # of a judge whose answers are worthless nothing is known
    assert barred(cells_of(), [judge({"judged": 9}, refused="?")]) == {}
    nothing = {"wins": 0, "losses": 0, "win_rate": None, "p_value": None}
    assert barred(cells_of(), [judge(nothing)]) == {}


def test_the_report_says_how_much_is_known_of_the_fastest(prompts: list[str], tmp_path: Path) -> None:
    class Faster(Batched):
        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            group = super().generate(examples, options, max_tokens)
            seconds = {"strict": 0.5, "js": 0.25, "naive": 0.1}[options["rule"]]
            texts = ["no" if options["rule"] == "naive" else output.text for output in group.outputs]
            return Group([replace(o, text=text) for o, text in zip(group.outputs, texts, strict=True)], seconds)

    plan = plan_of("js:sampled", "naive", max_tokens=8, seeds=[0, 1])
    store, _ = run(plan, tmp_path, Faster(), Words(prompts, tokens=2))
    write_report(plan, store, {"words": "length"})
    text = (tmp_path / "report.md").read_text()
    seed = "js:verdict=sampled:mask_seed=1:token_floor=0"
    assert (
        f"{seed}: 2.00 [2.00, 2.00] times the speed of strict; +0.0 [+0.0, +0.0] points against strict, p = 1, n = 5."
        in text
    )
    assert "Never named the fastest: naive: its score is below strict's." in text


def test_a_report_says_where_no_speed_can_be_compared(prompts: list[str], tmp_path: Path) -> None:
    run(plan_of(max_tokens=8), tmp_path, Batched(), Words(prompts))
    plan = plan_of("js", max_tokens=8)
    store, _ = run(plan, tmp_path, Batched(), Words(prompts))
    write_report(plan, store, {"words": "length"})
    text = (tmp_path / "report.md").read_text()
    assert "No lossy cell has a speed that can be compared with strict's" in text
    assert "No lossy cell is both faster" not in text


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
    assert page.count("<table>") == 3
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
