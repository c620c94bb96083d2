"""Scores of a benchmark that is not at its end: it scores a task after all its cells, and may be stopped before."""

from __future__ import annotations

from collections.abc import Sequence

from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import examples_of
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.bench.workload import SCORE, runs_programs, unscored
from dropmatch.evaluation.tasks import Task


def score_what_is_there(plan: Plan, store: Store, tasks: Sequence[Task]) -> dict[str, str]:
    """Give the texts that have no score one, where that needs no model and no programs.

    The scores are held in memory: the process that runs the benchmark may be writing to its files at this time.

    Args:
        plan: what is run.
        store: what there is of it; it is given the scores.
        tasks: the plan's, in its order.

    Returns:
        Of the tasks whose texts could not be scored, by name, why.
    """
    failed = {}
    for task, choice in zip(tasks, plan.tasks, strict=True):
        waiting = {cell: unscored(store, task.name, cell, SCORE) for cell in plan.rules}
        if task.metric is None or runs_programs(task) or not any(waiting.values()):
            continue
        try:
            examples = {example.id: example for example in examples_of(task, plan.task(choice))[0]}
            store.check_examples(task.name, examples.values())
            for cell, texts in waiting.items():
                known = [i for i in texts if i in examples]
                values = task.score([examples[i] for i in known], [texts[i] for i in known])
                for i, value in zip(known, values, strict=True):
                    store.scores[task.name, cell, i][SCORE] = value
        except Exception as error:  # whatever it is: there is a report without these scores
            failed[task.name] = f"{type(error).__name__}: {error}"
    return failed
