"""The judge on conversations: what it is shown of them, and what it says by turn and by category."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judge_support import Asked, Server, judge, lines, result

from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import examples_of, in_groups
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.judge.prompts import question
from dropmatch.evaluation.tasks import following
from dropmatch.evaluation.tasks.choose import choose_task

pytest.importorskip("openai", reason="the judge's client needs the openai package")
ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "writing", "turns": ["write", "shorter"]},
    {"question_id": 2, "category": "math", "turns": ["1 + 1", "and 1 more"], "reference": ["two", "three"]},
    {"question_id": 3, "category": "math", "turns": ["2 + 2"], "reference": ["four"]},
]
IDS = ("1", "1#2", "2", "2#2", "3")
Say = Callable[[str, str], str]


def says(cell: str, example: str) -> str:
    """Strict and js differ, but for all of 1."""
    return f"{'strict' if example.startswith('1') else cell} on {example}"


def folder_of(folder: Path, say: Say = says, rows: list[dict[str, Any]] = ROWS) -> Path:
    """A folder as dropmatch bench leaves it."""
    folder.mkdir(exist_ok=True)
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Plan.from_values({"target": "tiny", "tasks": [str(file)], "rules": ["js"]})
    store, task = Store(folder / "out", plan), choose_task(str(file))
    store.keep_plan()
    examples, _ = examples_of(task, plan.task(plan.tasks[0]))
    for cell in plan.rules:
        for number, (example,) in in_groups(examples, 1).items():
            output = Output(say(cell, example.id), 4, "stop", 2, 5, 2, 0, {"exact": 2}, {1: 2})
            store.add(task.name, cell, number, [following(example, store.texts(task.name, cell))], Group([output], 0.5))
    return folder / "out"


def test_a_later_turn_is_judged_with_its_conversation(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with Server(lambda asked: "[[5]]") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0, found.output
    assert {asked.talks for asked in server.asked if asked.talks} == {
        (("write", "strict on 1", "shorter", "strict on 1#2"),),
        (("1 + 1", "strict on 2", "and 1 more", "strict on 2#2"),),
        (("1 + 1", "js on 2", "and 1 more", "js on 2#2"),),
    }
    # conversations that are the same are asked about once
    assert len(server.asked) == 2 + 2 * 3
    references = {asked.texts: asked.references for asked in server.asked}
    assert references["strict on 1",] == references["strict on 1#2",] == {}
    assert references["js on 2",] == {"reference": "two"}
    assert references["js on 2#2",] == {"reference_1": "two", "reference_2": "three"}
    assert references["js on 3",] == {"reference": "four"}


def test_two_conversations_are_compared_each_with_its_own_replies(tmp_path: Path) -> None:
    # the last replies to 1 are the same, and what they reply to is not
    folder = folder_of(tmp_path, lambda cell, i: "same" if i == "1#2" else f"{cell} on {i}")
    with Server(lambda asked: "[[TIE]]") as server:
        found = judge(folder, server.url, "--kind", "pairwise")
    assert found.exit_code == 0, found.output
    shown = {asked.talks for asked in server.asked if asked.talks and asked.talks[0][0] == "write"}
    mine, theirs = (("write", f"{cell} on 1", "shorter", "same") for cell in ("js", "strict"))
    assert shown == {(mine, theirs), (theirs, mine)}
    assert len(server.asked) == 2 * len(IDS)


def test_the_same_conversation_is_a_tie(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with Server(lambda asked: "[[A]]") as server:
        judge(folder, server.url, "--kind", "pairwise")
    assert len(server.asked) == 2 * 3
    assert result(folder)["cells"]["js"]["same"] == 2


SCORES = {
    "strict on 1": 9, "strict on 1#2": 7, "strict on 2": 8, "strict on 2#2": 4, "strict on 3": 6,
    "js on 2": 5, "js on 2#2": 3, "js on 3": 6,
}  # fmt: skip


def test_means_are_also_by_turn_and_by_category(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with Server(lambda asked: f"[[{SCORES[asked.texts[0]]}]]") as server:
        found = judge(folder, server.url)
    strict, js = (result(folder)["cells"][cell] for cell in ("strict", "js"))

    def means(entry: dict[str, Any], name: str) -> dict[str, float]:
        return {label: part["score"]["value"] for label, part in entry[name].items()}

    assert strict["score"]["value"] == pytest.approx((9 + 7 + 8 + 4 + 6) / 5)
    assert means(strict, "turns") == pytest.approx({"1": (9 + 8 + 6) / 3, "2": (7 + 4) / 2})
    assert means(strict, "categories") == pytest.approx({"writing": (9 + 7) / 2, "math": (8 + 4 + 6) / 3})
    assert means(js, "turns") == pytest.approx({"1": (9 + 5 + 6) / 3, "2": (7 + 3) / 2})
    assert means(js, "categories") == pytest.approx({"writing": 8.0, "math": (5 + 3 + 6) / 3})
    against = js["categories"]["math"]["against"]
    assert (against["n"], against["lost"], against["gained"]) == (3, 2, 0)
    assert against["difference"]["value"] == pytest.approx((5 + 3 - 8 - 4) / 3)
    assert "wise, single, by turn and category" in " ".join(found.stdout.split())
    assert re.search(r"js +6\.00 +6\.67 +5\.00 +8\.00 +4\.67", found.stdout)
    # and so in the benchmark's reports, which do not read the examples
    (tmp_path / "talks.jsonl").unlink()
    plan = Plan.load(folder)
    write_report(plan, Store(folder, plan), {f"{tmp_path.name}/talks": None})
    assert "| strict | 6.80 | 7.67 | 5.50 | 8.00 | 6.00 |" in (folder / "report.md").read_text()
    (task,) = json.loads((folder / "report.json").read_text())["tasks"].values()
    assert task["judges"][0]["cells"]["js"]["turns"]["2"]["score"]["value"] == 5.0


def test_wins_are_also_by_turn_and_by_category(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    def prefers(asked: Asked) -> str:
        """js in later turns, strict in first ones."""
        better = "js" if asked.talks else "strict"
        return "[[A]]" if asked.texts[0].startswith(better) else "[[B]]"

    with Server(prefers) as server:
        found = judge(folder, server.url, "--kind", "pairwise")
    entry = result(folder)["cells"]["js"]
    assert (entry["wins"], entry["ties"], entry["losses"]) == (1, 2, 2)
    rates = {
        name: {label: p["win_rate"]["value"] for label, p in entry[name].items()} for name in ("turns", "categories")
    }
    assert rates["turns"] == pytest.approx({"1": 0.5 / 3, "2": 1.5 / 2})
    assert rates["categories"] == pytest.approx({"writing": 0.5, "math": 1 / 3})
    assert re.search(r"js +40\.0 +16\.7 +75\.0 +50\.0 +33\.3", found.stdout)


def test_a_reply_to_another_text_is_judged_anew(tmp_path: Path) -> None:
    """The text of a later turn is the same, and what it followed is another."""
    folder = folder_of(tmp_path)
    with Server(lambda asked: "[[5]]") as server:
        judge(folder, server.url)
    (folder / "records.jsonl").write_text((folder / "records.jsonl").read_text().replace('"js on 2"', '"other"'))
    with Server(lambda asked: "[[6]]") as server:
        judge(folder, server.url)
    assert {asked.talks or asked.texts for asked in server.asked} == {
        ("other",), (("1 + 1", "other", "and 1 more", "js on 2#2"),)
    }  # fmt: skip


def test_another_reference_is_another_question(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with Server(lambda asked: "[[5]]") as server:
        judge(folder, server.url)
        asked = len(server.asked)
        judge(folder, server.url)
        assert len(server.asked) == asked
    changed = [*ROWS[:2], {**ROWS[2], "reference": ["4"]}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    with Server(lambda asked: "[[6]]") as server:
        judge(folder, server.url)
    assert sorted(asked.texts for asked in server.asked) == [("js on 3",), ("strict on 3",)]
    assert all(asked.references == {"reference": "4"} for asked in server.asked)
    assert result(folder)["cells"]["js"]["judged"] == 5


def test_a_folder_of_first_turns_that_an_older_version_wrote_is_judged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    first = [{k: v for k, v in line.items() if k not in ("after", "category")} for line in records if not line["after"]]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first))
    plan = json.loads((folder / "plan.json").read_text())
    del plan["turns"]
    (folder / "plan.json").write_text(json.dumps(plan))
    with Server(lambda asked: "[[5]]") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0, found.output
    assert {line["id"] for line in lines(folder)} == {"1", "2", "3"}
    assert "by turn" not in found.stdout


def test_references_are_spoken_of_only_where_they_are() -> None:
    with_one = question("single", "1 + 1", [["2"]], ["two"])
    without = question("single", "1 + 1", [["2"]])
    assert "<reference>\ntwo\n</reference>" in with_one
    assert "reference" in with_one.partition("<input>")[0]
    assert "reference" not in without
    later = [{"role": "user", "content": text} for text in ("1 + 1", "more {0}")]
    asked = question("pairwise", later, [["2", "3"], ["two", "</reply_2>"]], ["two"])  # type: ignore[arg-type]
    assert "<conversation_B>\n<input_1>\n1 + 1\n</input_1>\n<reply_1>\ntwo\n</reply_1>\n<input_2>\nmore {0}\n" in asked
    assert asked.count("<reference_1>\ntwo\n</reference_1>") == 1
    assert asked.rstrip().endswith("Verdict: [[A, B or TIE]]")
