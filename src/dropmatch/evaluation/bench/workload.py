"""How much a run has to do: what its folder holds already, and what is left of decoding and scoring.

Decoding is measured in tokens, the most that an example may have: how many it will have is not known, and how far
texts stay below their limits shows in the pace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dropmatch.evaluation.backends.base import budget_of
from dropmatch.evaluation.bench.plan import Plan, baseline
from dropmatch.evaluation.bench.progress import GROUPS, Load
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks import Example, Task

SCORE, LOG_LIKELIHOOD = "score", "log_likelihood"
SCORED, JUDGED, READ = "texts scored", "programs judged", "likelihoods"


class TaskWork(NamedTuple):
    """A task of a run: its examples in groups that are timed together, by number, and the most tokens of a text."""

    task: Task
    groups: dict[int, list[Example]]
    max_tokens: int


def score_of(plan: Plan, metric: str | None) -> str | None:
    """What a task's texts get a number for, given what its score is called; None if they get none."""
    if metric is not None:
        return SCORE
    return LOG_LIKELIHOOD if plan.log_likelihood else None


def scoring_unit(task: Task) -> str:
    """What the scoring of a task's texts is counted in, for its pace."""
    if task.metric is None:
        return READ
    return JUDGED if runs_programs(task) else SCORED


def runs_programs(task: Task) -> bool:
    """Whether scoring runs each text as a program, which may take as long as decoding it."""
    return getattr(task, "runs_programs", False)


def is_done(store: Store, task: str, cell: str, number: int, group: Sequence[Example]) -> bool:
    """Whether a group is there; with more examples than are asked for now it is, too."""
    found = store.groups.get((task, cell, number))
    if found is None or found.ids[: len(group)] != [example.id for example in group]:
        return False
    # a turn before that was decoded anew makes what followed it a reply to something else
    texts = store.texts(task, cell) if group[0].after else {}
    pairs = zip(group, found.outputs, strict=False)
    return all(list(output.get("after", ())) == [texts.get(i) for i in example.after] for example, output in pairs)


def tokens_of(group: Sequence[Example], max_tokens: int) -> int:
    """The most tokens of a group."""
    return sum(budget_of(example, max_tokens) for example in group)


def unscored(store: Store, task: str, cell: str, name: str) -> dict[str, str]:
    """The texts of a cell that have no such score, by example."""
    return {i: text for i, text in store.texts(task, cell).items() if name not in store.scores.get((task, cell, i), {})}


def workload(plan: Plan, cells: Collection[str], tasks: Sequence[TaskWork], store: Store) -> list[Load]:
    """All of a plan's work, seen from the process that runs some of its cells.

    Processes run one after the other, in the order of their draft lengths: what an earlier one has left has crashed.

    Args:
        plan: what is run.
        cells: those of its cells that this process runs, and tells of.
        tasks: what there is to do for each cell.
        store: what is done already.
    """
    lengths = list(dict.fromkeys(baseline(cell) for cell in plan.rules))
    first = min((lengths.index(baseline(cell)) for cell in cells), default=0)
    over = {cell for cell in plan.rules if lengths.index(baseline(cell)) < first} - set(cells)
    decoding = _Sum(GROUPS)
    scoring: dict[str, _Sum] = {}
    for task, groups, max_tokens in tasks:
        name, unit = score_of(plan, task.metric), scoring_unit(task)
        texts = scoring.setdefault(unit, _Sum(unit)) if name else None
        for cell in plan.rules:
            told, is_over = cell in cells, cell in over
            for number, group in groups.items():
                done, tokens = is_done(store, task.name, cell, number, group), tokens_of(group, max_tokens)
                decoding.add(1, tokens, done, told, is_over)
                if done:
                    decoding.took(store.groups[task.name, cell, number].seconds, tokens)
                if texts is None:
                    continue
                scored = sum(done and name in store.scores.get((task.name, cell, e.id), {}) for e in group)
                texts.add(scored, scored, True, told, is_over)
                texts.add(len(group) - scored, len(group) - scored, False, told, is_over)
    return [each.load() for each in (decoding, *scoring.values())]


class _Sum:
    """One kind of work, added up."""

    def __init__(self, unit: str) -> None:
        self._unit, self._total, self._amount, self._found = unit, 0, 0, 0
        self._seconds = self._known = 0.0

    def add(self, count: int, amount: int, done: bool, told: bool, is_over: bool) -> None:
        """Some of it: whether it is done, whether this process tells of it, and whether it is too late for it."""
        self._total += count
        self._found += count if done and not told else 0
        self._amount += 0 if done or is_over else amount

    def took(self, seconds: float, amount: float) -> None:
        """What was done in an earlier run, or process."""
        self._seconds += seconds
        self._known += amount

    def load(self) -> Load:
        pace = self._seconds / self._known if self._known else None
        return Load(self._unit, self._total, self._amount, self._found, pace)
