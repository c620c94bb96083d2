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
from dropmatch.evaluation.bench.store import SCORING, Store, conversation
from dropmatch.evaluation.bench.under_way import Note, Step
from dropmatch.evaluation.tasks import Example, Task, following

Work = list[tuple[Task, list[Example], int]]
WARM_UP_TOKENS = 8
# the groups of each turn are numbered from a multiple of this, so that more examples leave them as they are
TURN = 10**6
LIKELIHOODS = 4  # texts that the target reads again before they are written down
SCORE, LOG_LIKELIHOOD = "score", "log_likelihood"


class Progress(Protocol):
    """Told how far a run has come."""

    def begin(self, what: str) -> None:
        """Something else is done now."""
        ...

    def done(self, tokens: int, measured: bool) -> None:
        """A group of a cell is there; measured now, or found in the folder."""
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
    return task.metric is not None or plan.log_likelihood


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
        self._work: list[tuple[Task, dict[int, list[Example]], int]] = []
        for task, examples, max_tokens in work_of(plan, tasks) if work is None else work:
            store.check_examples(task.name, examples)
            try:
                backend.check_prompts(examples, max_tokens)
            except SettingError as error:
                raise SettingError(f"{task.name}, {error}") from None
            self._work.append((task, in_groups(examples, backend.group), max_tokens))

    @property
    def total(self) -> int:
        """Groups of cells, those found in the folder among them."""
        return len(self._cells) * sum(len(groups) for _, groups, _ in self._work)

    def run(self, progress: Progress) -> None:
        """Decode what is missing, then score it.

        Raises:
            EngineLost: the engine ended at the step that was noted last.
        """
        warm = False
        for task, groups, max_tokens in self._work:
            for place, (number, group) in enumerate(groups.items()):
                turn = place % len(self._cells)
                for cell in self._cells[turn:] + self._cells[:turn]:
                    if self._is_done(task, cell, number, group):
                        progress.done(0, measured=False)
                        continue
                    if not warm:
                        self._warm_up(task, groups[0], progress)
                        warm = True
                    progress.begin(f"{task.name} {place + 1}/{len(groups)}, {cell}")
                    tokens = self._measure(task, cell, number, group, max_tokens)
                    progress.done(tokens, measured=True)
            self._score(task, groups, progress)

    def _is_done(self, task: Task, cell: str, number: int, group: Sequence[Example]) -> bool:
        """Whether a group is there; with more examples than are asked for now it is, too."""
        found = self._store.groups.get((task.name, cell, number))
        if found is None or found.ids[: len(group)] != [example.id for example in group]:
            return False
        # a turn before that was decoded anew makes what followed it a reply to something else
        texts = self._store.texts(task.name, cell) if group[0].after else {}
        pairs = zip(group, found.outputs, strict=False)
        return all(list(output.get("after", ())) == [texts.get(i) for i in e.after] for e, output in pairs)

    def _warm_up(self, task: Task, group: Sequence[Example], progress: Progress) -> None:
        """A few tokens of each cell, which are not kept."""
        for cell in self._cells:
            if not self._begins(Step(task.name, cell)):
                continue
            progress.begin(f"warming up: {cell}")
            _guarded(partial(self._backend.generate, group[:2], flat(cell), WARM_UP_TOKENS))

    def _measure(self, task: Task, cell: str, number: int, group: Sequence[Example], max_tokens: int) -> int:
        if not self._begins(Step(task.name, cell)):
            return 0
        if group[0].after:
            texts = self._store.texts(task.name, cell)
            if not all(i in texts for example in group for i in example.after):
                return 0  # a turn before has failed, which is kept already
            group = [following(example, texts) for example in group]
        found, error = _guarded(partial(self._backend.generate, group, flat(cell), max_tokens))
        if error is not None:
            self._store.fail(task.name, cell, error)
            self._crashed.add(Step(task.name, cell))
            return 0
        self._store.add(task.name, cell, number, group, found)
        return sum(output.tokens for output in found.outputs)

    def _begins(self, step: Step) -> bool:
        """Note a step; False if it is to be left out."""
        if step in self._crashed:
            return False
        self._note(step)
        return True

    def _score(self, task: Task, groups: Mapping[int, Sequence[Example]], progress: Progress) -> None:
        """Scores of the texts that have none, and of open-ended ones what the target gives them."""
        name = SCORE if task.metric else LOG_LIKELIHOOD
        if not is_scored(self._plan, task):
            return
        measure = task.score if task.metric else self._backend.log_likelihoods
        for cell in self._cells:
            waiting: list[tuple[Example, str]] = []
            for number, group in groups.items():
                if not self._is_done(task, cell, number, group):
                    continue
                outputs = self._store.groups[task.name, cell, number].outputs
                waiting += [
                    (replace(example, replies=conversation(output)[:-1]), output["text"])
                    for example, output in zip(group, outputs, strict=False)
                    if name not in self._store.scores[task.name, cell, example.id]
                ]
            if not waiting or not self._begins(Step(task.name, cell, scoring=True)):
                continue
            known = self._store.values(task.name, name)  # cells often say the same
            about = {e.id: (e.id, (*e.replies, text)) for e, text in waiting}
            found = {i: known[each] for i, each in about.items() if each in known}
            rest = [(e, text) for e, text in waiting if e.id not in found]
            if found:
                self._store.score(task.name, cell, name, found)
            # a harness may score texts together; what the target gives them takes long, and is kept as it comes
            size = max(1, len(rest)) if task.metric else max(LIKELIHOODS, self._backend.group)
            for start in range(0, len(rest), size):
                part = rest[start : start + size]
                progress.begin(f"{task.name}, scoring {cell}, {start + len(part)}/{len(rest)}")
                values, error = _guarded(partial(measure, [e for e, _ in part], [text for _, text in part]))
                if error is not None:
                    self._store.fail(task.name, cell, f"{SCORING}{error}")
                    break
                scores = {e.id: value for (e, _), value in zip(part, values, strict=True)}
                self._store.score(task.name, cell, name, scores)


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
