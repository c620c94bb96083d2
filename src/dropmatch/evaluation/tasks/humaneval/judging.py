"""Runs programs in processes of their own and says whether they pass.

Each program gets a fresh process (see `worker`) with an empty environment, a fresh folder as home and working
folder, and limits on what it may compute, hold and write; on Linux a seccomp filter takes away all but computing
(see `confinement`). Then a program cannot change a file, connect, start a process, signal another one, or wait. It
can read what the user can read, though it has nowhere to carry that; it shares its process with EvalPlus's checker,
so a program written to that end can feign success; and the kernel is the same, so a hole in that is a hole.

Elsewhere, or where the kernel refuses filters, only EvalPlus's guard, which takes Python's own functions away, and
the limits remain: that stops accidents, not intent, and `UnconfinedWarning` says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError

PASSED, STARTED, REFUSED = b"passed", b"started", b"refused"
WORKER = "dropmatch.evaluation.tasks.humaneval.worker"
FACTOR = 4.0  # EvalPlus's: how much longer than the reference a program may take
_ONE = pickle.dumps([([1], [0.0])] * 2), 0.0  # that a function without arguments returns 1, at once, in two suites
REFERENCE_FACTOR = 10.0  # how much longer than a program the reference may take


class UnconfinedWarning(UserWarning):
    """The operating system does not confine the programs that a model writes."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Seconds are of computing, so that verdicts do not depend on how busy the machine is.

    Attributes:
        input_seconds: for one test input, or four times what the reference takes (EvalPlus: 1 s on the clock).
        program_seconds: for all, sanitising included, or four times what the reference takes.
        memory: bytes of address space (EvalPlus: 4 GiB).
        clock_seconds: after which a process is given up on, if it is confined.
        unconfined_clock_seconds: and if it is not, and so can wait for something.
    """

    input_seconds: float = 5.0
    program_seconds: float = 60.0
    memory: int = 2 << 30
    clock_seconds: float = 900.0
    unconfined_clock_seconds: float = 90.0


class Judge:
    """Judges programs; what the reference solutions return is found once each.

    Args:
        limits: what programs may use.
        confine: None asks the operating system to, where it can; False does without.
    """

    def __init__(self, limits: Limits | None = None, confine: bool | None = None) -> None:
        self._limits = limits or Limits()
        self._confine = confine
        self._expected: dict[str, tuple[bytes, float]] = {}

    def prepare(self) -> None:
        """Find out whether programs can be judged and confined here.

        Raises:
            SettingError: EvalPlus cannot be used.

        Warns:
            UnconfinedWarning: once in a process, if programs are not confined.
        """
        if self._confine is None:
            self._confine = _confinement()

    def passes(self, problem: Mapping[str, Any], text: str) -> bool:
        """Whether a text holds a program that solves the problem.

        Raises:
            SettingError: it could not be judged, or the reference solution does not solve the problem.
        """
        self.prepare()
        return _run(self._judged(problem, text, *self._reference(problem)), self._clock) == PASSED

    def _judged(self, problem: Mapping[str, Any], text: str, expected: bytes, seconds: float) -> dict[str, Any]:
        return {
            **self._job(problem, text.replace("\t", "    ")),  # as EvalPlus's providers for local models do
            "expected": expected,
            "atol": problem.get("atol", 0),
            "input_seconds": self._limits.input_seconds,
            "factor": FACTOR,
            "program_seconds": max(self._limits.program_seconds, FACTOR * seconds),
            "file_size": 1 << 16,
        }

    def _reference(self, problem: Mapping[str, Any]) -> tuple[bytes, float]:
        """What the checker compares with, which this process never unpacks, and how long the reference took."""
        key = hashlib.sha256(json.dumps(problem, sort_keys=True).encode()).hexdigest()
        if key not in self._expected:
            job = {
                **self._job(problem, problem["prompt"] + problem["canonical_solution"]),
                "program_seconds": REFERENCE_FACTOR * self._limits.program_seconds,
                "file_size": 1 << 30,
            }
            seconds, _, expected = _run(job, self._clock).partition(b"\n")
            if not expected:
                raise SettingError(
                    f"the canonical solution of {problem['entry_point']!r} fails on the problem's own tests, or takes "
                    "too long: mend the problem in the data, or leave it out"
                )
            self._expected[key] = expected, float(seconds)
        return self._expected[key]

    def _job(self, problem: Mapping[str, Any], text: str) -> dict[str, Any]:
        tested = "test" in problem
        return {
            "text": text,
            "entry_point": problem["entry_point"],
            "around": problem["prompt"] + problem["test"] if tested else None,
            "suites": [[[]]] if tested else problem["suites"],
            "memory": self._limits.memory,
            "confine": self._confine,
        }

    @property
    def _clock(self) -> float:
        return self._limits.clock_seconds if self._confine else self._limits.unconfined_clock_seconds


def _run(job: Mapping[str, Any], clock_seconds: float) -> bytes:
    """A worker's answer, which is empty if the program ended it.

    Raises:
        SettingError: the worker did not get as far as the program, or could not be confined as the job asks.
    """
    with tempfile.TemporaryDirectory(prefix="dropmatch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job_path, result, log, home = folder / "job", folder / "result", folder / "log", folder / "home"
        home.mkdir()
        job_path.write_bytes(pickle.dumps(dict(job)))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", WORKER, str(job_path), str(result)],
                cwd=home, env=_environment(home), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(clock_seconds)
        finally:
            if process.returncode is None or not job["confine"]:  # an unconfined one may have left others behind
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        state, _, answer = (result.read_bytes() if result.exists() else b"").partition(b"\n")
        if state == REFUSED:
            raise SettingError("the kernel no longer confines the process that judges programs: start again")
        if state != STARTED:
            last = " ".join(log.read_text(encoding="utf-8", errors="replace").split()[-40:])
            raise SettingError(
                f"the process that judges programs did not start (exit status {process.returncode}): "
                f"{last or 'it said nothing; is there enough memory?'}"
            )
        return answer


def _environment(home: Path) -> dict[str, str]:
    """No secrets, nothing that depends on the user, and one thread."""
    found = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": os.defpath,
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "PYTHONHASHSEED": "0",  # a program that depends on the order of a set gets the same one each time
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return found | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


@functools.cache
def _confinement() -> bool:
    """Whether programs are confined here, found out by judging one that is right."""
    right = Judge(confine=True)._judged(
        {"entry_point": "one", "suites": [[[]]] * 2}, "def one():\n    import heapq, re\n    return 1", *_ONE
    )
    with contextlib.suppress(SettingError):
        if _run(right, Limits.clock_seconds) == PASSED:
            return True
    if _run({**right, "confine": False}, Limits.clock_seconds) != PASSED:
        raise SettingError("EvalPlus's checker fails a right program here: this system cannot judge HumanEval")
    warnings.warn(
        "this system does not confine the programs that the model writes and HumanEval runs: they have limits on "
        "time and memory, but could change files or connect. Run the benchmark in a container without a network, or "
        "on Linux (x86-64 or Arm) with seccomp",
        UnconfinedWarning,
        stacklevel=2,
    )
    return False
