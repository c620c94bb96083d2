"""Runs a plan's cells, in this process or, with vLLM, in one of their own for each draft length.

vLLM reads some environment variables at start only, and keeps one draft length for its life; hence the processes.

    python -m dropmatch.evaluation.bench.worker FOLDER LENGTH
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dropmatch.config import DraftConfig
from dropmatch.errors import DropMatchError, SettingError
from dropmatch.evaluation.backends import Backend
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.progress import Bar
from dropmatch.evaluation.bench.runner import Runner, work_of
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks import Task
from dropmatch.evaluation.tasks.choose import choose_task
from dropmatch.rule_text import parse_rule


def tasks_of(plan: Plan) -> list[Task]:
    """The plan's tasks.

    Raises:
        SettingError: one cannot be found.
    """
    return [choose_task(choice.name, choice.data, chat=not plan.raw) for choice in plan.tasks]


def run(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
    """Decode and score what is missing.

    Raises:
        SettingError: settings that cannot be honoured, or data that cannot be read; nothing was generated.
        DropMatchError: a process of vLLM's failed.
    """
    if plan.engine == "hf":
        _run(plan, plan.rules, folder, tasks, _huggingface(plan))
        return
    from dropmatch.engines.vllm.environment import require_vllm, wanted

    on_cpu = require_vllm()
    more = wanted(os.environ, on_cpu) | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if on_cpu:
        more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would take one of few cores
    Store(folder, plan)  # refuses a folder of another plan before a model is loaded
    for length in dict.fromkeys(length_of(cell) for cell in plan.rules):
        command = [sys.executable, "-m", __name__, str(folder), str(length)]
        child = subprocess.Popen(command, env={**os.environ, **more})
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
        if code:
            raise DropMatchError(f"the process that ran vLLM with L={length} ended with exit code {code}")


def length_of(cell: str) -> int:
    """L of a cell."""
    return parse_rule(cell).get("draft_length", DraftConfig.draft_length)


def _run(plan: Plan, cells: Sequence[str], folder: Path, tasks: Sequence[Task], backend: Backend) -> None:
    store = Store(folder, plan)
    runner = Runner(plan, cells, tasks, backend, store)
    (folder / "machine.json").write_text(json.dumps(backend.about(), indent=1) + "\n", encoding="utf-8")
    with Bar(runner.total) as bar:
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
    """One draft length with vLLM."""
    folder, length = Path(sys.argv[1]), int(sys.argv[2])
    try:
        plan = Plan.load(folder)
        from dropmatch.evaluation.backends.vllm import VLLM, longest

        tasks = tasks_of(plan)
        tokens = longest(plan.target, ((examples, budget) for _, examples, budget in work_of(plan, tasks)))
        backend = VLLM.load(plan.target, plan.draft, length, plan.batch, tokens, plan.dtype)
        cells = [cell for cell in plan.rules if length_of(cell) == length]
        _run(plan, cells, folder, tasks, backend)
    except DropMatchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
