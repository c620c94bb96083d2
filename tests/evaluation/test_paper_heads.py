"""Table 1: texts through single heads are those of the paper's equations, and their scores are counted right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acceptance import reference
from dropmatch import Engine
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Output
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.heads import check_task, heads_sheet, score_heads
from dropmatch.evaluation.paper.kept import Numbers
from dropmatch.evaluation.paper.paths import NO_DROPOUT, all_paths, decode_paths
from dropmatch.evaluation.paper.paths import Path as HeadPath
from dropmatch.evaluation.paper.texts import Texts, decode_all
from dropmatch.evaluation.tasks import Example, Prompts


class Quiet:
    """Counts what is done."""

    def __init__(self) -> None:
        self.measured = self.found = 0

    def begin(self, what: str) -> None: ...

    def done(self, tokens: int, measured: bool) -> None:
        self.measured += measured
        self.found += not measured


class Starts:
    """A text is right if its first word has an even number."""

    name, metric = "even", "accuracy"

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts

    def examples(self, limit: int | None) -> list[Example]:
        return [Example(str(i), text) for i, text in enumerate(self._prompts)][:limit]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [float(text.split()[0].removeprefix("w") in map(str, range(0, 120, 2))) for text in texts]


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


@torch.no_grad()
def by_hand(model: Any, prompt: Sequence[int], path: HeadPath, tokens: int) -> list[int]:
    """y = argmax W (h * m / (1 - p)), one token after the other, each with the whole sequence in one forward."""
    weight = model.get_output_embeddings().weight.double().numpy()
    ids = list(prompt)
    for _ in range(tokens):
        hidden = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        h = hidden.double().numpy()
        mask = reference.mask(path.seed, len(ids), path.head, len(h), path.dropout)
        logits = weight @ (h * mask / (1.0 - path.dropout))
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 1e-4, "rounding could turn this"
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])  # the last two have sliding windows
def test_a_head_s_text_is_that_of_the_equations(tiny: Any, family: str) -> None:
    engine = Engine(tiny.pair(family)[0], tiny.word_tokenizer())
    prompt = tiny.prompt(3, 9).tolist()
    paths = [
        NO_DROPOUT,
        *(HeadPath(p, head, seed) for p, seed in ((0.1, 0), (0.4, 7)) for head in (0, 2)),
    ]
    outputs = decode_paths(engine, Example("1", words(prompt)), paths, 12)
    assert len({output.text for output in outputs}) > 3
    for path, output in zip(paths, outputs, strict=True):
        ids = by_hand(engine.model, prompt, path, 12)
        if tiny.EOS in ids:
            ids = ids[: ids.index(tiny.EOS) + 1]
        assert output.tokens == len(ids), path
        assert output.text == words(i for i in ids if i > 2), path
        assert output.finish == ("stop" if tiny.EOS in ids else "length")


def test_without_dropout_it_is_plain_greedy_decoding(tiny: Any) -> None:
    engine = tiny.engine()
    for seed in range(4):
        prompt = tiny.prompt(seed)
        outputs = decode_paths(engine, Example("1", words(prompt.tolist())), all_paths([0.0], 5, [0]), 30)
        assert len(outputs) == 1
        result = engine.generate(words(prompt.tolist()), draft_length=0, max_tokens=30)
        assert (outputs[0].text, outputs[0].tokens) == (result.text, len(result.token_ids))
        plain = tiny.plain_generate(engine.model, prompt, 30)
        assert result.token_ids == plain


def test_a_path_does_not_depend_on_those_beside_it(tiny: Any) -> None:
    engine = tiny.engine()
    example = Example("1", words(tiny.prompt(5).tolist()))
    paths = all_paths([0.1, 0.5], 3, [0, 1])
    assert len(paths) == 13
    together = decode_paths(engine, example, paths, 25)
    alone = [decode_paths(engine, example, [path], 25)[0] for path in paths]
    assert together == alone


def test_paths_end_each_where_its_text_ends(tiny: Any) -> None:
    engine = tiny.engine()
    prompt = tiny.prompt(6).tolist()
    paths = all_paths([0.4], 4, [0])
    said = [by_hand(engine.model, prompt, path, 20) for path in paths]
    stop = tuple(words([next(i for i in ids[2:] if i > 2)]) for ids in said[:2])
    ended = decode_paths(engine, Example("1", words(prompt), stop=stop), paths, 20)
    for ids, output in zip(said, ended, strict=True):
        length = next((n for n in range(1, 20) if any(text in words(ids[:n]) for text in stop)), 20)
        text = words(i for i in ids[:length] if i > 2)
        assert output.tokens == length
        assert output.text == min((text.split(end)[0] for end in stop), key=len)
        assert output.finish == ("stop" if any(end in text for end in stop) else "length")
    assert len({output.tokens for output in ended}) > 1
    assert [o.tokens for o in decode_paths(engine, Example("1", words(prompt), max_tokens=4), paths, 20)] == [4] * 5
    with pytest.raises(SettingError, match="the target model's context is 512"):
        decode_paths(engine, Example("1", words(prompt)), paths, 510)


@pytest.fixture
def task(tiny: Any) -> Starts:
    return Starts([words(tiny.prompt(seed).tolist()) for seed in range(6)])


def decoded(engine: Engine, task: Starts, file: Path | None, dropouts: list[float], together: int = 32) -> Any:
    texts, progress = Texts(file, {"target": "tiny", "max_tokens": 8}), Quiet()
    decode_all(engine, task.examples(None), all_paths(dropouts, 3, [0, 4]), 8, texts, progress, together)
    return texts, progress


def test_scores_are_those_of_each_head(tiny: Any, task: Starts) -> None:
    engine, examples = tiny.engine(), task.examples(None)
    texts, _ = decoded(engine, task, None, [0.0, 0.3, 0.5], together=5)
    progress = Quiet()
    found = score_heads(task, examples, texts, [0.0, 0.3, 0.5], 3, [0, 4], progress)
    assert progress.measured == 13 == len(all_paths([0.0, 0.3, 0.5], 3, [0, 4]))

    def share(path: HeadPath) -> float:
        said = [decode_paths(engine, example, [path], 8)[0].text for example in examples]
        return float(np.mean(task.score(examples, said)))

    plain = share(NO_DROPOUT)
    assert found["no_dropout"]["score"]["value"] == pytest.approx(plain)
    assert found["draft"] is None
    for row in found["rows"]:
        values = []
        for head, column in enumerate(row["heads"]):
            expected = [share(HeadPath(row["dropout"], head, seed)) for seed in (0, 4)]
            assert column["score"] == pytest.approx(
                {"value": np.mean(expected), "low": min(expected), "high": max(expected)}
            )
            run = column["seeds"]["4"]
            assert run["against_no_dropout"]["difference"]["value"] == pytest.approx(expected[1] - plain)
            values += expected
        assert row["score"]["value"] == pytest.approx(np.mean(values))
        if row["dropout"] == 0.0:
            assert {run["same_text"] for column in row["heads"] for run in column["seeds"].values()} == {6}
    json.dumps(found)


def test_the_table_has_the_paper_s_rows_beside_its_own(tiny: Any, task: Starts) -> None:
    texts, _ = decoded(tiny.engine(), task, None, [0.3])
    examples = task.examples(None)
    found = score_heads(task, examples, texts, [0.3], 3, [0, 4], Quiet(), draft=texts)
    sheet = heads_sheet(found, "even", 2)
    assert all(len(row) == len(sheet.headings) == 7 for row in sheet.rows)
    labels = [row[0] for row in sheet.rows]
    assert labels[:3] == ["p=0.3", "no dropout", "draft alone"]
    assert ("paper, p=0.3", "78.7", "81.1", "75.6", "77.4", "79.9", "78.5") in sheet.rows
    assert sheet.rows[-2:] == [("paper, no dropout", *[""] * 5, "81.7"), ("paper, draft alone", *[""] * 5, "72.6")]
    assert any("2 mask seeds" in note for note in sheet.notes)


def test_a_task_without_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5"}\n')
    with pytest.raises(SettingError, match=r"no right answers.*choose a scored task"):
        check_task(Prompts(tmp_path / "prompts.jsonl"))


def test_texts_that_are_there_are_not_decoded_again(tiny: Any, task: Starts, tmp_path: Path) -> None:
    engine, file = tiny.engine(), tmp_path / "texts.jsonl"
    first, progress = decoded(engine, task, file, [0.3])
    assert (progress.measured, progress.found) == (6, 0)
    lines = file.read_text().split("\n")
    assert len(lines) == 1 + 6 * 7 + 1
    file.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:20])  # two are lost, one of them half written
    again, progress = decoded(engine, task, file, [0.3])
    assert (progress.measured, progress.found) == (1, 5)
    for example in task.examples(None):
        for path in all_paths([0.3], 3, [0, 4]):
            assert again.of(example, path) == first.of(example, path)
    wider, progress = decoded(engine, task, file, [0.3, 0.5])
    assert progress.measured == 6
    assert len(file.read_text().split("\n")) == 1 + 6 * 13 + 1
    assert ("0", HeadPath(0.5, 2, 4)) in wider


def test_texts_of_examples_that_changed_are_refused(tiny: Any, task: Starts, tmp_path: Path) -> None:
    engine, file = tiny.engine(), tmp_path / "texts.jsonl"
    decoded(engine, task, file, [0.3])
    kept = file.read_bytes()
    prompts = [example.prompt for example in task.examples(None)]
    other = Starts([*prompts[:2], f"{prompts[2]} w9", *prompts[3:]])
    with pytest.raises(SettingError, match=r"texts.jsonl holds texts of example 2 for another prompt.*another --texts"):
        decoded(engine, other, file, [0.3, 0.5])
    assert file.read_bytes() == kept


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    Texts(file, {"target": "tiny", "max_tokens": 9})
    assert not file.exists()  # a run that fails before its first text binds no later one
    Texts(file, {"target": "tiny", "max_tokens": 8}).add(Example("1", "w5"), NO_DROPOUT, Output("w6", 1, "stop"))
    assert ("1", NO_DROPOUT) in Texts(file, {"target": "tiny", "max_tokens": 8})
    with pytest.raises(SettingError, match="holds texts with max_tokens=8, and now it is 9: give another --texts"):
        Texts(file, {"target": "tiny", "max_tokens": 9})
    for content in ("hello", '{"target": "tiny", "max_tokens": 8}\n[1]\n', "[3]\n"):
        file.write_text(content)
        with pytest.raises(SettingError, match="is no file of texts"):
            Texts(file, {"target": "tiny", "max_tokens": 8})
    file.write_text('{"target": "tiny", "max_tokens": 8}\n{"id"\n{"id": "1"}\n')
    with pytest.raises(SettingError, match="line 2 is damaged"):
        Texts(file, {"target": "tiny", "max_tokens": 8})


def test_a_text_is_scored_once(tiny: Any, task: Starts, tmp_path: Path) -> None:
    class Counting(Starts):
        def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
            asked.extend((example.id, text) for example, text in zip(examples, texts, strict=True))
            return super().score(examples, texts)

    asked, file = list[tuple[str, str]](), tmp_path / "scores.jsonl"
    texts, _ = decoded(tiny.engine(), task, None, [0.1])
    counting, examples = Counting(task._prompts), task.examples(None)
    free = score_heads(task, examples, texts, [0.1], 3, [0, 4], Quiet())
    first = score_heads(counting, examples, texts, [0.1], 3, [0, 4], Quiet(), scores=Numbers(file))
    said = {(e.id, texts.of(e, path).text) for e in examples for path in all_paths([0.1], 3, [0, 4])}
    assert len(asked) == len(set(asked)) == len(said) < 6 * 7
    assert set(asked) == said
    file.write_bytes(file.read_bytes()[:-5])  # one is lost
    again = score_heads(counting, examples, texts, [0.1], 3, [0, 4], Quiet(), scores=Numbers(file))
    assert len(asked) == len(said) + 1
    assert free == first == again
    other = [replace(example, data={"answer": "another"}) for example in examples]
    score_heads(counting, other, texts, [0.1], 3, [0, 4], Quiet(), scores=Numbers(file))
    assert len(asked) == 2 * len(said) + 1
    file.write_text('{"of": 3}\n')
    with pytest.raises(SettingError, match="is no file of numbers"):
        Numbers(file)


def test_the_paper_s_numbers_are_whole() -> None:
    assert all(len(row) == published.HEADS for row in published.HEAD_SCORES.values())
    assert sum(ratio for ratio, _ in published.MAJORITY.values()) == pytest.approx(99.9)
    for pair in published.SPECULATIVE.values():
        assert set(pair) == {(method, length) for method in ("SD", "SD+DM") for length in (5, 10)}
        assert {task for row in pair.values() for task in row} == {"gsm8k", "mmlu", "ifeval", "humaneval"}
        assert all(row[0] == 1.0 for row in pair["SD", 5].values())
    json.dumps(published.for_json())


@pytest.mark.parametrize(
    ("name", "task"),
    [
        *((task, task) for task in ("gsm8k", "mmlu", "ifeval", "humaneval")),
        ("gsm8k_cot", "gsm8k"),
        ("gsm8k_cot_zeroshot", "gsm8k"),
        ("mmlu_generative", "mmlu"),
        ("leaderboard_ifeval", "ifeval"),
        *((name, None) for name in ("mmlu_pro", "mmlu_anatomy_generative", "cmmlu", "global_mmlu_de", "mmlu_redux")),
        *((name, None) for name in ("gsm8k_platinum_cot", "ifeval_es", "humaneval_plus", "humaneval_infilling")),
        ("data/gsm8k.jsonl", None),
        ("chat/vicuna80", None),
    ],
)
def test_the_paper_s_numbers_stand_beside_its_own_tasks_only(name: str, task: str | None) -> None:
    assert published.task_of(name) == task
