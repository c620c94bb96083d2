"""Runs a plan's cells, in this process or, with vLLM, in one of their own for each draft length.

vLLM reads some environment variables at start only, and keeps one draft length for its life; hence the processes.

    python -m dropmatch.evaluation.bench.worker FOLDER LENGTH < plan.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dropmatch.acceptance import get_rule
from dropmatch.config import DraftConfig
from dropmatch.errors import DropMatchError, SettingError
from dropmatch.evaluation.backends import Backend
from dropmatch.evaluation.bench.lock import alone
from dropmatch.evaluation.bench.plan import Plan, options
from dropmatch.evaluation.bench.progress import Bar
from dropmatch.evaluation.bench.runner import Runner, is_scored, work_of
from dropmatch.evaluation.bench.store import SCORING, Store
from dropmatch.evaluation.tasks import Task
from dropmatch.evaluation.tasks.choose import choose_task
from dropmatch.models.names import PROMPT_LOOKUP
from dropmatch.rule_text import parse_rule

WORKER = "worker"  # the lock of the process that decodes


def tasks_of(plan: Plan) -> list[Task]:
    """The plan's tasks.

    Raises:
        SettingError: one cannot be found, or two have one name.
    """
    tasks = [
        choose_task(
            each.name, each.data, chat=not plan.raw, fewshot_data=each.fewshot_data, num_fewshot=each.num_fewshot
        )
        for each in plan.tasks
    ]
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
    with alone(folder):
        _run_all(plan, folder, tasks)


def _run_all(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
    store = Store(folder, plan)  # refuses a folder of another plan before a model is loaded
    if plan.engine == "hf":
        backend = _huggingface(plan)
        store.keep_plan()
        _run(plan, plan.rules, store, tasks, backend)
        return
    from dropmatch.engines.vllm.environment import require_vllm, wanted

    on_cpu = require_vllm()
    check_for_vllm(plan)
    with alone(folder, WORKER):  # one whose parent was killed may still be at work
        store.keep_plan()
    more = wanted(os.environ, on_cpu) | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if on_cpu:
        more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would take one of few cores
    for length in dict.fromkeys(length_of(cell) for cell in plan.rules):
        command = [sys.executable, "-m", __name__, str(folder), str(length)]
        child = subprocess.Popen(command, env={**os.environ, **more}, stdin=subprocess.PIPE, text=True)
        try:
            child.communicate(plan.to_json())
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
        if child.returncode:
            _note_failure(plan, folder, tasks, length, child.returncode)


def check_for_vllm(plan: Plan) -> None:
    """Refuse what an engine would refuse that is started after hours, for a later draft length.

    Raises:
        SettingError: a cell asks for what vLLM does not have.
    """
    has_distribution = plan.draft != PROMPT_LOOKUP
    for cell in plan.rules:
        acceptance, draft = options(cell)
        rule = get_rule(acceptance.rule)
        try:
            if draft.draft_length < 1:
                raise SettingError("draft_length (L) must be at least 1 with vLLM")
            if draft != DraftConfig(draft_length=draft.draft_length):
                raise SettingError("of the draft's settings only draft_length (L) can be had with vLLM")
            rule.check_window(acceptance.window, draft.draft_length)
            rule.check_drafter(has_distribution, PROMPT_LOOKUP)
        except SettingError as error:
            raise SettingError(f"{cell}: {error}") from None


def _note_failure(plan: Plan, folder: Path, tasks: Sequence[Task], length: int, code: int) -> None:
    """A process has ended early: what is missing of its cells has failed; those of other lengths go on."""
    store = Store(folder, plan)
    text = f"the process that ran vLLM with L={length} ended with exit code {code}; its last words stand on stderr"
    for task, examples, _ in work_of(plan, tasks):
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


def _run(plan: Plan, cells: Sequence[str], store: Store, tasks: Sequence[Task], backend: Backend) -> None:
    runner = Runner(plan, cells, tasks, backend, store)
    (store.folder / "machine.json").write_text(json.dumps(backend.about(), indent=1) + "\n", encoding="utf-8")
    with Bar(runner.workload()) as bar:
        runner.run(bar)


def _huggingface(plan: Plan) -> Backend:
    from dropmatch.cli.session import quiet_libraries

    quiet_libraries()
    from dropmatch.engines.hf.load import load
    from dropmatch.evaluation.backends.hf import HuggingFace
    from dropmatch.models import default_draft

    draft = plan.draft or default_draft(plan.target)
    if draft is None:
        raise SettingError(f"{plan.target} has no drafter: name one as draft")
    return HuggingFace(load(plan.target, draft, dtype=plan.dtype, device=plan.device, draft_weights=plan.draft_weights))


def main() -> None:
    """One draft length with vLLM; the plan comes on stdin."""
    folder, length = Path(sys.argv[1]), int(sys.argv[2])
    try:
        plan = Plan.of_json(sys.stdin.read())
        from dropmatch.evaluation.backends.vllm import VLLM, longest

        tasks = tasks_of(plan)
        tokens = longest(plan.target, ((examples, budget) for _, examples, budget in work_of(plan, tasks)))
        backend = VLLM.load(plan.target, plan.draft, length, plan.batch, tokens, plan.dtype)
        cells = [cell for cell in plan.rules if length_of(cell) == length]
        with alone(folder, WORKER):
            _run(plan, cells, Store(folder, plan), tasks, backend)
    except DropMatchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
