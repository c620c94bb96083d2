"""The judge's settings, its questions and how its verdicts are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from judge_support import benchmark, judge, texts_of

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.judge.prompts import question, verdict
from dropmatch.evaluation.tasks import Prompts
from dropmatch.evaluation.tasks.choose import choose_task


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--endpoint", "localhost:8000"], "endpoint must be a URL"),
        (["--endpoint", "http://"], "endpoint must be a URL"),
        (["--endpoint", "http://[::1/v1"], "endpoint must be a URL"),
        (["--kind", "both"], "kind must be one of: single, pairwise; got 'both'"),
        (["--concurrency", "0"], "concurrency must be an integer from 1 to 256, got 0"),
        (["--task", "gsm8k"], "the benchmark has no task 'gsm8k'"),
        (["--cells", "typical"], "the benchmark has no cell 'typical'; it has strict, js"),
        (["--cells", "strict", "--kind", "pairwise"], "holds no texts of a lossy cell and of strict"),
    ],
)
def test_settings_that_will_not_do_are_refused(tmp_path: Path, more: list[str], message: str) -> None:
    pytest.importorskip("openai", reason="the judge's client needs the openai package")
    found = judge(benchmark(tmp_path, texts_of("js")), "http://127.0.0.1:9/v1", *more)
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_folder_without_a_benchmark_is_refused_and_left_alone(tmp_path: Path) -> None:
    found = judge(tmp_path / "nothing", "http://127.0.0.1:9/v1")
    assert found.exit_code == 2
    assert "holds no benchmark" in found.stderr
    assert not (tmp_path / "nothing").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    found = judge(benchmark(tmp_path, texts_of("js")), "http://127.0.0.1:9/v1")
    assert found.exit_code == 2
    assert "a judge needs the openai package: pip install 'dropmatch[eval]'" in found.stderr


def test_an_example_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "question 0"}\n')
    found = judge(folder, "http://127.0.0.1:9/v1")
    assert found.exit_code == 2
    assert "has no example '2' any more" in found.stderr
    # as many examples, and others: what was said is no answer to them
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "another {i}"}}\n' for i in range(20)))
    found = judge(folder, "http://127.0.0.1:9/v1")
    assert found.exit_code == 2
    assert "example 1, for another prompt" in found.stderr


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: [[7]]", 7.0), ("[[ 8.5 ]]", 8.5), ("[[9/10]]", 9.0), ("[[3]] no, [[4]]", 4.0),
        ("[[0]]", None), ("[[11]]", None), ("7/10", None), ("[7]", None), ("", None), ("Score: [[NUMBER]]", None),
        ("<think>[[2]] or so</think> [[6]]", 6.0), ("<think>perhaps [[2]]", None), ("so [[2]]</think>none", None),
    ],
)  # fmt: skip
def test_scores_are_read_from_the_marked_place(answer: str, score: float | None) -> None:
    assert verdict("single", answer) == score


@pytest.mark.parametrize(
    ("answer", "which"),
    [
        ("[[A]]", "first"), ("Verdict: [[b]]", "second"), ("[[TIE]]", "tie"), ("[[C]]", "tie"),
        ("[[A]] at first, but [[B]]", "second"), ("A is better", None), ("[[A, B or TIE]]", None), ("[[D]]", None),
    ],
)  # fmt: skip
def test_verdicts_are_read_from_the_marked_place(answer: str, which: str | None) -> None:
    assert verdict("pairwise", answer) == which


def test_questions_hold_the_texts_as_they_are() -> None:
    chat = [{"role": "system", "content": "Be {kind}."}, {"role": "user", "content": "Hello {0}"}]
    asked = question("pairwise", chat, [["one {first}"], ["two\u2028"]])
    assert "<input>\n[system]\nBe {kind}.\n\n[user]\nHello {0}\n</input>" in asked
    assert "<reply_A>\none {first}\n</reply_A>" in asked
    assert "<reply_B>\ntwo\u2028\n</reply_B>" in asked
    assert question("single", "raw", [["x"]], again=True) != question("single", "raw", [["x"]])


def test_the_plan_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    plan = Plan.load(folder)
    assert (plan.target, plan.rules) == ("tiny", ("strict", "js"))
    assert isinstance(choose_task(plan.tasks[0].name), Prompts)
    (folder / "plan.json").write_text("{}")
    with pytest.raises(SettingError, match="cannot read"):
        Plan.load(folder)
