"""Runs a plan's cells, in this process or, with vLLM, in one of their own for each draft length.

vLLM reads some environment variables at start only, and keeps one draft length for its life; hence the processes.

    python -m dropmatch.evaluation.bench.worker FOLDER LENGTH STEPS < plan.json

STEPS are those that ended such a process before, as JSON; they are left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dropmatch.acceptance import get_rule
from dropmatch.config import DraftConfig
from dropmatch.errors import DropMatchError, SettingError
from dropmatch.evaluation.backends import Backend, EngineLost
from dropmatch.evaluation.bench.lock import alone
from dropmatch.evaluation.bench.plan import Plan, options
from dropmatch.evaluation.bench.progress import Bar
from dropmatch.evaluation.bench.runner import Runner, Work, is_scored, work_of
from dropmatch.evaluation.bench.store import SCORING, Store
from dropmatch.evaluation.bench.under_way import Step, forget, note, noted
from dropmatch.evaluation.tasks import Prompts, Task
from dropmatch.evaluation.tasks.choose import choose_task
from dropmatch.models.names import NO_DRAFT, PROMPT_LOOKUP
from dropmatch.rule_text import parse_rule

WORKER = "worker"  # the lock of the process that decodes
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a process that was told to end


def tasks_of(plan: Plan) -> list[Task]:
    """The plan's tasks.

    Raises:
        SettingError: one cannot be found, two have one name, or there are turns and no conversations.
    """
    tasks = [
        choose_task(
            each.name,
            each.data,
            chat=not plan.raw,
            fewshot_data=each.fewshot_data,
            num_fewshot=each.num_fewshot,
            turns=plan.turns,
            metric=each.metric,
            filter_name=each.filter,
            unsafe_code=each.unsafe_code,
        )
        for each in plan.tasks
    ]
    if plan.turns is not None and not any(isinstance(task, Prompts) for task in tasks):
        raise SettingError(f"turns={plan.turns} has no meaning without a file of prompts among the tasks: leave it out")
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(
                f"two tasks are called {name}, and a benchmark tells them apart by name: run one with another --out, "
                "or rename its file or folder"
            )
    return tasks


def run(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
    """Decode and score what is missing. What fails is kept as the failure of its cells.

    Raises:
        SettingError: settings that cannot be honoured, data that cannot be read, or another process runs a benchmark in
            this folder; nothing was generated.
    """
    check_cells(plan)
    on_cpu = False
    if plan.engine == "vllm":
        from dropmatch.engines.vllm.environment import require_vllm

        on_cpu = require_vllm()
    work = work_of(plan, tasks)
    with alone(folder):
        store = Store(folder, plan)  # refuses a folder of another plan
        for task, examples, _ in work:
            store.check_examples(task.name, examples)
        if plan.engine == "hf":
            backend = _huggingface(plan)
            store.keep_plan()
            _run(Runner(plan, plan.rules, tasks, backend, store, work), backend, store)
            return
        with alone(folder, WORKER):  # one whose parent was killed may still be at work
            store.keep_plan()
        for length in dict.fromkeys(length_of(cell) for cell in plan.rules):
            _run_length(plan, folder, work, length, on_cpu)


def check_cells(plan: Plan) -> None:
    """Refuse what an engine would refuse only once its models are loaded, or after hours, for a later draft length.

    Raises:
        SettingError: a cell asks for what the engine or the drafter does not have, or there is no drafter.
    """
    for cell in plan.rules:
        acceptance, draft = options(cell)
        rule = get_rule(acceptance.rule)
        try:
            if plan.engine == "vllm":
                if draft.draft_length < 1:
                    raise SettingError("draft_length (L) must be at least 1 with vLLM")
                if draft != DraftConfig(draft_length=draft.draft_length):
                    raise SettingError("of the draft's settings only draft_length (L) can be had with vLLM")
            if not draft.draft_length:  # plain decoding asks no rule
                continue
            rule.check_window(acceptance.window, draft.draft_length)
            rule.check_drafter(plan.draft != PROMPT_LOOKUP, PROMPT_LOOKUP)
        except SettingError as error:
            raise SettingError(f"{cell}: {error}") from None
    if _draft(plan) in (None, NO_DRAFT) and any(map(length_of, plan.rules)):
        raise SettingError(f"nothing drafts for {plan.target}: name a model, or {PROMPT_LOOKUP}, as draft")


def _draft(plan: Plan) -> str | None:
    from dropmatch.models import default_draft

    return plan.draft or default_draft(plan.target)


def _run_length(plan: Plan, folder: Path, work: Work, length: int, on_cpu: bool) -> None:
    """A process for the cells of one draft length; another one, without the step that ended it, if it ends early."""
    without: list[Step] = []
    while True:
        forget(folder)
        try:
            code = _wait(_command(folder, length, without), plan, on_cpu)
            last = noted(folder)
        finally:
            forget(folder)
        if not code:
            return
        if last is None or last[0] in without or code in STOPPED:
            _note_failure(plan, folder, work, length, code)
            return
        step, error = last
        text = error or f"the process that ran vLLM with L={length} ended with exit code {code} meanwhile"
        Store(folder, plan).fail(step.task, step.cell, f"{SCORING}{text}" if step.scoring else text)
        without.append(step)


def _command(folder: Path, length: int, without: Sequence[Step]) -> list[str]:
    return [sys.executable, "-m", __name__, str(folder), str(length), json.dumps([asdict(step) for step in without])]


def _wait(command: Sequence[str], plan: Plan, on_cpu: bool) -> int:
    """The exit code of a process that is given the plan."""
    from dropmatch.engines.vllm.environment import wanted

    more = wanted(os.environ, on_cpu) | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if on_cpu:
        more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would take one of few cores
    child = subprocess.Popen(command, env={**os.environ, **more}, stdin=subprocess.PIPE, text=True)
    try:
        child.communicate(plan.to_json())
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    return child.returncode


def _note_failure(plan: Plan, folder: Path, work: Work, length: int, code: int) -> None:
    """A process has ended early: what is missing of its cells has failed; those of other lengths go on."""
    store = Store(folder, plan)
    text = f"the process that ran vLLM with L={length} ended with exit code {code}; its last words stand on stderr"
    for task, examples, _ in work:
        wanted = {example.id for example in examples}
        for cell in (cell for cell in plan.rules if length_of(cell) == length):
            if (task.name, cell) in store.failures:
                continue
            if wanted - store.texts(task.name, cell).keys():
                store.fail(task.name, cell, text)
            elif is_scored(plan, task) and any(not store.scores.get((task.name, cell, i)) for i in wanted):
                store.fail(task.name, cell, f"{SCORING}{text}")


def length_of(cell: str) -> int:
    """L of a cell."""
    return parse_rule(cell).get("draft_length", DraftConfig.draft_length)


def _run(runner: Runner, backend: Backend, store: Store) -> None:
    store.keep_machine(backend.about())
    with Bar(runner.workload()) as bar:
        runner.run(bar)


def _huggingface(plan: Plan) -> Backend:
    from dropmatch.cli.session import quiet_libraries

    quiet_libraries()
    from dropmatch.engines.hf.load import load
    from dropmatch.evaluation.backends.hf import HuggingFace

    draft = _draft(plan) or NO_DRAFT  # of which cells of plain decoding have no need
    return HuggingFace(load(plan.target, draft, dtype=plan.dtype, device=plan.device, draft_weights=plan.draft_weights))


def main() -> None:
    """One draft length with vLLM; the plan comes on stdin."""
    folder, length = Path(sys.argv[1]), int(sys.argv[2])
    without = [Step(**step) for step in json.loads(sys.argv[3])]
    last: list[Step] = []

    def at(step: Step) -> None:
        last[:] = [step]
        note(folder, step)

    try:
        plan = Plan.of_json(sys.stdin.read())
        from dropmatch.evaluation.backends.vllm import VLLM, longest

        tasks = tasks_of(plan)
        work = work_of(plan, tasks)
        tokens = longest(plan.target, ((examples, budget) for _, examples, budget in work))
        backend = VLLM.load(plan.target, plan.draft, length, plan.batch, tokens, plan.dtype)
        cells = [cell for cell in plan.rules if length_of(cell) == length]
        with alone(folder, WORKER):
            store = Store(folder, plan)
            _run(Runner(plan, cells, tasks, backend, store, work, without, at), backend, store)
    except EngineLost as error:
        note(folder, last[0], str(error))
        sys.exit(f"error: {error}")
    except DropMatchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
