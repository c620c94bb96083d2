"""A benchmark on a tiny pair: what is kept, what a crash leaves, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_support import Batched, Words, plan_of, run, write_prompts
from typer.testing import CliRunner

from dropmatch.cli.app import app
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench import worker
from dropmatch.evaluation.bench.plan import Plan, TaskChoice, options
from dropmatch.evaluation.bench.report import write_report
from dropmatch.evaluation.bench.runner import Runner, flat
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.tasks import Example, Prompts


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
    assert store.failures == Store(tmp_path, plan).failures == {}


def test_a_failure_to_score_is_forgotten_once_there_are_scores(prompts: list[str], tmp_path: Path) -> None:
    plan, broken = plan_of("js", max_tokens=20), Words(prompts)
    broken.score = lambda examples, texts: 1 / 0  # type: ignore[method-assign,assignment]
    store, _ = run(plan, tmp_path, Batched(), broken)
    assert set(store.failures.values()) == {"scoring: ZeroDivisionError: division by zero"}
    assert Store(tmp_path, plan).failures == store.failures
    store, progress = run(plan, tmp_path, Batched(), Words(prompts))
    assert progress.measured == 0
    assert store.failures == Store(tmp_path, plan).failures == {}


def test_a_benchmark_of_which_nothing_is_left_ends_with_an_error(
    prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(Batched):
        def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
            raise RuntimeError("out of memory")

        def about(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(worker, "_huggingface", lambda plan: Dead())
    file, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out"
    found = CliRunner().invoke(app, ["bench", "--task", str(file), "--rules", "js", "--out", str(out)])
    assert found.exit_code == 1
    assert "every cell has crashed; strict: RuntimeError: out of memory" in found.stderr
    assert "js crashed" in (out / "report.md").read_text()
    found = CliRunner().invoke(app, ["bench", "--out", str(out), "--report-only", "--rules", "js"])
    assert found.exit_code == 2
    assert "leave out all options but --out, --against and --plots" in found.stderr


def test_examples_of_one_id_are_refused(prompts: list[str], tmp_path: Path) -> None:
    same = Words(prompts)
    same.examples = lambda limit: [Example("a", "w5"), Example("b", "w6"), Example("a", "w7")]  # type: ignore[method-assign]
    with pytest.raises(SettingError, match=r"words: several examples have the id 'a': give each its own"):
        run(plan_of("js"), tmp_path, Batched(), same)


def test_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / language / "test" / "p.jsonl" for language in ("en", "de")]
    for file in files:
        file.parent.mkdir(parents=True)
        write_prompts(file, 2)
    plan = Plan.from_values({"target": "tiny", "tasks": [str(file) for file in files]})
    with pytest.raises(SettingError, match=r"two tasks are called test/p"):
        worker.tasks_of(plan)


def test_a_drafter_without_a_distribution_is_benchmarked(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    store, progress = run(
        plan_of("naive", max_tokens=8), tmp_path, HuggingFace(tiny.engine(drafter="lookup")), Words(prompts)
    )
    assert (progress.measured, store.failures) == (10, {})


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


def test_a_cell_that_cannot_be_had_is_refused_before_the_first_token(tiny: Any, tmp_path: Path) -> None:
    plan = plan_of("js", "fly:window=6")
    with pytest.raises(SettingError, match=r"fly:window=6: .*draft_length is 5"):
        Runner(plan, plan.rules, [Words(["w5"])], HuggingFace(tiny.engine()), Store(tmp_path, plan))
    with pytest.raises(SettingError, match=r"js: rule 'js' compares distributions"):
        Runner(
            plan_of("js"), ["js"], [Words(["w5"])], HuggingFace(tiny.engine(drafter="lookup")), Store(tmp_path, plan)
        )
    assert not (tmp_path / "records.jsonl").exists()


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


def test_flat_options_are_the_engines() -> None:
    assert flat("naive:p=0.2:L=3")["dropout"] == 0.2
    assert flat("naive:p=0.2:L=3")["draft_length"] == 3


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


def test_plain_decoding_is_a_cell_beside_the_others(tiny: Any, prompts: list[str], tmp_path: Path) -> None:
    plan, engine = plan_of("strict:L=0", "js:p=0.4", max_tokens=20), tiny.engine()
    store, _ = run(plan, tmp_path, HuggingFace(engine), Words(prompts))
    assert store.texts("words", "strict:L=0") == store.texts("words", "strict")
    assert all(store.groups["words", "strict:L=0", n].outputs[0]["proposed"] == 0 for n in range(5))
    found = summarise(plan, store, {"words": "length"})["tasks"]["words"]
    assert found["first"] == "strict"
    # the others are compared with drafting strictly, and plain decoding is too
    assert found["cells"]["js:p=0.4"]["over_strict"]["pairs"] == 5
    assert found["cells"]["strict:L=0"]["over_first"]["pairs"] == 5
    assert "over_strict" not in found["cells"]["strict:L=0"]
    write_report(plan, store, {"words": "length"})
    assert "| strict:L=0 | 5 |" in (tmp_path / "report.md").read_text()
    # without a drafter it is all that there is
    alone = plan_of("strict:L=0", max_tokens=20)
    store, _ = run(alone, tmp_path / "alone", HuggingFace(tiny.engine(drafter=None)), Words(prompts))
    assert (alone.rules, store.failures) == (("strict:L=0",), {})


def test_the_command_line_chooses_how_texts_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def caught(plan: Plan) -> list[Any]:
        plans.append(plan)
        raise SettingError("seen")

    monkeypatch.setattr(worker, "tasks_of", caught)
    words = ["bench", "--out", str(tmp_path / "out"), "--task", "mbpp", "--task", "gsm8k_cot", "--unsafe-code"]
    words += ["--filter", "gsm8k_cot=strict-match", "--metric", "exact_match"]
    assert "seen" in CliRunner().invoke(app, words).stderr
    assert plans[0].tasks == (
        TaskChoice("mbpp", metric="exact_match", unsafe_code=True),
        TaskChoice("gsm8k_cot", filter="strict-match", metric="exact_match", unsafe_code=True),
    )
    found = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), "--report-only", "--filter", "x"])
    assert "leave out all options but --out" in found.stderr
