"""Tasks of lm-evaluation-harness: prompts and scores are the harness's own, from data in files."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness_support import (
    QUESTIONS,
    chat_tokenizer,
    gsm8k_rows,
    harness_run,
    harness_task,
    ifeval_rows,
    mmlu_rows,
    replayer,
    templated,
    write,
)

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra: eval)")

from dropmatch.errors import SettingError
from dropmatch.evaluation import harness_library
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.worker import tasks_of
from dropmatch.evaluation.tasks.harness import HarnessTask

GSM8K_DOCS = [{"question": question, "answer": answer} for question, answer, _ in QUESTIONS]
SHOTS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 9)]
PREFIXED = """
task: prefixed
dataset_path: json
test_split: test
output_type: generate_until
description: "Be brief.\\n\\n"
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
gen_prefix: "The answer is"
generation_kwargs: {until: ["\\n"], max_gen_toks: 7, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    return write(tmp_path / "gsm8k.jsonl", gsm8k_rows())


@pytest.fixture
def without_punkt(monkeypatch: pytest.MonkeyPatch) -> None:
    """ifeval where no text's sentences are counted."""
    monkeypatch.setattr("dropmatch.evaluation.tasks.harness_configs.need_punkt", lambda: None)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", ["gsm8k_cot", "gsm8k", "ifeval"])
def test_prompts_and_stops_are_those_of_the_harness(
    tiny: Any, tmp_path: Path, without_punkt: None, name: str, chat: bool
) -> None:
    tokenizer = chat_tokenizer(tiny)
    rows = ifeval_rows() if name == "ifeval" else gsm8k_rows()
    docs = [{**row["meta"], "prompt": row["prompt"]} for row in rows] if name == "ifeval" else GSM8K_DOCS
    shots = SHOTS if name == "gsm8k" else None
    model = replayer(lambda request: "", tokenizer)
    harness_run(model, [harness_task(name, docs, tmp_path, shots)], apply_chat_template=chat, fewshot_as_multiturn=chat)

    given = {"fewshot_data": write(tmp_path / "train.jsonl", SHOTS)} if shots else {}
    task = HarnessTask(name, write(tmp_path / "rows.jsonl", rows), chat, **given)
    examples = task.examples(None)
    prompts = [templated(tokenizer, e.prompt) if chat else e.prompt for e in examples]
    assert prompts == [request.args[0] for request in model.requests]
    assert [list(example.stop) for example in examples] == [request.args[1]["until"] for request in model.requests]
    assert examples[0].max_tokens == (1280 if name == "ifeval" else None)


def test_a_prefix_of_the_answer_is_continued(tiny: Any, tmp_path: Path) -> None:
    from dropmatch import Engine

    tokenizer = chat_tokenizer(tiny)
    own = tmp_path / "prefixed.yaml"
    data = write(tmp_path / "data.jsonl", GSM8K_DOCS)
    own.write_text(PREFIXED + f"dataset_kwargs: {{data_files: {{test: '{data}'}}, cache_dir: '{tmp_path}'}}\n")
    model = replayer(lambda request: "7", tokenizer)
    harness_run(model, [str(own)], apply_chat_template=True)

    task = HarnessTask(str(own))
    examples = task.examples(None)
    assert (task.name, task.metric) == ("prefixed", "exact_match")
    assert [message["role"] for message in examples[0].prompt] == ["system", "user", "assistant"]
    assert (examples[0].stop, examples[0].max_tokens) == (("\n",), 7)
    expected = [request.args[0] for request in model.requests]
    assert expected[0].endswith("<assistant>The answer is")
    engine = Engine(tiny.build_model("llama", vocab_size=len(tokenizer)), tokenizer)
    assert [tokenizer.decode(engine.encode(example.prompt)) for example in examples] == expected


@pytest.mark.parametrize("filter_name", ["flexible-extract", "strict-match"])
def test_scores_are_those_of_the_harness(tmp_path: Path, gsm8k: Path, filter_name: str) -> None:
    texts = ["The answer is 7.", "I think 2,000", "The answer is 10 or 11"]
    found = harness_run(
        replayer(lambda request: texts[request.doc_id]), [harness_task("gsm8k_cot", GSM8K_DOCS, tmp_path)]
    )
    task = HarnessTask("gsm8k_cot", gsm8k, filter_name=filter_name)
    scores = task.score(task.examples(None), texts)
    assert scores == ([1.0, 1.0, 0.0] if filter_name == "flexible-extract" else [1.0, 0.0, 1.0])
    assert sum(scores) / 3 == pytest.approx(found["results"]["gsm8k_cot"][f"exact_match,{filter_name}"])
    assert task.metric == f"exact_match,{filter_name}"


def test_instructions_are_checked_as_the_harness_does(tmp_path: Path, without_punkt: None) -> None:
    texts = ["Hello there, friend", "THE SEA"]
    docs = [{**row["meta"], "prompt": row["prompt"]} for row in ifeval_rows()]
    found = harness_run(replayer(lambda request: texts[request.doc_id]), [harness_task("ifeval", docs, tmp_path)])
    task = HarnessTask("ifeval", write(tmp_path / "rows.jsonl", ifeval_rows()))
    examples = task.examples(None)
    assert task.metric == "prompt_level_strict_acc"
    assert task.score(examples, texts) == [0.0, 1.0]
    assert found["results"]["ifeval"]["prompt_level_strict_acc,none"] == 0.5
    # by example, whatever the order and however many
    assert task.score(examples[1:], texts[1:]) == [1.0]


def test_a_group_is_its_tasks_in_turn(tmp_path: Path) -> None:
    data = write(tmp_path / "mmlu.jsonl", mmlu_rows())
    task = HarnessTask("mmlu_generative", data)
    examples = task.examples(None)
    assert task.metric == "exact_match,get_response"
    assert [example.id for example in examples] == ["m0", "m2", "m3", "m1"]
    assert [example.data["task"] for example in examples[:2]] == [
        "mmlu_anatomy_generative",
        "mmlu_astronomy_generative",
    ]
    assert examples[0].prompt[0]["role"] == "system"
    assert "B. two" in examples[0].prompt[1]["content"]
    assert task.examples(2) == examples[:2]
    assert task.score(examples, ["B", "A", "A", "D\nmore"]) == [1.0, 1.0, 0.0, 1.0]


def test_a_task_of_a_group_takes_its_rows(tmp_path: Path) -> None:
    data = write(tmp_path / "mmlu.jsonl", mmlu_rows())
    task = HarnessTask("mmlu_anatomy_generative", data, chat=False)
    examples = task.examples(None)
    assert [example.id for example in examples] == ["m0", "m1"]
    docs = [{"question": r["prompt"], "subject": "anatomy", **r["meta"], "answer": r["meta"]["answer_index"]}
            for r in mmlu_rows()[:2]]  # fmt: skip
    model = replayer(lambda request: "B")
    own = harness_task("mmlu_anatomy_generative", docs, tmp_path)
    found = harness_run(model, [own])
    assert [example.prompt for example in examples] == [request.args[0] for request in model.requests]
    assert found["results"]["mmlu_anatomy_generative"]["exact_match,get_response"] == 0.5
    assert task.score(examples, ["B", "B"]) == [1.0, 0.0]


def test_rows_may_have_the_fields_of_the_task(tmp_path: Path, gsm8k: Path) -> None:
    ours = HarnessTask("gsm8k_cot", gsm8k).examples(None)
    theirs = HarnessTask("gsm8k_cot", write(tmp_path / "own.jsonl", GSM8K_DOCS)).examples(None)
    assert [e.prompt for e in ours] == [e.prompt for e in theirs]
    assert [e.id for e in ours] == ["q0", "q1", "q2"]
    assert [e.id for e in theirs] == ["gsm8k_cot-0", "gsm8k_cot-1", "gsm8k_cot-2"]


def test_the_first_examples_are_the_same_however_many(tmp_path: Path, gsm8k: Path) -> None:
    task = HarnessTask("gsm8k", gsm8k, fewshot_data=write(tmp_path / "train.jsonl", SHOTS))
    examples = task.examples(None)
    assert len(examples) == 3
    assert task.examples(2) == examples[:2]
    assert HarnessTask("gsm8k", gsm8k, fewshot_data=tmp_path / "train.jsonl").examples(1) == examples[:1]
    assert examples[0].prompt[:-1] != examples[1].prompt[:-1]  # few-shots are drawn anew for each


def test_without_few_shots_when_asked(gsm8k: Path) -> None:
    (first, *_) = HarnessTask("gsm8k", gsm8k, num_fewshot=0).examples(1)
    assert [message["role"] for message in first.prompt] == ["user"]


def test_a_plan_says_where_few_shots_come_from(tmp_path: Path, gsm8k: Path) -> None:
    shots = write(tmp_path / "train.jsonl", SHOTS)
    (tmp_path / "plan.yaml").write_text(
        f"target: big\ntasks: [{{name: gsm8k, data: '{gsm8k}', fewshot_data: '{shots}', num_fewshot: 2}}]\n"
    )
    (task,) = tasks_of(Plan.from_values(Plan.read(tmp_path / "plan.yaml")))
    examples = task.examples(None)
    assert [message["role"] for message in examples[0].prompt] == ["user", "assistant"] * 2 + ["user"]
    assert examples[0].prompt[0]["content"].startswith("Question: What is ")
    assert examples == HarnessTask("gsm8k", gsm8k, num_fewshot=2, fewshot_data=shots).examples(None)


def test_a_plan_says_how_texts_are_scored(gsm8k: Path) -> None:
    values = {"name": "gsm8k_cot", "data": str(gsm8k), "filter": "strict-match", "metric": "exact_match"}
    (task,) = tasks_of(Plan.from_values({"target": "big", "tasks": [values]}))
    assert task.metric == "exact_match,strict-match"


REFUSALS = {
    "unknown": (("gsm8k_cott", {}), "no task 'gsm8k_cott'; did you mean gsm8k_cot"),
    "multiple choice": (("mmlu", {}), r"multiple_choice.*mmlu_generative"),
    "one of them": (("mmlu_anatomy", {}), r"mmlu_anatomy is.*use mmlu_anatomy_generative"),
    "perplexity": (("wikitext", {}), "loglikelihood_rolling"),
    "repeats": (("gsm8k_cot_self_consistency", {}), "64 random texts"),
    "sampling": (("global_piqa_nonparallel_generation_acm_arab", {}), "random texts"),
    "programs": (("humaneval", {}), "allow it with dropmatch bench --unsafe-code, or by unsafe_code: true"),
    "metric": (("gsm8k_cot", {"metric": "bleu"}), "no metric 'bleu'; there are exact_match"),
    "filter": (("gsm8k_cot", {"filter_name": "none"}), "no filter 'none'; there are strict-match, flexible-extract"),
    "few-shots of the hub": (("gsm8k", {"fewshot_data": "x.jsonl"}), "fewshot_data goes with data"),
    "few-shots of its own": (
        ("gsm8k_cot", {"data": "x.jsonl", "fewshot_data": "y.jsonl"}),
        "gsm8k_cot carries its few-shots.*leave fewshot_data out",
    ),
    "few-shots, but none": (
        ("mmlu_generative", {"data": "x.jsonl", "fewshot_data": "y.jsonl"}),
        "mmlu_generative has no few-shots here: say how many",
    ),
    "a task without few-shots": (
        ("gsm8k_cot_zeroshot", {"num_fewshot": 2}),
        "gsm8k_cot_zeroshot is one without few-shots: leave num_fewshot out",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_use(case: str) -> None:
    (name, options), message = REFUSALS[case]
    with pytest.raises(SettingError, match=message):
        HarnessTask(name, **options)


ROWS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "answer missing": ("gsm8k_cot", [{"id": "a", "task": "x", "prompt": "How many?", "meta": {}}], "line 1.*'answer'"),
    "null answer": (
        "gsm8k_cot",
        [{"question": "How many?", "answer": "1"}, {"question": "Why?", "answer": None}],
        "line 2.*'answer' must be a non-empty str, got None",
    ),
    "field missing later": (
        "gsm8k_cot",
        [{"question": "How many?", "answer": "1"}, {"question": "Why?"}],
        "line 2: the field 'answer' is missing",
    ),
    "letter": ("mmlu_anatomy_generative", [{"question": "Q", "choices": ["a"] * 4, "answer": "E"}], "line 1.*A to D"),
    "choices": ("mmlu_anatomy_generative", [{"question": "Q", "answer": "A"}], "line 1.*'choices'"),
    "subject": ("mmlu_generative", [{"question": "Q", "choices": ["a"] * 4, "answer": "A"}], "line 1.*'subject'"),
    "other subject": (
        "mmlu_anatomy_generative",
        [{"question": "Q", "choices": ["a"] * 4, "answer": "A", "subject": "law"}],
        "no row is of the task",
    ),
    "subject of no task": (
        "mmlu_generative",
        [
            {"question": "Q", "choices": ["a"] * 4, "answer": "A", "subject": subject}
            for subject in ("anatomy", "astrology")
        ],
        "line 2: no task here is of the subject 'astrology'.*there are abstract_algebra, anatomy, ",
    ),
    "kwargs": (
        "ifeval",
        [{"key": 1, "prompt": "Q", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}],
        "line 1.*of one length",
    ),
    "types": (
        "gsm8k_cot",
        [{"question": "Q", "answer": "1", "more": [1]}, {"question": "Q", "answer": "1", "more": "x"}],
        "rows do not fit together",
    ),
    "few-shots": (
        "gsm8k",
        [{"question": "Q", "answer": "1"}],
        "split 'train'.*plan file.*fewshot_data: FILE.*num_fewshot: 0.*gsm8k_cot",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_will_not_do(tmp_path: Path, without_punkt: None, case: str) -> None:
    name, rows, message = ROWS[case]
    task = HarnessTask(name, write(tmp_path / "rows.jsonl", rows))
    with pytest.raises(SettingError, match=message):
        task.examples(None)


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SettingError, match="is empty"):
        HarnessTask("gsm8k_cot", tmp_path / "empty.jsonl").examples(None)
    (tmp_path / "broken.jsonl").write_text('{"question": \n')
    with pytest.raises(SettingError, match="line 1: no valid JSON"):
        HarnessTask("gsm8k_cot", tmp_path / "broken.jsonl").examples(None)
    with pytest.raises(SettingError, match="cannot read"):
        HarnessTask("gsm8k_cot", tmp_path / "none.jsonl").examples(None)


def test_a_task_that_keeps_no_example_is_named(tmp_path: Path) -> None:
    data, own = write(tmp_path / "data.jsonl", GSM8K_DOCS), tmp_path / "empty.yaml"
    (tmp_path / "nothing.py").write_text("def keep(docs):\n    return docs.select([])\n")
    own.write_text(
        PREFIXED.replace("prefixed", "empty")
        + "process_docs: !function nothing.keep\n"
        + f"dataset_kwargs: {{data_files: {{test: '{data}'}}, cache_dir: '{tmp_path}'}}\n"
    )
    with pytest.raises(SettingError, match="the task empty has no examples: the split 'test' of its data set json is"):
        HarnessTask(str(own)).examples(None)
    with pytest.raises(SettingError, match=r"the task empty has no examples: .* no row of .*data\.jsonl"):
        HarnessTask(str(own), data).examples(None)
    task = HarnessTask(str(own))  # and one that the harness makes all the same
    with pytest.raises(SettingError, match="the task empty has no examples"):
        task._try(task._configs[0], SimpleNamespace(task_docs=[]))


def test_a_file_may_be_packed(gsm8k: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(gsm8k.read_bytes()))
    assert HarnessTask("gsm8k_cot", packed).examples(None) == HarnessTask("gsm8k_cot", gsm8k).examples(None)
    packed.write_bytes(gzip.compress(b'{"question": "How many?", "answer": "1"}\n\n{"question": "Why?"}\n'))
    with pytest.raises(SettingError, match=r"packed.jsonl.gz, line 3: the field 'answer' is missing"):
        HarnessTask("gsm8k_cot", packed).examples(None)


def test_a_hub_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for where in ("harness_library", "tasks.harness"):
        monkeypatch.setattr(f"dropmatch.evaluation.{where}.hub_answers", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    task = HarnessTask("gsm8k_cot")
    with pytest.raises(SettingError, match=r"openai/gsm8k .*does not answer.*--task TASK=FILE"):
        task.examples(1)


def test_instructions_need_a_file_of_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    def missing(*args: Any) -> None:
        raise LookupError

    monkeypatch.setattr(nltk.data, "find", missing)
    monkeypatch.setattr(nltk, "download", lambda *args, **options: False)
    with pytest.raises(SettingError, match=r"punkt_tab.*NLTK_DATA.*llama-index-core"):
        HarnessTask("ifeval")


def test_a_missing_harness_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.models", None)
    with pytest.raises(SettingError, match=r"pip install 'dropmatch\[eval\]'"):
        harness_library.require()


def test_scores_outside_of_0_to_1_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "words.yaml"
    data = write(tmp_path / "data.jsonl", GSM8K_DOCS)
    own.write_text(
        PREFIXED.replace("prefixed", "words").replace("exact_match, aggregation: mean", "bleu, aggregation: bleu")
        + f"dataset_kwargs: {{data_files: {{test: '{data}'}}, cache_dir: '{tmp_path}'}}\n"
    )
    with pytest.raises(SettingError, match="bleu of the task words is no score"):
        HarnessTask(str(own)).examples(1)
