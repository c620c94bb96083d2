"""Conversations: rows with several turns, each decoded on the cell's own replies before it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_support import Batched, plan_of, run
from typer.testing import CliRunner

from dropmatch.cli.app import app
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench import worker
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import Runner, flat
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.summary import summarise
from dropmatch.evaluation.tasks import Example, Prompts, following
from dropmatch.evaluation.tasks.choose import choose_task

TEMPLATE = "{% for m in messages %}{{ 'w5' if m.role == 'user' else 'w6' }} {{ m.content }} {% endfor %}w7"
ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["w20 w21", "w22 w23"]},
    {"question_id": 82, "category": "math", "turns": ["w30 w31 w32"], "reference": ["w40"]},
    {"question_id": 83, "category": "math", "turns": ["w33", "w34 w35", "w36"], "reference": ["w41", "w42", "w43"]},
]


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(folder: Path, rows: Sequence[Mapping[str, Any]] = ROWS, **more: Any) -> Prompts:
    return Prompts(write(folder / "rows.jsonl", rows), name="talks", **more)


def plan(*rules: str, **more: Any) -> Plan:
    return plan_of(*rules, tasks=["talks"], **{"max_tokens": 8, **more})


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def chatting(tiny: Any) -> Any:
    engine = tiny.engine()
    engine.tokenizer.chat_template = TEMPLATE
    return engine


def test_each_turn_of_a_row_is_an_example(tmp_path: Path) -> None:
    found = conversations(tmp_path).examples(None)
    assert [example.id for example in found] == ["81", "81#2", "82", "83", "83#2", "83#3"]
    assert [example.after for example in found] == [(), ("81",), (), (), ("83",), ("83", "83#2")]
    assert found[5].prompt == user("w33", "w34 w35", "w36")
    assert found[0].data == {"category": "writing"}
    assert [example.data.get("references") for example in found[2:]] == [
        ("w40",), ("w41",), ("w41", "w42"), ("w41", "w42", "w43"),
    ]  # fmt: skip
    said = following(found[5], {"83": "first", "83#2": "second", "81": "no"})
    assert said.whole == [
        {"role": "user", "content": "w33"}, {"role": "assistant", "content": "first"},
        {"role": "user", "content": "w34 w35"}, {"role": "assistant", "content": "second"},
        {"role": "user", "content": "w36"},
    ]  # fmt: skip
    assert [example.id for example in conversations(tmp_path).examples(2)] == ["81", "81#2", "82"]
    assert [example.id for example in conversations(tmp_path, turns=1).examples(None)] == ["81", "82", "83"]
    assert [example.id for example in conversations(tmp_path, turns=2).examples(None)][-1] == "83#2"


def test_turns_may_stand_in_meta_beside_a_prompt(tmp_path: Path) -> None:
    meta = {"turns": ["a", "b"], "category": "stem", "reference_turns": ["c", "d"], "question_id": 7}
    first, second = conversations(tmp_path, [{"id": "x-1", "prompt": "a", "meta": meta}]).examples(None)
    assert (first.id, first.prompt, second.id, second.prompt) == ("x-1", user("a"), "x-1#2", user("a", "b"))
    assert second.data == {"category": "stem", "references": ("c", "d")}


def test_one_turn_may_have_several_right_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "meta": {"reference": [["Paris", "Lutetia"]]}},
        {"prompt": "b", "reference": ["Rome", "Roma"]},
        {"prompt": "c", "reference": "Bern"},
        {"prompt": "d", "reference": None, "category": ""},
    ]
    found = [example.data.get("references") for example in conversations(tmp_path, rows).examples(None)]
    assert found == [("- Paris\n- Lutetia",), ("- Rome\n- Roma",), ("Bern",), None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": []}, "the field 'turns' must be a list of non-empty texts, got []"),
        ({"turns": ["a", ""]}, "the field 'turns' must be a list of non-empty texts"),
        ({"turns": "a"}, "the field 'turns' must be a list"),
        ({"prompt": "b", "turns": ["a"]}, "the fields 'prompt' and 'turns' do not begin alike"),
        ({"turns": ["a", "b"], "reference": ["c", "d", "e"]}, "for each of its 2 turns, got ['c', 'd', 'e']"),
        ({"turns": ["a"], "reference": [3]}, "a reference must be a text"),
        ({"turns": ["a"], "category": 3}, "the field 'category' must be a text, got 3"),
        ({"question": "a"}, "the field 'prompt' is missing"),
    ],
)
def test_rows_that_cannot_be_read_are_refused_by_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match="line 2: .*" + re.escape(message)):
        conversations(tmp_path, [ROWS[0], row]).examples(None)


def test_conversations_are_no_texts_to_be_continued(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"line 1: a conversation of 2 turns needs chat messages: .*--turns 1"):
        conversations(tmp_path, chat=False).examples(None)
    assert conversations(tmp_path, chat=False, turns=1).examples(None)[0].prompt == "w20 w21"


def test_each_cell_goes_on_from_its_own_texts(tiny: Any, tmp_path: Path) -> None:
    engine = chatting(tiny)
    store, _ = run(
        plan("naive:p=0.5:token_floor=0", max_tokens=12), tmp_path, HuggingFace(engine), conversations(tmp_path)
    )
    lines = {(line["cell"], line["id"]): line for line in records(tmp_path)}
    assert len(lines) == 2 * 6 == len(records(tmp_path))
    rules = {
        "strict": {"rule": "strict"},
        "naive:p=0.5:token_floor=0": {"rule": "naive", "dropout": 0.5, "token_floor": 0.0},
    }
    for cell, options in rules.items():
        for row in ROWS:
            messages: list[dict[str, str]] = []
            for number, text in enumerate(row["turns"], start=1):
                messages += user(text)
                live = engine.generate(messages, max_tokens=12, **options)
                i = str(row["question_id"]) + (f"#{number}" if number > 1 else "")
                line = lines[cell, i]
                assert (line["text"], line["tokens"]) == (live.text, live.statistics.generated)
                assert line["after"] == [message["content"] for message in messages if message["role"] == "assistant"]
                assert line["category"] == row["category"]
                # what the target gives a later text is after the replies that it followed
                prompt = engine.encode(messages).tolist()
                ids = engine.tokenizer(live.text, add_special_tokens=False)["input_ids"]
                logs = tiny.full_logits(engine.model, prompt + ids).log_softmax(dim=1)
                expected = sum(float(logs[len(prompt) - 1 + n, token]) for n, token in enumerate(ids)) / len(ids)
                assert store.scores["talks", cell, i]["log_likelihood"] == pytest.approx(expected, rel=1e-4)
                messages.append({"role": "assistant", "content": live.text})
    later = ("81#2", "83#2", "83#3")
    assert any(lines["strict", i]["after"] != lines["naive:p=0.5:token_floor=0", i]["after"] for i in later)
    cells = summarise(Plan.load(tmp_path), store, {"talks": None})["tasks"]["talks"]["cells"]
    assert {cell["examples"] for cell in cells.values()} == {6}


class Counted(Batched):
    """Says what it was asked, and how often it was asked anything."""

    def __init__(self, mark: str = "") -> None:
        super().__init__()
        self.mark, self.groups, self.read = mark, list[list[str]](), list[tuple[str, tuple[str, ...]]]()

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        group = super().generate(examples, options, max_tokens)
        said = [f"{self.mark}{len(e.whole)} messages, {options['rule']} {e.id}" for e in examples]
        outputs = [replace(output, text=text) for output, text in zip(group.outputs, said, strict=True)]
        if max_tokens == 9:  # no warm-up
            self.groups.append([example.id for example in examples])
        return Group(outputs, group.seconds)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        self.read += [(example.id, example.replies) for example in examples]
        return super().log_likelihoods(examples, texts)


def test_turns_are_decoded_in_groups_of_their_own(tmp_path: Path) -> None:
    backend = Counted()
    store, progress = run(plan("js", max_tokens=9), tmp_path, backend, conversations(tmp_path))
    assert backend.groups[::2] == [["81", "82"], ["83"], ["81#2", "83#2"], ["83#3"]]
    assert progress.measured == 2 * 4
    assert store.texts("talks", "js")["83#3"] == "5 messages, js 83#3"
    assert store.outputs("talks", "js")["83#3"]["after"] == ["1 messages, js 83", "3 messages, js 83#2"]
    assert ("83#3", ("1 messages, js 83", "3 messages, js 83#2")) in backend.read


@pytest.mark.parametrize(("kept", "missing"), [(4, [["81#2", "83#2"], ["83#3"]]), (6, [["83#3"]])])
def test_a_run_that_was_killed_between_turns_goes_on(tmp_path: Path, kept: int, missing: list[list[str]]) -> None:
    first, second = Counted(), Counted()
    task, one = conversations(tmp_path), plan("js", max_tokens=9)
    before, _ = run(one, tmp_path, first, task)
    ids = ["81", "82", "83", "81#2", "83#2", "83#3"][: kept - 1]
    lines = [line for line in (tmp_path / "records.jsonl").read_text().splitlines() if json.loads(line)["id"] in ids]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    after, _ = run(one, tmp_path, second, task)
    assert second.groups[::2] == missing
    assert all(after.texts("talks", cell) == before.texts("talks", cell) for cell in ("strict", "js"))


def test_more_examples_leave_the_turns_that_are_there(tmp_path: Path) -> None:
    rows = [{"turns": [f"w{i}", f"w{i + 1}"]} for i in range(10, 16)]
    task = conversations(tmp_path, rows)
    run(plan("js", max_tokens=9, limit=2), tmp_path, Counted(), task)
    backend = Counted()
    _, progress = run(plan("js", max_tokens=9), tmp_path, backend, task)
    assert backend.groups[::2] == [["3", "4"], ["5", "6"], ["3#2", "4#2"], ["5#2", "6#2"]]
    assert (progress.measured, progress.found) == (8, 4)
    assert len(Store(tmp_path, plan("js", max_tokens=9)).texts("talks", "js")) == 12


def test_what_followed_another_text_is_decoded_and_read_anew(tmp_path: Path) -> None:
    """The group of one becomes one of two, and its text is another; so is what it is followed by."""
    rows = [{"turns": [f"w{i}", f"w{i + 1}"]} for i in range(10, 14)]
    task = conversations(tmp_path, rows)
    run(plan(max_tokens=9, limit=3), tmp_path, Counted(), task)
    backend = Counted(mark="now ")
    store, _ = run(plan(max_tokens=9), tmp_path, backend, task)
    assert backend.groups == [["3", "4"], ["3#2", "4#2"]]
    assert store.outputs("talks", "strict")["3#2"]["after"] == ["now 1 messages, strict 3"]
    # a turn before that was decoded anew in a run that was killed then
    lines = records(tmp_path)
    first = next(line for line in lines if line["id"] == "1")
    first["text"] = "another"
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    backend = Counted()
    store, _ = run(plan(max_tokens=9), tmp_path, backend, task)
    assert backend.groups == [["1#2", "2#2"]]
    assert {i for i, _ in backend.read} == {"1", "1#2", "2#2"}
    assert ("1#2", ("another",)) in backend.read
    again = Store(tmp_path, plan(max_tokens=9))
    assert all(again.scores["talks", "strict", i] for i in again.texts("talks", "strict"))


def older(folder: Path) -> None:
    """Make a folder what a version wrote that asked first turns only."""
    lines = [{k: v for k, v in line.items() if k not in ("after", "category")} for line in records(folder)]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = json.loads((folder / "plan.json").read_text())
    del kept["turns"]
    (folder / "plan.json").write_text(json.dumps(kept))


def test_a_folder_of_first_turns_is_not_mixed_with_later_ones(tmp_path: Path) -> None:
    run(plan("js", max_tokens=9, turns=1), tmp_path, Counted(), conversations(tmp_path, turns=1))
    with pytest.raises(SettingError, match=r"holds a benchmark with turns=1, and now it is None: give another --out"):
        Store(tmp_path, plan("js", max_tokens=9))
    older(tmp_path)
    for _ in range(2):  # the first try leaves nothing behind that lets the second one pass
        with pytest.raises(SettingError, match=r"texts of talks from before later turns were asked: .*--turns 1"):
            run(plan("js", max_tokens=9), tmp_path, Counted(), conversations(tmp_path))
    older_plan = json.loads((tmp_path / "plan.json").read_text())
    assert older_plan["turns"] is None
    older(tmp_path)
    _, progress = run(plan("js", "naive", max_tokens=9, turns=1), tmp_path, Counted(), conversations(tmp_path, turns=1))
    assert (progress.measured, progress.found) == (2, 4)
    with pytest.raises(SettingError, match=r"with turns=1, and now it is None"):
        Store(tmp_path, plan("js", max_tokens=9))


def test_an_older_folder_without_conversations_goes_on(tmp_path: Path) -> None:
    task = conversations(tmp_path, [{"prompt": "w20"}, {"prompt": "w21"}])
    run(plan("js", max_tokens=9), tmp_path, Counted(), task)
    older(tmp_path)
    _, progress = run(plan("js", "naive", max_tokens=9), tmp_path, Counted(), task)
    assert (progress.measured, progress.found) == (1, 2)


def test_a_cell_that_crashes_in_a_first_turn_has_no_later_ones(tmp_path: Path) -> None:
    store, _ = run(plan("js", max_tokens=20), tmp_path, Batched(fails="js"), conversations(tmp_path))
    assert store.failures == {("talks", "js"): "RuntimeError: out of memory"}
    assert not store.texts("talks", "js")
    assert len(store.texts("talks", "strict")) == 6


def test_conversations_that_may_not_fit_are_refused_before_the_first_token(tiny: Any, tmp_path: Path) -> None:
    backend = HuggingFace(chatting(tiny))
    rows = [{"turns": ["w20 " * 300, "w21"]}]

    def runner(tokens: int) -> Runner:
        one = plan("js", max_tokens=tokens)
        return Runner(one, one.rules, [conversations(tmp_path, rows)], backend, Store(tmp_path / str(tokens), one))

    runner(100)  # 512 are enough for 300 and twice 100
    with pytest.raises(SettingError, match=r"talks, example 1#2: .*512"):
        runner(110)


def test_the_command_asks_so_many_turns(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chatting(tiny)
    backend = HuggingFace(engine)
    monkeypatch.setattr(worker, "_huggingface", lambda plan: backend)
    file = write(tmp_path / "talks.jsonl", ROWS)
    words = ["bench", "--task", str(file), "--rules", "js", "--max-tokens", "8", "--limit", "1"]
    for more, expected in ((("--turns", "1"), ["81"]), ((), ["81", "81#2"])):
        out = tmp_path / f"out{len(more)}"
        found = CliRunner().invoke(app, [*words, "--out", str(out), *more])
        assert found.exit_code == 0, found.output
        assert sorted({line["id"] for line in records(out)}) == expected
    found = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out0"), "--turns", "1"])
    assert found.exit_code == 2
    assert "with turns=None, and now it is 1" in found.stderr
    found = CliRunner().invoke(app, ["bench", "--task", "humaneval", "--turns", "1", "--out", str(tmp_path / "other")])
    assert found.exit_code == 2
    assert "turns=1 has no meaning without a file of prompts" in found.stderr


def test_options_of_a_cell_reach_later_turns(tiny: Any, tmp_path: Path) -> None:
    engine = chatting(tiny)
    example = following(conversations(tmp_path).examples(1)[1], {"81": "w50 w51"})
    messages = [*user("w20 w21"), {"role": "assistant", "content": "w50 w51"}, *user("w22 w23")]
    (found,) = HuggingFace(engine).generate([example], flat("js:p=0.4"), 10).outputs
    assert found.text == engine.generate(messages, rule="js", dropout=0.4, max_tokens=10).text


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("mt_bench", "lm-sys/FastChat"),
        ("MT-Bench", "lm-sys/FastChat"),
        ("vicuna_bench", "lm-sys/FastChat"),
        ("spec_bench", "hemingkx/Spec-Bench"),
        ("komt_bench", "LG-AI-EXAONE/KoMT-Bench"),
        ("alpaca_eval", "tatsu-lab/alpaca_eval"),
    ],
)
def test_sets_that_are_no_tasks_are_said_to_be_files(name: str, repository: str) -> None:
    with pytest.raises(SettingError, match=rf"{name} is a set of open-ended prompts.*_\w+\.jsonl.*{repository}"):
        choose_task(name)
