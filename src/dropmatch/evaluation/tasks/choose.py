"""Tasks by name."""

from __future__ import annotations

from pathlib import Path

from dropmatch.errors import SettingError
from dropmatch.evaluation.tasks.base import Task
from dropmatch.evaluation.tasks.prompts import Prompts

HUMANEVAL = {"humaneval": False, "humaneval_plus": True}  # whether with EvalPlus's more tests


def choose_task(name: str, data: str | None = None, chat: bool = True) -> Task:
    """A task from its name: humaneval, humaneval_plus, a generative task of lm-evaluation-harness, a file of prompts.

    Args:
        name: how the user calls it.
        data: a JSONL file to take its examples from, where they shall not come from the hub.
        chat: prompts are chat messages; else texts to be continued, for models without a chat template.

    Raises:
        SettingError: there is none of that name, or its harness is not installed.
    """
    if name.endswith((".jsonl", ".json")):
        if data is not None:
            raise SettingError(f"{name} is a file of prompts already: leave its data out")
        return Prompts(Path(name), chat)
    if name in HUMANEVAL:
        from dropmatch.evaluation.tasks.humaneval import HumanEval

        return HumanEval(HUMANEVAL[name], None if data is None else Path(data), chat=chat)
    from dropmatch.evaluation.tasks.harness import HarnessTask

    return HarnessTask(name, data, chat)
