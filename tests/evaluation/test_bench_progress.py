"""How much is left of a benchmark, and how its bar says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_support import Batched, Words, plan_of, run

from dropmatch.evaluation.backends import Group
from dropmatch.evaluation.bench import progress as module
from dropmatch.evaluation.bench.progress import GROUPS, Bar, Load
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.workload import JUDGED, READ, SCORED
from dropmatch.evaluation.tasks import Example


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=found))
    return found


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_the_time_left_is_of_the_tokens_to_do(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth of the groups may be a half of the tokens."""
    with Bar([Load(GROUPS, 10, 4000)]) as bar:
        bar.begin("short")
        for _ in range(5):
            clock.now += 60
            bar.done(7, measured=True, amount=100)
        *_, last = said(capsys)
        assert last == f"5 of 10 {GROUPS}, short, 35 min left"
    assert said(capsys) == [f"5 of 10 {GROUPS}, 35 tokens"]


def test_something_is_shown_before_the_first_group_is_done(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar([Load(GROUPS, 90, 900), Load(JUDGED, 30, 30)]) as bar:
        bar.aside("warming up: strict")
        counts = f"0 of 90 {GROUPS}, 0 of 30 {JUDGED}"
        assert said(capsys) == [f"{counts}, warming up: strict, time left not known yet"]
        clock.now += 600
        bar.begin("words 1/30, strict")
        assert said(capsys) == [f"{counts}, words 1/30, strict, time left not known yet"]
        clock.now += 60
        bar.done(5, measured=True, amount=300)  # the warm-up is not in its time
        # nobody knows yet how long a program takes
        assert said(capsys) == [f"1 of 90 {GROUPS}, 0 of 30 {JUDGED}, words 1/30, strict, at least 2 min left"]


def test_less_than_a_minute_is_no_0_minutes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar([Load(GROUPS, 2, 2, pace=5.0)]) as bar:
        bar.begin("a")
        assert said(capsys) == [f"0 of 2 {GROUPS}, a, less than a minute left"]
    with Bar([Load(GROUPS, 2, 2, pace=5.0), Load(READ, 2, 2)]) as bar:
        bar.begin("a")
        assert said(capsys)[-1].endswith("time left not known yet")


def test_what_an_earlier_run_took_is_known_from_the_start(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar([Load(GROUPS, 4, 300, found=1, pace=0.6)]) as bar:
        bar.begin("b")
        assert said(capsys) == [f"1 of 4 {GROUPS}, b, 3 min left"]
        clock.now += 120
        bar.done(0, measured=True, amount=100)  # and what this one takes counts more
        assert said(capsys) == [f"2 of 4 {GROUPS}, b, 4 min left"]


def test_scoring_has_a_pace_of_its_own(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar([Load(GROUPS, 1, 100), Load(READ, 60, 60)]) as bar:
        bar.begin("a")
        clock.now += 600
        bar.done(100, measured=True, amount=100)
        bar.begin("scoring")
        clock.now += 60
        bar.done(0, measured=True, unit=READ, count=4)
        *_, last = said(capsys)
        assert last == f"1 of 1 {GROUPS}, 4 of 60 {READ}, scoring, 14 min left"


def test_a_group_that_crashed_was_not_measured(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar([Load(GROUPS, 4, 400)]) as bar:
        bar.begin("a")
        clock.now += 60
        bar.done(9, measured=True, amount=100)
        clock.now += 1
        bar.lost(100)
        clock.now += 30
        bar.begin("b")
        *_, last = said(capsys)
        assert last == f"1 of 4 {GROUPS}, b, 2 min left"


def test_a_number_of_things_is_one_kind_of_work(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(3, "answers") as bar:
        bar.begin("a")
        bar.done(0, measured=False)
        clock.now += 60
        bar.done(4, measured=True)
        *_, last = said(capsys)
        assert last == "2 of 3 answers, a, 1 min left"


class Ticking(Batched):
    """Takes a minute for a group, whatever it is."""

    def __init__(self, clock: Clock, fails: str | None = None) -> None:
        super().__init__(fails)
        self._clock = clock

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        group = super().generate(examples, options, max_tokens)
        self._clock.now += 60
        return Group(group.outputs, 60.0)


def test_a_process_of_one_draft_length_counts_the_others(prompts: list[str], tmp_path: Path) -> None:
    """With vLLM each draft length is a process of its own, and they run one after the other."""
    plan, task = plan_of("js", "js:L=8", max_tokens=20, engine="vllm"), Words(prompts)
    first, second = [cell for cell in plan.rules if "8" not in cell], [cell for cell in plan.rules if "8" in cell]
    store = Store(tmp_path, plan)
    runner = Runner(plan, first, [task], Batched(), store)
    # 4 cells of 3 groups of 2, 2 and 1 examples, of 20 tokens each
    assert runner.workload() == [Load(GROUPS, 12, 400), Load(SCORED, 20, 20)]
    bar = Bar(runner.workload())
    runner.run(bar)
    assert bar._counts("/") == f"6/12 {GROUPS}, 10/20 {SCORED}"
    assert [stage.left for stage in bar._stages.values()] == [200, 10]
    runner = Runner(plan, second, [task], Batched(), store)
    assert runner.workload() == [Load(GROUPS, 12, 200, 6, pace=6 * 0.5 / 200), Load(SCORED, 20, 10, 10)]
    bar = Bar(runner.workload())
    runner.run(bar)
    assert bar._counts("/") == f"12/12 {GROUPS}, 20/20 {SCORED}"
    assert bar._left() == ""


def test_what_an_earlier_process_left_is_not_waited_for(prompts: list[str], tmp_path: Path) -> None:
    plan, task = plan_of("js", "js:L=8", max_tokens=20, engine="vllm"), Words(prompts)
    runner = Runner(plan, ["strict:L=8", "js:L=8"], [task], Batched(), Store(tmp_path, plan))
    assert runner.workload() == [Load(GROUPS, 12, 200), Load(SCORED, 20, 10)]


def test_a_bar_over_a_run_with_a_cell_that_crashes(
    prompts: list[str], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, store = plan_of("js", "naive", max_tokens=20), Store(tmp_path, plan_of("js", "naive", max_tokens=20))
    runner = Runner(plan, plan.rules, [Words(prompts)], Ticking(clock, fails="js"), store)
    with Bar(runner.workload()) as bar:
        runner.run(bar)
    lines = said(capsys)
    # strict takes a minute for 40 tokens; js fails at once; of its 100 tokens none is waited for then
    assert lines[0].startswith(f"0 of 9 {GROUPS}, 0 of 15 {SCORED}, warming up: strict")
    assert f"1 of 9 {GROUPS}, 0 of 15 {SCORED}, words 1/3, strict, at least 6 min left" in lines
    assert f"2 of 9 {GROUPS}, 0 of 15 {SCORED}, words 1/3, naive, at least 3 min left" in lines
    assert lines[-1] == f"6 of 9 {GROUPS}, 10 of 15 {SCORED}, 40 tokens"
    assert bar._left() == ""


def test_a_run_that_goes_on_has_only_the_rest_to_do(prompts: list[str], tmp_path: Path) -> None:
    task = Words(prompts)
    run(plan_of("js", max_tokens=20, limit=4), tmp_path, Batched(), task)
    plan = plan_of("js", "naive", max_tokens=20)
    store = Store(tmp_path, plan)
    runner = Runner(plan, plan.rules, [task], Batched(), store)
    groups, scores = runner.workload()
    assert (groups.total, groups.amount) == (9, 2 * 20 + 100)
    assert (scores.total, scores.amount) == (15, 2 + 5)
    bar = Bar([groups, scores])
    runner.run(bar)
    assert bar._counts("/") == f"9/9 {GROUPS}, 15/15 {SCORED}"
    assert bar._left() == ""
