"""Runs a plan: every cell on every example, in turns, so that all share what the machine does meanwhile.

Examples go in groups, the unit that is timed: single ones with the Hugging Face engine, twice the batch with vLLM.
Within a group the cells run in an order that rotates from group to group. Of conversations the first turns of all come
first, then the second ones, each cell's on its own texts of the turns before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Backend, EngineLost
from dropmatch.evaluation.bench.plan import DEFAULT_TOKENS, Plan, TaskChoice, options
from dropmatch.evaluation.bench.progress import Load
from dropmatch.evaluation.bench.store import SCORING, Store, conversation
from dropmatch.evaluation.bench.under_way import Note, Step
from dropmatch.evaluation.bench.workload import (
    TaskWork,
    is_done,
    score_of,
    scoring_unit,
    tokens_of,
    workload,
)
from dropmatch.evaluation.tasks import Example, Task, following

Work = list[tuple[Task, list[Example], int]]
WARM_UP_TOKENS = 8
# the groups of each turn are numbered from a multiple of this, so that more examples leave them as they are
TURN = 10**6
LIKELIHOODS = 4  # texts that the target reads again before they are written down
SCORES = 8  # and that a task scores


class Progress(Protocol):
    """Told how far a run has come; `Bar` says what its arguments mean."""

    def begin(self, what: str) -> None:
        """Something else is done now."""
        ...

    def aside(self, what: str) -> None:
        """Something is done that is none of the work."""
        ...

    def done(
        self, tokens: int, measured: bool, *, unit: str | None = None, count: int = 1, amount: float | None = None
    ) -> None:
        """A group of a cell, or something else, is there; measured now, or found in the folder."""
        ...

    def lost(self, amount: float, *, unit: str | None = None) -> None:
        """So much will not be done."""
        ...


def flat(text: str) -> dict[str, Any]:
    """A cell's options as engines take them."""
    acceptance, draft = options(text)
    return {**asdict(acceptance), **asdict(draft)}


def work_of(plan: Plan, tasks: Sequence[Task]) -> Work:
    """The plan's tasks with their examples and the most tokens of a text.

    Raises:
        SettingError: data cannot be found or read, or several examples have one id.
    """
    return [(task, *examples_of(task, plan.task(choice))) for task, choice in zip(tasks, plan.tasks, strict=True)]


def examples_of(task: Task, choice: TaskChoice) -> tuple[list[Example], int]:
    """A task's examples and the most tokens of a text.

    Args:
        task: the task.
        choice: its settings, with the plan's where it has none.

    Raises:
        SettingError: data cannot be found or read, or several examples have one id.
    """
    examples, budget = task.examples(choice.limit), choice.max_tokens
    check_ids(task.name, examples)
    if budget is None:
        examples = [replace(each, max_tokens=each.max_tokens or DEFAULT_TOKENS) for each in examples]
        budget = max(each.max_tokens or 0 for each in examples)
    return examples, budget


def is_scored(plan: Plan, task: Task) -> bool:
    """Whether a task's texts get a number each."""
    return score_of(plan, task.metric) is not None


def check_ids(task: str, examples: Sequence[Example]) -> None:
    """Refuse examples of one id: what is kept about them would be mixed up.

    Raises:
        SettingError: there are such; the message names the id.
    """
    twice = [i for i, count in Counter(example.id for example in examples).items() if count > 1]
    if twice:
        raise SettingError(
            f"{task}: several examples have the id {twice[0]!r}: give each its own, or leave all ids out"
        )


def in_groups(examples: Sequence[Example], size: int) -> dict[int, list[Example]]:
    """Examples of one turn in groups, by number; earlier turns first."""
    turns: dict[int, list[Example]] = {}
    for example in examples:
        turns.setdefault(len(example.after), []).append(example)
    return {
        turn * TURN + start // size: members[start : start + size]
        for turn, members in sorted(turns.items())
        for start in range(0, len(members), size)
    }


class Runner:
    """A plan on one engine.

    Args:
        plan: what to run.
        cells: those of its cells that this engine runs.
        tasks: its tasks, in the plan's order.
        backend: the engine.
        store: where records go.
        work: as of `work_of`, where it was read before.
        without: steps that are left out, since they ended the process before.
        note: told of each step before it is done.

    Raises:
        SettingError: a cell's settings or an example cannot be honoured, or the folder holds texts of other prompts;
            nothing was generated.
    """

    def __init__(
        self,
        plan: Plan,
        cells: Sequence[str],
        tasks: Sequence[Task],
        backend: Backend,
        store: Store,
        work: Work | None = None,
        without: Collection[Step] = (),
        note: Note = lambda step: None,
    ) -> None:
        self._plan, self._cells, self._backend, self._store = plan, list(cells), backend, store
        self._crashed, self._note = set(without), note
        for cell in self._cells:
            try:
                backend.check(flat(cell))
            except SettingError as error:
                raise SettingError(f"{cell}: {error}") from None
        self._work: list[TaskWork] = []
        for task, examples, max_tokens in work_of(plan, tasks) if work is None else work:
            store.check_examples(task.name, examples)
            try:
                backend.check_prompts(examples, max_tokens)
            except SettingError as error:
                raise SettingError(f"{task.name}, {error}") from None
            self._work.append(TaskWork(task, in_groups(examples, backend.group), max_tokens))

    def workload(self) -> list[Load]:
        """All of the plan's work, that of its other cells too."""
        return workload(self._plan, self._cells, self._work, self._store)

    def run(self, progress: Progress) -> None:
        """Decode what is missing, then score it.

        Raises:
            EngineLost: the engine ended at the step that was noted last.
        """
        warm = False
        for task, groups, max_tokens in self._work:
            for cell in self._cells:
                if Step(task.name, cell) in self._crashed:  # in a process before
                    self._give_up(task, cell, groups, max_tokens, progress)
        for task, groups, max_tokens in self._work:
            for place, (number, group) in enumerate(groups.items()):
                turn = place % len(self._cells)
                for cell in self._cells[turn:] + self._cells[:turn]:
                    if is_done(self._store, task.name, cell, number, group):
                        progress.done(0, measured=False, amount=0)
                        continue
                    if Step(task.name, cell) in self._crashed:
                        continue
                    if not warm:
                        self._warm_up(task, groups[0], progress)
                        warm = True
                    progress.begin(f"{task.name} {place + 1}/{len(groups)}, {cell}")
                    if self._measure(task, cell, number, group, max_tokens):
                        tokens = sum(output["tokens"] for output in self._store.groups[task.name, cell, number].outputs)
                        progress.done(tokens, measured=True, amount=tokens_of(group, max_tokens))
                    else:
                        self._give_up(task, cell, groups, max_tokens, progress)
            self._score(task, groups, progress)

    def _warm_up(self, task: Task, group: Sequence[Example], progress: Progress) -> None:
        """A few tokens of each cell, which are not kept."""
        for cell in self._cells:
            if not self._begins(Step(task.name, cell)):
                continue
            progress.aside(f"warming up: {cell}")
            _guarded(partial(self._backend.generate, group[:2], flat(cell), WARM_UP_TOKENS))

    def _measure(self, task: Task, cell: str, number: int, group: Sequence[Example], max_tokens: int) -> bool:
        """Whether the group was decoded, and the cell has not crashed."""
        if not self._begins(Step(task.name, cell)):
            return False
        if group[0].after:
            texts = self._store.texts(task.name, cell)
            if not all(i in texts for example in group for i in example.after):
                return False  # a turn before has failed, which is kept already
            group = [following(example, texts) for example in group]
        found, error = _guarded(partial(self._backend.generate, group, flat(cell), max_tokens))
        if error is not None:
            self._store.fail(task.name, cell, error)
            self._crashed.add(Step(task.name, cell))
            return False
        self._store.add(task.name, cell, number, group, found)
        return True

    def _begins(self, step: Step) -> bool:
        """Note a step; False if it is to be left out."""
        if step in self._crashed:
            return False
        self._note(step)
        return True

    def _give_up(
        self, task: Task, cell: str, groups: Mapping[int, Sequence[Example]], max_tokens: int, progress: Progress
    ) -> None:
        """What is missing of a cell that has crashed will not be done."""
        missing = [group for n, group in groups.items() if not is_done(self._store, task.name, cell, n, group)]
        progress.lost(sum(tokens_of(group, max_tokens) for group in missing))
        if is_scored(self._plan, task):
            progress.lost(sum(len(group) for group in missing), unit=scoring_unit(task))

    def _score(self, task: Task, groups: Mapping[int, Sequence[Example]], progress: Progress) -> None:
        """Scores of the texts that have none, and of open-ended ones what the target gives them."""
        name, unit = score_of(self._plan, task.metric), scoring_unit(task)
        if name is None:
            return
        measure = task.score if task.metric else self._backend.log_likelihoods
        for cell in self._cells:
            waiting: list[tuple[Example, str]] = []
            there = 0
            for number, group in groups.items():
                if not is_done(self._store, task.name, cell, number, group):
                    continue
                there += len(group)
                outputs = self._store.groups[task.name, cell, number].outputs
                waiting += [
                    (replace(example, replies=conversation(output)[:-1]), output["text"])
                    for example, output in zip(group, outputs, strict=False)
                    if name not in self._store.scores[task.name, cell, example.id]
                ]
            progress.done(0, measured=False, unit=unit, count=there - len(waiting), amount=0)
            if not waiting or not self._begins(Step(task.name, cell, scoring=True)):
                continue
            known = self._store.values(task.name, name)  # cells often say the same
            about = {e.id: (e.id, (*e.replies, text)) for e, text in waiting}
            found = {i: known[each] for i, each in about.items() if each in known}
            rest = [(e, text) for e, text in waiting if e.id not in found]
            if found:
                self._store.score(task.name, cell, name, found)
                progress.done(0, measured=True, unit=unit, count=len(found))
            # programs run long, and so does what the target reads: kept as they come
            size = SCORES if task.metric else max(LIKELIHOODS, self._backend.group)
            for start in range(0, len(rest), size):
                part = rest[start : start + size]
                progress.begin(f"{task.name}, scoring {cell}, {start + len(part)}/{len(rest)}")
                values, error = _guarded(partial(measure, [e for e, _ in part], [text for _, text in part]))
                if error is not None:
                    self._store.fail(task.name, cell, f"{SCORING}{error}")
                    progress.lost(len(rest) - start, unit=unit)
                    break
                scores = {e.id: value for (e, _), value in zip(part, values, strict=True)}
                self._store.score(task.name, cell, name, scores)
                progress.done(0, measured=True, unit=unit, count=len(part))


def _guarded(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a cell comes to, or how it crashed: one cell's fault must not end the others.

    Raises:
        EngineLost: the engine has ended, and all cells with it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return act(), None
    except EngineLost:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
