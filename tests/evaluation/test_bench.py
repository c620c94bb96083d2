"""A benchmark end to end on a tiny pair: what is kept, what goes on after a kill, what a crash leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench.plan import Plan, options
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner, flat
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.tasks import Example, Prompts


class Quiet:
    """Counts what is done."""

    def __init__(self) -> None:
        self.measured = self.found = 0
        self.order: list[str] = []

    def begin(self, what: str) -> None:
        self.order.append(what)

    def done(self, tokens: int, measured: bool) -> None:
        self.measured += measured
        self.found += not measured


class Words:
    """A task whose texts are right if they are at least so long."""

    name, metric = "words", "length"

    def __init__(self, prompts: Sequence[str], tokens: int = 6) -> None:
        self._prompts, self._tokens = prompts, tokens

    def examples(self, limit: int | None) -> list[Example]:
        return [Example(str(i), text) for i, text in enumerate(self._prompts)][:limit]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [float(len(text.split()) >= self._tokens) for text in texts]


@pytest.fixture
def prompts(tiny: Any) -> list[str]:
    return [" ".join(f"w{i}" for i in tiny.prompt(seed).tolist()) for seed in range(5)]


def plan_of(*rules: str, **more: Any) -> Plan:
    return Plan.from_values({"target": "tiny", "draft": "tinier", "tasks": ["words"], "rules": list(rules), **more})


def run(plan: Plan, folder: Path, backend: Any, task: Any) -> tuple[Store, Quiet]:
    store, progress = Store(folder, plan), Quiet()
    Runner(plan, plan.rules, [task], backend, store).run(progress)
    return store, progress


def test_a_run_keeps_what_each_cell_says_to_each_example(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    engine = tiny.engine()
    plan = plan_of("js:p=0.4", "naive:L=3", max_tokens=20)
    _, progress = run(plan, tmp_path, HuggingFace(engine), Words(prompts))
    assert plan.rules == ("strict", "strict:L=3", "js:p=0.4", "naive:L=3")
    assert (progress.measured, progress.found) == (20, 0)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    for line in lines:
        acceptance, draft = options(line["cell"])
        live = engine.generate(
            prompts[int(line["id"])], max_tokens=20, rule=acceptance.rule, dropout=acceptance.dropout,
            draft_length=draft.draft_length,
        )  # fmt: skip
        assert line["text"] == live.text
        assert line["tokens"] == len(live.token_ids)
        counts = live.statistics
        assert (line["rounds"], line["accepted"], line["lossy"]) == (counts.rounds, counts.accepted, counts.lossy)
        assert line["reasons"] == dict(counts.reasons)
        assert sum(int(k) * n for k, n in line["lengths"].items()) == counts.accepted
    # in turns: each group begins with the next cell
    measured = [what.partition(", ")[2] for what in progress.order if re.match(r"words \d", what)]
    assert measured[:4] == list(plan.rules)
    assert measured[4:8] == [*plan.rules[1:], plan.rules[0]]


def test_the_summary_is_what_the_records_say(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js:p=0.4", max_tokens=20)
    store, _ = run(plan, tmp_path, HuggingFace(tiny.engine()), Words(prompts, tokens=20))
    task = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    for cell in plan.rules:
        outputs = [store.groups["words", cell, n].outputs[0] for n in range(5)]
        entry = task["cells"][cell]
        rounds, accepted = sum(o["rounds"] for o in outputs), sum(o["accepted"] for o in outputs)
        assert entry["acceptance_length"] == pytest.approx(1 + accepted / rounds)
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


class Batched:
    """A backend of groups of two; it fails where it is told to."""

    name, group = "fake", 2

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails

    def check(self, options: Mapping[str, Any]) -> None: ...

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None: ...

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        if options["rule"] == self.fails and max_tokens > 8:
            raise RuntimeError("out of memory")
        text = "\u2028one\x85two"  # what Unicode takes for line ends is none in JSON lines
        return Group([Output(text + e.id, 4, "stop", 2, 5, 2, 0, {"exact": 2}, {1: 2}) for e in examples], 0.5)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [-1.0] * len(texts)


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


def test_a_cell_that_crashes_leaves_the_others_and_is_reported(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js", "naive", max_tokens=20)
    store, _ = run(plan, tmp_path, Batched(fails="js"), Words(prompts))
    summary = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    assert list(summary["cells"]) == ["strict", "naive"]
    assert summary["failures"] == {"js": "RuntimeError: out of memory"}
    write_report(plan, store, {"words": "length"})
    assert "js crashed: RuntimeError: out of memory" in (tmp_path / "report.md").read_text()
    # tried again, and well now
    store, progress = run(plan, tmp_path, Batched(), Words(prompts))
    assert progress.measured == 3
    assert list(summarise(plan, store, {"words": "length"})["tasks"]["words"]["cells"]) == list(plan.rules)


def test_settings_that_changed_are_refused(prompts: list[str], tmp_path: Path) -> None:
    run(plan_of("js", max_tokens=8), tmp_path, Batched(), Words(prompts))
    with pytest.raises(SettingError, match=r"with max_tokens=8, and now it is 9: give another --out"):
        Store(tmp_path, plan_of("js", max_tokens=9))
    with pytest.raises(SettingError, match=r"with draft='tinier', and now it is None"):
        Store(tmp_path, plan_of("js", max_tokens=8, draft=None))
    with pytest.raises(SettingError, match=r"holds words with data=None, and now it is 'x.jsonl'"):
        Store(tmp_path, plan_of("js", max_tokens=8, tasks=[{"name": "words", "data": "x.jsonl"}]))


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


def test_prompts_that_cannot_be_had_are_refused_before_the_first_token(tiny: Any, tmp_path: Path) -> None:
    plan, backend = plan_of("js"), HuggingFace(tiny.engine())
    with pytest.raises(SettingError, match=r"words, example 1: .*512"):
        Runner(plan, plan.rules, [Words(["w5", "w5 " * 400])], backend, Store(tmp_path, plan))
    messages = Words(["w5"])
    messages.examples = lambda limit: [Example("a", [{"role": "user", "content": "w5"}])]  # type: ignore[method-assign]
    with pytest.raises(SettingError, match=r"words, example a: the tokenizer has no chat template: .*--raw"):
        Runner(plan, plan.rules, [messages], backend, Store(tmp_path, plan))
    assert not (tmp_path / "records.jsonl").exists()


class Budgets(Words):
    """One example that says how long it may be, and others that do not."""

    def examples(self, limit: int | None) -> list[Example]:
        first, *rest = super().examples(limit)
        return [replace(first, max_tokens=7), *rest]


@pytest.mark.parametrize(("budget", "expected"), [(None, [7, 256]), (9, [7, 9]), (5, [5, 5])])
def test_the_budget_is_the_tasks_own_unless_the_plan_is_stricter(
    tiny: Any, prompts: list[str], tmp_path: Path, budget: int | None, expected: list[int]
) -> None:
    engine = tiny.engine()
    engine.eos_token_ids = frozenset  # type: ignore[method-assign]
    store, _ = run(plan_of("strict", max_tokens=budget), tmp_path, HuggingFace(engine), Budgets(prompts[:2]))
    found = [store.groups["words", "strict", number].outputs[0] for number in range(2)]
    assert [output["tokens"] for output in found] == expected
    assert {output["finish"] for output in found} == {"length"}


def test_a_damaged_file_is_named_with_its_line(prompts: list[str], tmp_path: Path) -> None:
    plan = plan_of("js", max_tokens=8)
    run(plan, tmp_path, Batched(), Words(prompts))
    records = tmp_path / "records.jsonl"
    records.write_text("{broken\n" + records.read_text())
    with pytest.raises(SettingError, match=r"records.jsonl, line 1 is damaged"):
        Store(tmp_path, plan)


def test_a_cell_that_cannot_be_had_is_refused_before_the_first_token(tiny: Any, tmp_path: Path) -> None:
    plan = plan_of("js", "fly:window=6")
    with pytest.raises(SettingError, match=r"fly:window=6: .*draft_length is 5"):
        Runner(plan, plan.rules, [Words(["w5"])], HuggingFace(tiny.engine()), Store(tmp_path, plan))
    with pytest.raises(SettingError, match=r"js: rule 'js' compares distributions"):
        Runner(
            plan_of("js"), ["js"], [Words(["w5"])], HuggingFace(tiny.engine(drafter="lookup")), Store(tmp_path, plan)
        )
    assert not (tmp_path / "records.jsonl").exists()


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


def test_the_log_likelihood_is_that_of_the_target(tiny: Any, prompts: list[str]) -> None:
    engine = tiny.engine()
    example = Example("1", prompts[0])
    text = engine.generate(prompts[0], rule="strict", max_tokens=15, ignore_eos=True).text
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = engine.encode(prompts[0]).tolist()
    rows = tiny.full_logits(engine.model, prompt + ids).log_softmax(dim=1)
    expected = sum(float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)) / len(ids)
    found = HuggingFace(engine).log_likelihoods([example, example], [text, ""])
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[1] is None


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


def test_flat_options_are_the_engines() -> None:
    assert flat("naive:p=0.2:L=3")["dropout"] == 0.2
    assert flat("naive:p=0.2:L=3")["draft_length"] == 3


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"w{20 + i} w7 w9"}) + "\n" for i in range(count)))
    return path


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"prompt": "w5"}\n{"prompt": 3}\n', "line 2: the field 'prompt' must be a non-empty str, got 3"),
        ('{"text": "w5"}\n', "line 1: the field 'prompt' is missing"),
        ('{"prompt": "w5"\n', "line 1: no valid JSON"),
        ("[1]\n", "line 1: expected an object, got list"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(SettingError, match=re.escape(str(path)) + ".*" + re.escape(message)):
        Prompts(path).examples(None)


def test_prompts_are_messages_or_texts(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "prompts.jsonl", 1)
    assert Prompts(path).examples(None)[0].prompt == [{"role": "user", "content": "w20 w7 w9"}]
    assert Prompts(path, chat=False).examples(None)[0].prompt == "w20 w7 w9"
