"""What the tests of the harness share: small data files, and models of the harness that repeat given texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = [
    ("Tom has 3 apples and buys 4 more. How many has he?", "He has 3 + 4 = <<3+4=7>>7 apples.\n#### 7", "7"),
    ("A box holds 1,000 pins. How many hold 2 boxes?", "2 * 1,000 = 2,000 pins.\n#### 2,000", "2000"),
    ("Ann is 5 and Bob twice as old. How old is Bob?", "5 * 2 = 10.\n#### 10", "10"),
]
CHOICES = [
    ("anatomy", "How many kidneys are usual?", ["one", "two", "three", "four"], "B"),
    ("anatomy", "What pumps the blood?", ["lungs", "liver", "skin", "heart"], "D"),
    ("astronomy", "What is nearest to Earth?", ["the Moon", "Mars", "the Sun", "Venus"], "A"),
    ("world_religions", "How many days is Lent?", ["20", "30", "40", "50"], "C"),
]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows() -> list[dict[str, Any]]:
    """Rows of our fields."""
    return [
        {"id": f"q{i}", "task": "gsm8k", "prompt": question, "answer": answer, "meta": {"final": final}}
        for i, (question, answer, final) in enumerate(QUESTIONS)
    ]


def mmlu_rows() -> list[dict[str, Any]]:
    """Likewise."""
    return [
        {
            "id": f"m{i}",
            "task": "mmlu",
            "prompt": question,
            "answer": letter,
            "meta": {"subject": subject, "choices": choices, "answer_index": "ABCD".index(letter)},
        }
        for i, (subject, question, choices, letter) in enumerate(CHOICES)
    ]


def ifeval_rows() -> list[dict[str, Any]]:
    """Likewise; none of the instructions counts sentences."""
    asked = [
        ("Say hello without commas.", ["punctuation:no_comma"], [{}]),
        (
            "Shout, and name the sea.",
            ["change_case:english_capital", "keywords:existence"],
            [{}, {"keywords": ["sea"]}],
        ),
    ]
    return [
        {
            "id": f"i{key}",
            "task": "ifeval",
            "prompt": prompt,
            "answer": None,
            "meta": {"key": key, "instruction_id_list": instructions, "kwargs": arguments},
        }
        for key, (prompt, instructions, arguments) in enumerate(asked)
    ]


def chat_tokenizer(tiny: Any) -> Any:
    """Bytes, with a chat template."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def replayer(answer: Callable[[Any], str], tokenizer: Any = None) -> Any:
    """A model of the harness that answers by a function of the request, and keeps the requests."""
    from lm_eval.api.model import LM

    class Replayer(LM):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[Any] = []

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            self.requests += requests
            return [answer(request) for request in requests]

        def loglikelihood(self, requests: list[Any]) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> Any:
            raise NotImplementedError

        tokenizer_name = "replayer"

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return templated(tokenizer, chat_history, add_generation_prompt)

    return Replayer()


def templated(tokenizer: Any, messages: list[dict[str, str]], generation_prompt: bool = True) -> str:
    """Messages through the chat template, as the harness asks for it."""
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        continue_final_message=not generation_prompt,
    )


def harness_task(name: str, docs: Sequence[Mapping[str, Any]], folder: Path, shots: Any = None) -> Any:
    """A task of the harness on docs in its own fields, made by the harness alone."""
    from lm_eval.tasks._factory import TaskFactory

    from dropmatch.evaluation.tasks.harness_configs import task_manager

    index = task_manager().task_index
    config = index[name].cfg
    names = {config.get(each) for each in ("training_split", "validation_split", "test_split", "fewshot_split")}
    files = {split: str(write(folder / f"{name}-{split}.jsonl", docs)) for split in names - {None}}
    if shots is not None:
        files[config["fewshot_split"]] = str(write(folder / f"{name}-shots.jsonl", shots))
    overrides = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
    }
    return TaskFactory().build(index[name], overrides=overrides, registry=index)


def harness_run(model: Any, tasks: list[Any], **options: Any) -> dict[str, Any]:
    """The harness's own evaluation."""
    from lm_eval import simple_evaluate

    from dropmatch.evaluation.tasks.harness_configs import task_manager

    found = simple_evaluate(model=model, tasks=tasks, task_manager=task_manager(), bootstrap_iters=0, **options)
    assert found is not None
    return found
