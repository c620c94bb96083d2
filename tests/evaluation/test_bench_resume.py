"""Benchmarks that go on where they were: after a kill, with more to run, with what has changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_support import Batched, Words, plan_of, run, write_prompts

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench import worker
from dropmatch.evaluation.bench.lines import append_lines, read_lines
from dropmatch.evaluation.bench.lock import alone
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store, machines
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.tasks import Example


def test_a_second_run_does_only_what_is_missing(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    backend = HuggingFace(tiny.engine())
    run(plan_of("js", max_tokens=8, limit=2), tmp_path, backend, Words(prompts))
    store, progress = run(plan_of("js", "naive", max_tokens=8, limit=3), tmp_path, backend, Words(prompts))
    assert (progress.measured, progress.found) == (9 - 4, 4)
    assert len(store.groups) == 9
    _, again = run(plan_of("js", "naive", max_tokens=8, limit=3), tmp_path, backend, Words(prompts))
    assert (again.measured, again.found) == (0, 9)
    assert not any("scoring" in what for what in again.order)


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_line_that_was_not_written_out_is_done_again(tiny: Any, prompts: list[str], tmp_path: Path, cut: int) -> None:
    backend, plan = HuggingFace(tiny.engine()), plan_of("js", max_tokens=8, limit=2)
    before, _ = run(plan, tmp_path, backend, Words(prompts))
    records = tmp_path / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-cut])
    after, progress = run(plan, tmp_path, backend, Words(prompts))
    assert (progress.measured, progress.found) == (1, 3)
    assert {k: [o["text"] for o in g.outputs] for k, g in after.groups.items()} == {
        k: [o["text"] for o in g.outputs] for k, g in before.groups.items()
    }


def test_half_a_group_counts_as_none(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js", max_tokens=20, limit=4)
    run(plan, tmp_path, Batched(), Words(prompts))
    records = tmp_path / "records.jsonl"
    lines = records.read_text().split("\n")[:-1]
    assert len(lines) == 8
    records.write_text("\n".join(lines[:-1]) + "\n")
    store, progress = run(plan, tmp_path, Batched(), Words(prompts))
    assert (progress.measured, progress.found) == (1, 3)
    assert len(records.read_text().split("\n")) == 7 + 2 + 1
    assert len(Store(tmp_path, plan).groups) == len(store.groups) == 4


def test_settings_that_changed_are_refused(prompts: list[str], tmp_path: Path) -> None:
    run(plan_of("js", max_tokens=8), tmp_path, Batched(), Words(prompts))
    with pytest.raises(SettingError, match=r"with max_tokens=8, and now it is 9: give another --out"):
        Store(tmp_path, plan_of("js", max_tokens=9))
    with pytest.raises(SettingError, match=r"with draft='tinier', and now it is None"):
        Store(tmp_path, plan_of("js", max_tokens=8, draft=None))
    with pytest.raises(SettingError, match=r"holds words with data=None, and now it is 'x.jsonl'"):
        Store(tmp_path, plan_of("js", max_tokens=8, tasks=[{"name": "words", "data": "x.jsonl"}]))


class Reads(Batched):
    """Is interrupted in its second reading of texts."""

    def __init__(self, interrupted: bool) -> None:
        super().__init__()
        self.interrupted, self.read = interrupted, []

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        group = super().generate(examples, options, max_tokens)
        own = [replace(output, text=f"{options['rule']} {output.text}") for output in group.outputs]
        return Group(own, group.seconds)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        if self.interrupted and self.read:
            raise KeyboardInterrupt
        self.read.append(len(texts))
        return super().log_likelihoods(examples, texts)


def test_likelihoods_are_kept_as_they_come(prompts: list[str], tmp_path: Path) -> None:
    class Open(Words):
        metric = None

    plan, task = plan_of("js", max_tokens=8), Open(prompts)
    first, second = Reads(interrupted=True), Reads(interrupted=False)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path, first, task)
    assert first.read == [4]
    store, progress = run(plan, tmp_path, second, task)
    assert second.read == [1, 4, 1]
    assert [what for what in progress.order if "scoring" in what] == [
        "words, scoring strict, 1/1",
        "words, scoring js, 4/5",
        "words, scoring js, 5/5",
    ]
    assert all(store.scores["words", cell, str(i)] for cell in ("strict", "js") for i in range(5))


def test_a_default_that_changed_is_refused(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js:p=0.2", max_tokens=8, limit=2)
    run(plan, tmp_path, Batched(), Words(prompts))
    path = tmp_path / "plan.json"
    kept = json.loads(path.read_text())
    assert kept["cells"]["js:p=0.2"]["token_floor"] == 0.1
    kept["cells"]["js:p=0.2"]["token_floor"] = 0.0  # as an older version would have written it
    path.write_text(json.dumps(kept))
    message = (
        r"holds js:p=0.2 as it was with token_floor=0.0, whose default has become 0.1: give another --out, or write "
        r"js:p=0.2:token_floor=0.0 for the old one"
    )
    with pytest.raises(SettingError, match=message):
        run(plan, tmp_path, Batched(), Words(prompts))
    # other cells go on, and what is there can be reported
    run(plan_of("js:p=0.2:token_floor=0.0", max_tokens=8, limit=2), tmp_path, Batched(), Words(prompts))
    assert "js:p=0.2" in Plan.load(tmp_path).rules


class Longer(Words):
    """The same examples by name, and one of them with another prompt."""

    def examples(self, limit: int | None) -> list[Example]:
        first, *rest = super().examples(limit)
        return [replace(first, prompt=f"{first.prompt} w9"), *rest]


def test_examples_that_changed_are_refused(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    plan, more = plan_of("js", max_tokens=8, limit=3), plan_of("js", "naive", max_tokens=8)
    run(plan, tmp_path, Batched(), Words(prompts))
    with pytest.raises(SettingError, match=r"holds texts of words, example 0, for another prompt.*Give another --out"):
        run(more, tmp_path, Batched(), Longer(prompts))
    _, progress = run(more, tmp_path, Batched(), Words(prompts))
    assert (progress.measured, progress.found) == (7, 2)  # the group of one has become one of two


def test_the_folder_knows_all_that_was_run(prompts: list[str], tmp_path: Path) -> None:
    run(plan_of("js", max_tokens=8), tmp_path, Batched(), Words(prompts))
    run(plan_of("naive", max_tokens=8, limit=2), tmp_path, Batched(), Words(prompts))
    plan = Plan.load(tmp_path)
    assert (plan.rules, plan.limit) == (("strict", "js", "naive"), None)
    cells = summarise(plan, Store(tmp_path, plan), {"words": "length"})["tasks"]["words"]["cells"]
    assert {name: cell["examples"] for name, cell in cells.items()} == {"strict": 5, "js": 5, "naive": 2}


def test_a_lower_limit_takes_nothing_away(prompts: list[str], tmp_path: Path) -> None:
    tasks = [{"name": "words", "limit": 4}]
    run(plan_of("js", max_tokens=8, tasks=tasks), tmp_path, Batched(), Words(prompts))
    fewer = plan_of("js", max_tokens=8, tasks=[{"name": "words", "limit": 3}])
    _, progress = run(fewer, tmp_path, Batched(), Words(prompts))
    assert (progress.measured, progress.found) == (0, 4)
    plan = Plan.load(tmp_path)
    assert plan.tasks[0].limit == 4
    cells = summarise(plan, Store(tmp_path, plan), {"words": "length"})["tasks"]["words"]["cells"]
    assert {cell["examples"] for cell in cells.values()} == {4}


def test_two_processes_do_not_write_to_one_folder(prompts: list[str], tmp_path: Path) -> None:
    with alone(tmp_path):
        with pytest.raises(SettingError, match="another process of dropmatch is writing there: wait"):
            worker.run(plan_of("js", max_tokens=8), tmp_path, [Words(prompts)])
        with alone(tmp_path, worker.WORKER):
            pass
    with alone(tmp_path):
        pass


def test_reading_changes_no_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"a": 1}, {"a": "\u2028ü"}])
    with path.open("ab") as file:
        file.write(b'{"a": 3')
    size = path.stat().st_size
    assert read_lines(path) == [{"a": 1}, {"a": "\u2028ü"}]
    assert path.stat().st_size == size
    append_lines(path, [{"a": 4}])
    assert read_lines(path) == [{"a": 1}, {"a": "\u2028ü"}, {"a": 4}]
    path.write_bytes(b'{"a"')
    append_lines(path, [{"a": 5}])
    assert read_lines(path) == [{"a": 5}]


def test_a_text_that_is_decoded_anew_is_scored_anew(prompts: list[str], tmp_path: Path) -> None:
    class Turned(Batched):
        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            group = super().generate(examples, options, max_tokens)
            return Group([replace(output, text="short") for output in group.outputs], group.seconds)

    first, _ = run(plan_of("js", max_tokens=8, limit=3), tmp_path, Batched(), Words(prompts, tokens=2))
    assert first.scores["words", "js", "2"] == {"score": 1.0}
    # the group of one has become one of two, and its text is another
    second, _ = run(plan_of("js", max_tokens=8), tmp_path, Turned(), Words(prompts, tokens=2))
    assert (
        second.scores["words", "js", "2"]
        == {"score": 0.0}
        == Store(tmp_path, plan_of("js", max_tokens=8)).scores["words", "js", "2"]
    )
    assert second.scores["words", "js", "0"] == {"score": 1.0}


def test_a_damaged_file_is_named_with_its_line(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js", max_tokens=8)
    run(plan, tmp_path, Batched(), Words(prompts))
    records = tmp_path / "records.jsonl"
    records.write_text("{broken\n" + records.read_text())
    with pytest.raises(SettingError, match=r"records.jsonl, line 1 is damaged"):
        Store(tmp_path, plan)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from cli.cli_support import build_pair

    return build_pair(tmp_path_factory.mktemp("models"))


def command(folders: Any, tmp_path: Path, *more: str) -> list[str]:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 30)
    return [
        sys.executable, "-m", "dropmatch.cli", "bench", "--task", str(prompts), "--rules", "js:p=0.1,naive",
        "--max-tokens", "60", "--raw", "--out", str(tmp_path / "out"), *folders.args(), *more,
    ]  # fmt: skip


def test_a_killed_benchmark_goes_on_where_it_was(folders: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command(folders, tmp_path), env=environment, stderr=subprocess.PIPE)
    records = tmp_path / "out" / "records.jsonl"
    deadline = time.monotonic() + 60
    while not (records.exists() and records.read_text().count("\n") >= 10):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.stderr.read()  # type: ignore[union-attr]
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = records.read_text().count("\n")
    assert done < 90
    second = subprocess.run(command(folders, tmp_path), env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 90 == len({(line["cell"], line["id"]) for line in lines})
    assert "90 of 90 groups of cells" in second.stderr
    for name in ("report.html", "report.json", "report.md"):
        assert (tmp_path / "out" / name).stat().st_size > 500
    third = subprocess.run(
        command(folders, tmp_path, "--max-tokens", "7"), env=environment, capture_output=True, text=True
    )
    assert third.returncode == 2
    assert "with max_tokens=60, and now it is 7" in third.stderr


def test_a_report_has_the_cells_of_earlier_runs(folders: Any, tmp_path: Path) -> None:
    for rule in ("js:p=0.1", "naive"):
        words = command(folders, tmp_path, "--limit", "2")
        words[words.index("--rules") + 1] = rule
        done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (task,) = report["tasks"].values()
    assert list(task["cells"]) == ["strict", "js:p=0.1", "naive"]


def test_the_same_text_is_scored_once(prompts: list[str], tmp_path: Path) -> None:
    class Counting(Words):
        asked = 0

        def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
            self.asked += len(texts)
            return super().score(examples, texts)

    task = Counting(prompts, tokens=2)
    store, _ = run(plan_of("js", "naive", max_tokens=8), tmp_path, Batched(), task)
    said = {(i, text) for cell in ("strict", "js", "naive") for i, text in store.texts("words", cell).items()}
    assert task.asked == len(said) < 15
    assert all(
        store.scores["words", cell, str(i)] == {"score": 1.0} for cell in ("strict", "js", "naive") for i in range(5)
    )


def test_records_of_a_cell_in_another_spelling_are_found(prompts: list[str], tmp_path: Path) -> None:
    """As folders have them that were made when a grid made several cells of one."""
    before = replace(plan_of("js", max_tokens=8), rules=("strict", "js", "js:verdict=denoised", "typical:p=0.1"))
    run(before, tmp_path, Batched(), Words(prompts))
    plan = plan_of("typical", "js:verdict=denoised", "js", max_tokens=8)
    assert plan.rules == ("strict", "typical", "js:verdict=denoised")
    _, progress = run(plan, tmp_path, Batched(), Words(prompts))
    assert (progress.measured, progress.found) == (0, 9)
    whole = Plan.load(tmp_path)
    store = Store(tmp_path, whole)
    cells = summarise(whole, store, {"words": "length"})["tasks"]["words"]["cells"]
    assert {name: cell["examples"] for name, cell in cells.items()} == {"strict": 5, "js": 5, "typical:p=0.1": 5}
    assert all(store.scores["words", cell, str(i)] for cell in cells for i in range(5))


def test_texts_of_another_default_are_no_other_cells(prompts: list[str], tmp_path: Path) -> None:
    run(plan_of("js", max_tokens=8, limit=2), tmp_path, Batched(), Words(prompts))
    path = tmp_path / "plan.json"
    kept = json.loads(path.read_text())
    kept["cells"]["js"]["token_floor"] = 0.0
    path.write_text(json.dumps(kept))
    _, progress = run(plan_of("js:verdict=denoised", max_tokens=8, limit=2), tmp_path, Batched(), Words(prompts))
    assert (progress.measured, progress.found) == (1, 1)


def test_each_run_keeps_its_machine(prompts: list[str], tmp_path: Path) -> None:
    class Elsewhere(Batched):
        def __init__(self, cpu: str) -> None:
            super().__init__()
            self.about = lambda: {"engine": "fake", "cpu": cpu}

    def once(cpu: str, *rules: str) -> None:
        plan, backend = plan_of(*rules, max_tokens=8), Elsewhere(cpu)
        store = Store(tmp_path, plan)
        store.keep_plan()
        worker._run(Runner(plan, plan.rules, [Words(prompts)], backend, store), backend, store)

    once("Epyc", "js")
    once("Xeon", "js", "naive")
    once("idle", "js")  # finds all that it asks for
    plan = Plan.load(tmp_path)
    store = Store(tmp_path, plan)
    assert [about["cpu"] for about in store.machines().values()] == ["Epyc", "Xeon"]
    assert set(store.machines()) == {group.run for group in store.groups.values()}
    write_report(plan, store, {"words": "length"})
    assert "engine fake, cpu Epyc; then engine fake, cpu Xeon." in (tmp_path / "report.md").read_text()
    assert len(json.loads((tmp_path / "report.json").read_text())["machines"]) == 2
    # a folder of before has the last run's only
    (tmp_path / "machine.json").write_text(json.dumps({"engine": "fake", "cpu": "Arm"}))
    assert machines(tmp_path) == {"before": {"engine": "fake", "cpu": "Arm"}}
    once("Power", "typical")
    assert [about["cpu"] for about in Store(tmp_path, plan).machines().values()] == ["Arm", "Power"]
