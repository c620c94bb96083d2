"""Tasks by name."""

from __future__ import annotations

from pathlib import Path

from dropmatch.errors import SettingError
from dropmatch.evaluation.tasks.base import Task
from dropmatch.evaluation.tasks.prompts import Prompts, where_to_find

HUMANEVAL = {"humaneval": False, "humaneval_plus": True}  # whether with EvalPlus's more tests


def choose_task(
    name: str,
    data: str | None = None,
    chat: bool = True,
    fewshot_data: str | None = None,
    num_fewshot: int | None = None,
    turns: int | None = None,
    metric: str | None = None,
    filter_name: str | None = None,
    unsafe_code: bool = False,
) -> Task:
    """A task from its name: humaneval, humaneval_plus, a generative task of lm-evaluation-harness, a file of prompts.

    Args:
        name: how the user calls it.
        data: a JSONL file to take its examples from, where they shall not come from the hub.
        chat: prompts are chat messages; else texts to be continued, for models without a chat template.
        fewshot_data: of the harness's tasks, a JSONL file to draw few-shots from; it goes with data.
        num_fewshot: of the harness's tasks, how many few-shots; None is the task's own number.
        turns: of a file of prompts, at most so many turns of each conversation; other tasks have none.
        metric, filter_name: of the harness's tasks, by which a text is scored; None is the task's first.
        unsafe_code: allow tasks of the harness that run the texts as programs.

    Raises:
        SettingError: there is none of that name, its harness is not installed, or a setting has no meaning for it.
    """

    def refuse(what: str) -> None:
        for text, why, value in (
            ("fewshot_data", "there are no few-shots", fewshot_data),
            ("num_fewshot", "there are no few-shots", num_fewshot),
            ("metric", "there is nothing to choose", metric),
            ("filter", "there is nothing to choose", filter_name),
        ):
            if value is not None:
                raise SettingError(f"{text} has no meaning for {what}: {why}, leave it out")

    if name.endswith((".jsonl", ".json")):
        if data is not None:
            raise SettingError(f"{name} is a file of prompts already: leave its data out")
        refuse(f"{name}, a file of prompts")
        return Prompts(Path(name), chat, turns=turns)
    if name in HUMANEVAL:
        refuse(f"the task {name}, whose prompts and score are EvalPlus's")
        from dropmatch.evaluation.tasks.humaneval import HumanEval

        return HumanEval(HUMANEVAL[name], None if data is None else Path(data), chat=chat)
    if known := where_to_find(name):
        raise SettingError(known)
    from dropmatch.evaluation.tasks.harness import HarnessTask

    return HarnessTask(
        name,
        data,
        chat,
        metric=metric,
        filter_name=filter_name,
        num_fewshot=num_fewshot,
        fewshot_data=fewshot_data,
        unsafe_code=unsafe_code,
    )
