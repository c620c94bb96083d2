"""HumanEval and HumanEval+ as tasks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dropmatch.errors import SettingError
from dropmatch.evaluation.tasks.base import Example, Prompt, user_message
from dropmatch.evaluation.tasks.humaneval.judging import Judge, Limits
from dropmatch.evaluation.tasks.humaneval.problems import read_problems

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
STOP = ("\nif __name__", "\ndef main(", "\nprint(")
STOP_OF_ANSWER = ("\n```\n\n",)
STOP_OF_COMPLETION = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
MAX_TOKENS = 768
WORKERS = 2


class HumanEval:
    """Python functions to write from their docstrings, judged by tests (pass@1 of one text a problem).

    Prompts are those that EvalPlus sends to chat models through an API. To local models it also gives the beginning
    of the answer ("Below is a Python script ... ```python"), which a chat message cannot carry: the model begins its
    own answer here. So stop strings differ in one: EvalPlus ends a local model's answer at a line that only closes
    the code block, and here it must be followed by an empty line, as the same line may open the block. The end
    tokens that EvalPlus lists as strings are left to the model's own. No system message is sent. Without chat the
    model completes the problem's own text, as EvalPlus has base models do.

    Answers are sanitised and checked by EvalPlus, each input within the time that `Limits` gives. Its checker at
    0.3.1 fails every solution of HumanEval/32: it counts the inputs that it has checked, and leaves out those of the
    problem whose answers it judges by a rule of their own, then finds inputs missing. Here the checker's verdict on
    the last input decides, which comes to the same for all other problems. `judging` says what is contained.

    Args:
        plus: with EvalPlus's additional inputs.
        data: a JSONL file, .gz or not, as EvalPlus or OpenAI release it, or with id, prompt and the rest in meta; any
            subset of the problems. Without inputs in the data, plain HumanEval runs the original tests. None is
            EvalPlus's download, or the file that $HUMANEVAL_OVERRIDE_PATH names.
        limits: what a program may use.
        chat: the problem is a user's message; else it is the beginning of the program.

    Raises:
        SettingError: EvalPlus is not installed.
    """

    metric: str | None = "pass@1"
    runs_programs = True  # scoring takes long

    def __init__(
        self, plus: bool = False, data: Path | None = None, limits: Limits | None = None, chat: bool = True
    ) -> None:
        self.name = "humaneval_plus" if plus else "humaneval"
        if importlib.util.find_spec("evalplus") is None:
            raise SettingError(f"{self.name} needs EvalPlus: pip install 'dropmatch[eval]'")
        if os.name != "posix":
            raise SettingError(f"{self.name} runs programs under limits that only Linux and macOS have")
        self._plus, self._data, self._chat = plus, None if data is None else Path(data), chat
        self._judge = Judge(limits)

    def examples(self, limit: int | None) -> list[Example]:
        """The first problems of the data.

        Raises:
            SettingError: there is no data, a row of it is malformed, or programs cannot be judged here.

        Warns:
            UnconfinedWarning: the operating system does not confine programs.
        """
        problems = read_problems(self._data, self._plus)
        self._judge.prepare()
        stop = STOP + (STOP_OF_ANSWER if self._chat else STOP_OF_COMPLETION)
        return [
            Example(name, self._prompt(problem["prompt"]), stop, MAX_TOKENS, problem)
            for name, problem in list(problems.items())[:limit]
        ]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """1.0 for each text whose program passes all tests of its problem, and 0.0 for the others.

        Raises:
            SettingError: a problem's own solution fails on its tests.
        """
        self._judge.prepare()
        with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
            futures = [
                pool.submit(self._judge.passes, example.data, text if self._chat else f"{example.prompt}{text}")
                for example, text in zip(examples, texts, strict=True)
            ]
            try:
                return [float(future.result()) for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def _prompt(self, problem: str) -> Prompt:
        if self._chat:
            return user_message(f"{INSTRUCTION}\n```python\n{problem.strip()}\n```")
        return problem.strip() + "\n"
