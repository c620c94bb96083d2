"""HumanEval on problems of our own: data, prompts and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropmatch.errors import SettingError

pytest.importorskip("evalplus", reason="EvalPlus is not installed")
pytest.importorskip("resource", reason="programs are judged on Linux and macOS only")

from humaneval_support import ADD, HALVE, PROBLEMS, QUICK, RIGHT, ours, write

from dropmatch.evaluation.tasks.humaneval import HumanEval, judging

TEST = (
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 5) == 10\n"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [ours(name, problem) for name, problem in PROBLEMS.items()]
    return write(tmp_path_factory.mktemp("humaneval") / "some.jsonl", *rows)


@pytest.fixture(scope="module")
def task(data: Path) -> HumanEval:
    return HumanEval(plus=True, data=data, limits=QUICK)


def test_canonical_solutions_pass_and_wrong_ones_fail(task: HumanEval) -> None:
    examples = task.examples(None)
    right = [PROBLEMS[example.id]["prompt"] + PROBLEMS[example.id]["canonical_solution"] for example in examples]
    assert task.score(examples, right) == [1.0, 1.0, 1.0]
    wrong = [
        "def add(a, b):\n    return abs(a) + b",
        "def halve(xs):\n    return xs",
        "def find_zero(xs):\n    return 0",
    ]
    assert task.score(examples, wrong) == [0.0, 0.0, 0.0]


def test_base_inputs_alone_are_more_lenient(data: Path) -> None:
    task = HumanEval(plus=False, data=data, limits=QUICK)
    assert (task.name, task.metric) == ("humaneval", "pass@1")
    assert task.score(task.examples(1), ["def add(a, b):\n    return abs(a) + b"]) == [1.0]


def test_answers_are_found_in_what_is_said_around_them(task: HumanEval) -> None:
    function = "def add(a, b):\n    return helper(a) + b\n\ndef helper(a):\n    return a\n"
    texts = [
        f"Sure! Here it is:\n\n```python\n{function}```\n\nIt adds the two numbers.",
        f"```python\n{function}\nif __name__ == '__main__':\n    while True: pass\n```",
        f"```python\n{function}\nprint(add(1, 2)",
        "```python\ndef add(a, b):\n\treturn a + b\n```",
        "I do not know.",
        "",
        "```python\ndef sum(a, b):\n    return a + b\n```",
        "(" * 5000,
    ]
    scores = task.score(task.examples(1) * len(texts), texts)
    assert scores == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    odd = ["def add(a, b):\n    return a + b\n\0", "def add(a, b):\n    return a + b  # \ud800"]
    assert None not in task.score(task.examples(1) * 2, odd)


def test_without_chat_the_problem_is_completed(data: Path) -> None:
    task = HumanEval(data=data, limits=QUICK, chat=False)
    examples = task.examples(2)
    assert examples[1].prompt == HALVE["prompt"].strip() + "\n"
    assert {"\ndef ", "\nassert "} < set(examples[1].stop)
    assert "\n```\n\n" not in examples[1].stop
    bodies = [PROBLEMS[example.id]["canonical_solution"] for example in examples]
    assert task.score(examples, bodies) == [1.0, 1.0]
    assert task.score(examples[:1], ["    return a - b\n"]) == [0.0]


def test_prompts_are_evalplus(task: HumanEval) -> None:
    example = task.examples(2)[1]
    assert (example.id, example.max_tokens) == ("T/1", 768)
    assert example.prompt == [
        {
            "role": "user",
            "content": "Please provide a self-contained Python script that solves the following problem in a markdown "
            f"code block:\n```python\n{HALVE['prompt'].strip()}\n```",
        }
    ]
    opening = "Here it is:\n```\ndef add(a, b):"
    assert not any(stop in opening for stop in example.stop)


@pytest.mark.parametrize("name", ["HumanEvalPlus.jsonl", "HumanEvalPlus-Mini.jsonl.gz"])
def test_released_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row = {"task_id": "HumanEval/0", **ADD, "contract": ""}
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(write(tmp_path / name, row)))
    task = HumanEval(plus=True, limits=QUICK)
    (example,) = task.examples(None)
    assert example.id == "HumanEval/0"
    assert task.score([example], [RIGHT]) == [1.0]


def test_original_tests(tmp_path: Path) -> None:
    keys = ("prompt", "entry_point", "canonical_solution")
    problem = {**{key: ADD[key] for key in keys}, "test": TEST}
    # this test needs a function that only the prompt has
    other = {
        "prompt": 'def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """Undo twice."""\n',
        "entry_point": "half",
        "canonical_solution": "    return x // 2\n",
        "test": "\ndef check(candidate):\n    assert candidate(twice(3)) == 3\n",
    }
    rows = [ours("T/0", problem), {"task_id": "T/1", **other}]
    task = HumanEval(data=write(tmp_path / "dev.jsonl", *rows), limits=QUICK)
    examples = task.examples(None)
    assert task.score(examples, ["def add(a, b):\n    return a + b", "def half(x):\n    return x / 2"]) == [1.0, 1.0]
    assert task.score(examples, ["def add(a, b):\n    return 3", "def double(x):\n    return x // 2"]) == [0.0, 0.0]
    assert task.score(examples[:1] * 2, ["def add(a, b):\n    while True: pass", "raise SystemExit"]) == [0.0, 0.0]


def test_problems_of_one_name_are_told_apart(tmp_path: Path) -> None:
    task = HumanEval(data=write(tmp_path / "a.jsonl", ours("T/0", ADD)), limits=QUICK)
    first = task.examples(1)[0]
    write(tmp_path / "a.jsonl", ours("T/0", {**ADD, "canonical_solution": "    return a - b\n"}))
    second = task.examples(1)[0]
    assert task.score([first, second], ["def add(a, b):\n    return a + b"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"meta": 3}, r"line 2.*'meta' must be a non-empty dict"),
        ({"prompt": ""}, r"line 2.*'prompt' must be a non-empty str"),
        ({"id": None}, r"line 2.*'id' must be"),
        ({"meta": {**ADD, "entry_point": None}}, r"line 2.*'meta.entry_point' must be"),
        (
            {"meta": {key: ADD[key] for key in ADD if key != "canonical_solution"}},
            r"line 2.*canonical_solution.*missing",
        ),
        ({"meta": {key: ADD[key] for key in ADD if key != "plus_input"}}, r"line 2.*'meta.plus_input' is missing"),
        ({"meta": {**ADD, "base_input": []}}, r"line 2.*'meta.base_input' is empty"),
        ({"meta": {**ADD, "plus_input": [1]}}, r"line 2.*'meta.plus_input' must be a list of lists"),
        ({"meta": {**ADD, "atol": "much"}}, r"line 2.*'meta.atol' must be a non-empty int or float"),
        ({"id": "T/0"}, r"line 2.*'T/0' above"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "a.jsonl", ours("T/0", ADD), {**ours("T/1", ADD), **change})
    with pytest.raises(SettingError, match=told):
        HumanEval(plus=True, data=path).examples(None)


def test_files_that_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text(json.dumps(ours("T/0", ADD)) + "\n{")
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    for name, told in (
        ("empty.jsonl", "is empty"),
        ("broken.jsonl", "line 2: no valid JSON"),
        ("plain.jsonl.gz", "no gzip file"),
        ("missing.jsonl", "No such file"),
    ):
        with pytest.raises(SettingError, match=told):
            HumanEval(data=tmp_path / name).examples(None)


def test_a_problem_that_fails_its_own_test_is_refused(tmp_path: Path) -> None:
    broken = {**ADD, "canonical_solution": "    return a.missing\n"}
    task = HumanEval(data=write(tmp_path / "a.jsonl", ours("T/0", broken)), limits=QUICK)
    with pytest.raises(SettingError, match="canonical solution of 'add' fails"):
        task.score(task.examples(None), ["def add(a, b):\n    return a + b"])


def test_evalplus_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install 'dropmatch\[eval\]'"):
        HumanEval()


def test_a_worker_that_cannot_start_is_no_wrong_answer(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = HumanEval(data=data)
    examples = task.examples(1)
    monkeypatch.setattr(judging, "WORKER", "dropmatch.nothing_there")
    with pytest.raises(SettingError, match=r"did not start.*nothing_there"):
        task.score(examples, ["def add(a, b):\n    return a + b"])
