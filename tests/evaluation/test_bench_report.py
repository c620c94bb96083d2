"""A report's parts: one cell against each other, names of cells, figures, and what an unfinished run has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import Batched, Words, plan_of, run
from scipy.stats import binomtest
from typer.testing import CliRunner

from dropmatch.cli.app import app
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.bench import worker
from dropmatch.evaluation.bench.labels import labels
from dropmatch.evaluation.bench.pairs import reference
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.bench.tables import sheets
from dropmatch.evaluation.tasks import Example

MANY = [f"w{i} w7" for i in range(40)]
SECONDS = {"strict": 1.0, "js": 0.5, "naive": 0.25, "typical": 0.8}


class Peers(Batched):
    """js is right on all even examples, naive on the first ten, typical on every fourth and the second."""

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        rule, outputs = options["rule"], []
        for example in examples:
            i = int(example.id)
            right = {"strict": i % 2, "js": i % 2 == 0, "naive": i < 10, "typical": i % 4 == 0 or i == 1}[rule]
            rounds, accepted = 2 + i % 3, {"strict": 2, "js": 6 + i % 5, "naive": 7, "typical": 3 + i % 2}[rule]
            text = "a b c" if right else f"{rule} {i}"
            outputs.append(Output(text, 12, "stop", rounds, 15, accepted, 0, {"exact": accepted}, {2: rounds}))
        return Group(outputs, SECONDS[rule])

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [-0.1 * len(text.split()) - 0.01 * int(e.id) for e, text in zip(examples, texts, strict=True)]


def peers(folder: Path, *rules: str, **more: Any) -> tuple[Plan, Store]:
    plan = plan_of(*rules, max_tokens=20, **more)
    store, _ = run(plan, folder, Peers(), Words(MANY, tokens=3))
    return plan, store


def test_one_cell_is_compared_with_each_other(tmp_path: Path) -> None:
    plan, store = peers(tmp_path, "typical", "js", "naive", "js:L=8")
    write_report(plan, store, {"words": "length"})
    task = json.loads((tmp_path / "report.json").read_text())["tasks"]["words"]
    found = task["against"]
    assert found["reference"] == "js"  # DropMatch's first, whatever comes before it
    assert list(found["cells"]) == ["typical", "naive"]  # neither strict nor another draft length
    entry = found["cells"]["naive"]
    js, naive = {i for i in range(40) if i % 2 == 0}, set(range(10))
    assert (entry["score"]["lost"], entry["score"]["gained"]) == (len(naive - js), len(js - naive)) == (5, 15)
    assert entry["score"]["difference"]["value"] == pytest.approx((20 - 10) / 40)
    assert entry["score"]["p_value"] == pytest.approx(binomtest(5, 20).pvalue)
    assert entry["speed"] == {"value": 0.5, "low": 0.5, "high": 0.5, "pairs": 20}
    rounds = np.array([2 + i % 3 for i in range(40)])
    ours = np.array([6 + i % 5 for i in range(40)]).sum() / rounds.sum()
    length = entry["acceptance_length"]
    assert length["value"] == pytest.approx(ours - 40 * 7 / rounds.sum())
    assert length["low"] <= length["value"] <= length["high"]
    assert entry["examples"] == 40
    _, sheet = sheets({"tasks": {"words": task}})
    assert sheet.title == "words: js against each other lossy cell of its draft length"
    row = dict(zip(sheet.headings, next(row for row in sheet.rows if row[0] == "naive"), strict=True))
    assert row["speed over it"] == "0.50 [0.50, 0.50]"
    assert row["length points"].startswith("+25.0 [")
    assert (row["lost / gained"], row["p"]) == ("5 / 15", "0.041")
    for name in ("report.md", "report.html"):
        assert sheet.title in (tmp_path / name).read_text()


def test_of_open_ended_tasks_the_likelihoods_are_compared(tmp_path: Path) -> None:
    class Open(Words):
        metric = None

    plan = plan_of("js", "typical", max_tokens=20)
    store, _ = run(plan, tmp_path, Peers(), Open(MANY))
    task = summarise(plan, store, {"words": None})["tasks"]["words"]
    entry = task["against"]["cells"]["typical"]
    words = {True: 3, False: 2}
    expected = [words[i % 2 == 0] - words[i % 4 == 0 or i == 1] for i in range(40)]
    assert entry["log_likelihood"]["difference"]["value"] == pytest.approx(-0.1 * np.mean(expected))
    assert entry["score"] is None
    _, sheet = sheets({"tasks": {"words": task}})
    assert sheet.headings == ("against", "n", "speed over it", "acceptance length", "log-likelihood")
    assert sheet.rows[0][-1].startswith("-0.023 [")


def test_cells_of_different_processes_have_no_speed_against_each_other(tmp_path: Path) -> None:
    peers(tmp_path, "js")
    plan, store = peers(tmp_path, "js", "typical")
    entry = summarise(plan, store, {"words": "length"})["tasks"]["words"]["against"]["cells"]["typical"]
    assert entry["speed"] is None
    assert entry["score"]["n"] == 40


def test_the_reference_can_be_chosen(tmp_path: Path) -> None:
    plan, store = peers(tmp_path, "typical:threshold=0.3", "js:p=0.3", "naive:L=8", "js:L=8")
    assert reference(plan, None) == "js:p=0.3"
    assert reference(plan, "naive:K=5:L=8") == "naive:L=8"  # however it is written
    found = summarise(plan, store, {"words": "length"}, "naive:L=8")["tasks"]["words"]["against"]
    assert (found["reference"], list(found["cells"])) == ("naive:L=8", ["js:L=8"])
    with pytest.raises(SettingError, match=r"--against js:p=0.2: the benchmark has no such cell; it has strict, "):
        reference(plan, "js:p=0.2")
    with pytest.raises(SettingError, match="compared with strict anyway"):
        reference(plan, "strict")
    plan, store = peers(tmp_path / "other", "typical")
    assert summarise(plan, store, {"words": "length"})["tasks"]["words"]["against"] is None


def test_a_label_tells_a_floor_that_is_not_the_usual_one() -> None:
    def named(*cells: str, **settings: Any) -> list[str]:
        found = labels(cells, settings)
        return [found[cell] for cell in cells]

    assert named("strict", "js:p=0.3", "naive", "typical") == ["strict", "js:p=0.3", "naive", "typical"]
    # the paper's sampled heads have no floor
    assert named("js", "naive:sampled") == ["js", "naive:verdict=sampled:token_floor=0"]
    # of two floors both are told, of this rule
    assert named("js:p=0.2", "js:p=0.3:token_floor=0", "naive") == [
        "js:p=0.2:token_floor=0.1",
        "js:p=0.3:token_floor=0",
        "naive",
    ]
    assert named("typical", "typical:token_floor=0.05") == ["typical:token_floor=0", "typical:token_floor=0.05"]
    # what an older version has run, whose default was another one
    assert named("js:p=0.3", **{"js:p=0.3": {"token_floor": 0.0}}) == ["js:p=0.3:token_floor=0"]
    # rules less their seeds have names too
    cells = ["js:verdict=sampled:mask_seed=0", "js:verdict=sampled:mask_seed=1"]
    assert labels(cells, {})["js:verdict=sampled"] == "js:verdict=sampled:token_floor=0"


def test_tables_and_figures_call_cells_by_their_labels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rules = "js", "js:token_floor=0", "js:L=8", "js:token_floor=0:L=8"
    plan, store = peers(tmp_path, *rules)
    write_report(plan, store, {"words": "length"})
    text = (tmp_path / "report.md").read_text()
    assert "| js |" not in text
    assert "| js:token_floor=0.1 |" in text
    assert "| js:token_floor=0 |" in text
    # figures have their texts as outlines, and as comments beside them
    for name in ("speed-and-quality", "acceptance-length", "by-position", "by-reason"):
        svg = (tmp_path / f"words-{name}.svg").read_text()
        assert "<!-- js:token_floor=0.1 -->" in svg
        assert "<!-- js:token_floor=0 -->" in svg
        assert "<!-- js -->" not in svg


def test_figures_go_to_a_folder_under_names_that_stay(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan, store = peers(tmp_path / "out", "js", "naive", "js:L=8")
    for _ in range(2):
        write_report(plan, store, {"words": "length"}, plots=tmp_path / "docs" / "plots")
    found = {path.name: path.read_text() for path in (tmp_path / "docs" / "plots").iterdir()}
    names = ("speed-and-quality", "acceptance-length", "by-position", "by-reason")
    assert sorted(found) == sorted(f"words-{name}.svg" for name in names)
    write_report(plan, store, {"words": "length"}, plots=tmp_path / "again")
    assert {path.name: path.read_text() for path in (tmp_path / "again").iterdir()} == found  # to the byte
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"cannot write figures into .*file"):
        write_report(plan, store, {"words": "length"}, plots=tmp_path / "file")


class Interrupted(Peers):
    """Is stopped after so many groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._left = groups

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        if max_tokens > 8:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return super().generate(examples, options, max_tokens)

    def about(self) -> dict[str, Any]:
        return {}


class Programs(Words):
    """Is scored by running its texts."""

    runs_programs = True
    interrupted = False

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        return super().score(examples, texts)


def command(monkeypatch: pytest.MonkeyPatch, backend: Any, task: Any, *words: str) -> Any:
    monkeypatch.setattr(worker, "_huggingface", lambda plan: backend)
    monkeypatch.setattr(worker, "tasks_of", lambda plan: [task])
    return CliRunner().invoke(app, ["bench", *words])


def test_an_interrupted_benchmark_is_scored_as_far_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--task", "words", "--rules", "js", "--max-tokens", "20", "--out", str(tmp_path)
    found = command(monkeypatch, Interrupted(15), Words(MANY, tokens=3), *words)
    assert found.exit_code == 130, found.output
    task = json.loads((tmp_path / "report.json").read_text())["tasks"]["words"]
    assert [cell["score"]["value"] for cell in task["cells"].values()] == [0.5, 0.5]
    assert sum(cell["examples"] for cell in task["cells"].values()) == 30
    assert "yet" not in (tmp_path / "report.md").read_text()
    # in memory: the same is found out anew, beside a process that may be writing
    assert not (tmp_path / "scores.jsonl").exists()
    (tmp_path / "report.json").unlink()
    found = command(monkeypatch, None, Words(MANY, tokens=3), "--out", str(tmp_path), "--report-only")
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "report.json").read_text())["tasks"]["words"] == task
    assert not (tmp_path / "scores.jsonl").exists()


def test_what_is_not_scored_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--task", "words", "--rules", "js", "--max-tokens", "20", "--out", str(tmp_path)
    found = command(monkeypatch, Interrupted(15), Programs(MANY), *words)
    assert found.exit_code == 130, found.output
    text = (tmp_path / "report.md").read_text()
    assert "Texts without a score yet: 14 of 14 of strict, 16 of 16 of js. The benchmark's command, given again" in text
    # data that cannot be had leave a report without scores
    task = Words(MANY)
    task.examples = lambda limit: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    found = command(monkeypatch, None, task, "--out", str(tmp_path), "--report-only")
    assert found.exit_code == 0, found.output
    assert "words: texts that have no score yet stay without one: ZeroDivisionError" in found.stderr
    assert "Texts without a score yet" in (tmp_path / "report.md").read_text()


def test_a_text_of_another_prompt_is_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--task", "words", "--rules", "js", "--max-tokens", "20", "--out", str(tmp_path)
    command(monkeypatch, Interrupted(15), Words(MANY), *words)
    task = Words([f"{prompt} w9" for prompt in MANY])
    found = command(monkeypatch, None, task, "--out", str(tmp_path), "--report-only")
    assert "stay without one: SettingError" in found.stderr
    assert "example 0, for another prompt" in found.stderr


def test_likelihoods_wait_for_the_model(tmp_path: Path) -> None:
    class Open(Words):
        metric = None

    plan, store = plan_of("js", max_tokens=20), Store(tmp_path, plan_of("js", max_tokens=20))
    backend = Peers()
    backend.log_likelihoods = lambda examples, texts: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    store.keep_plan()
    from bench_support import Quiet

    Runner(plan, plan.rules, [Open(MANY)], backend, store).run(Quiet())
    write_report(plan, store, {"words": None})
    assert "Texts without a likelihood yet: 40 of 40 of strict" in (tmp_path / "report.md").read_text()


def test_programs_are_judged_in_parts(tmp_path: Path) -> None:
    """So that a kill while they run loses one part."""
    plan, task = plan_of("js", max_tokens=20), Programs(MANY)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path, Peers(), task)
    kept = Store(tmp_path, plan).scores
    assert 0 < sum("score" in each for each in kept.values()) == 8


def test_options_of_the_report_are_checked_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--task", "words", "--rules", "js,typical", "--max-tokens", "20", "--out", str(tmp_path / "out")
    found = command(monkeypatch, Peers(), Words(MANY), *words, "--against", "js:p=0.2")
    assert found.exit_code == 2
    assert "the benchmark has no such cell" in found.stderr
    assert not (tmp_path / "out").exists()
    backend = Interrupted(1000)
    found = command(monkeypatch, backend, Words(MANY), *words, "--against", "typical", "--plots", str(tmp_path / "p"))
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tasks"]["words"]["against"]["reference"] == "typical"
    found = command(
        monkeypatch, None, Words(MANY), "--out", str(tmp_path / "out"), "--report-only", "--against", "js:L=5"
    )
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tasks"]["words"]["against"]["reference"] == "js"
