"""The child process that runs one program: python -m dropmatch.evaluation.tasks.humaneval.worker JOB RESULT.

It confines itself before it looks at the program, then has EvalPlus sanitise and check it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dropmatch.evaluation.tasks.humaneval import confinement

PASSED, FAILED = b"passed", b"failed"
STARTED, REFUSED = b"started", b"refused"

# An original test as a function that EvalPlus's checker can call: it gets no arguments and must return None. The
# program and what the test needs of the prompt stay apart, so that neither helps the other out.
_TESTED = """
def test_of_program():
    around, own = {{}}, {{}}
    exec({around!r}, around)
    exec({program!r}, own)
    around[{name!r}] = own[{name!r}]
    around["check"](own[{name!r}])
"""


def main(job_path: Path, result_path: Path) -> None:
    """Does the job and leaves its result. Where that is missing, the program ended the process."""
    job = pickle.loads(job_path.read_bytes())
    job_path.unlink()
    result = os.open(result_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    checker = _evalplus()
    confinement.limit(job["program_seconds"], job["memory"], job["file_size"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    sys.stdout.flush()
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    if job["confine"] and not confinement.confine():
        os.write(result, REFUSED)
        os._exit(1)
    os.write(result, STARTED + b"\n")
    random.seed(0)
    answer = _judge(job, checker) if "expected" in job else _expect(job)
    while answer:
        answer = answer[os.write(result, answer) :]
    os._exit(0)


def _evalplus() -> Any:
    """Its checker and sanitiser, imported while imports are still free to do as they please."""
    # evalplus.data imports this large package for another benchmark
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]
    import evalplus.eval
    import evalplus.gen.util
    import evalplus.sanitize

    del sys.modules["datasets"]
    return evalplus.eval


def _expect(job: dict[str, Any]) -> bytes:
    """A line with the seconds that the reference takes in all, then what it returns and takes by input, pickled."""
    from evalplus.gen.util import trusted_exec

    program, name = _callable(job, job["text"])
    found = [trusted_exec(program, inputs, name, record_time=True) for inputs in job["suites"]]
    return b"%f\n" % sum(sum(seconds) for _, seconds in found) + pickle.dumps(found)


def _judge(job: dict[str, Any], checker: Any) -> bytes:
    """Whether a model's text holds a program that passes."""
    from evalplus.sanitize import sanitize

    checker.create_tempdir = contextlib.nullcontext  # this process has a folder of its own, and can make no other
    checker.reliability_guard()  # once, since it does not survive itself, and the limits are set already
    checker.reliability_guard = checker.query_maximum_memory_bytes = lambda **_: None
    checker.time_limit = _computing_limit
    try:
        program, name = _callable(job, sanitize(job["text"], entrypoint=job["entry_point"]))
    except Exception:  # of texts that cannot be parsed, some get through to here
        return FAILED
    for inputs, (expected, seconds) in zip(job["suites"], pickle.loads(job["expected"]), strict=True):
        limits = [max(job["input_seconds"], job["factor"] * each) for each in seconds]
        state = types.SimpleNamespace(value=None)
        with _computing_limit(limits[0]):  # for the definitions; then each input has its own
            checker.unsafe_execute(
                dataset="humaneval",
                entry_point=name,
                code=program,
                inputs=inputs,
                expected=expected,
                time_limits=limits,
                atol=job["atol"],
                fast_check=True,  # the first failure ends it, so success means that all have passed
                stat=state,
                details=[False] * len(inputs),
                progress=types.SimpleNamespace(value=0),
            )
        if state.value != checker._SUCCESS:
            return FAILED
    return PASSED


def _callable(job: dict[str, Any], program: str) -> tuple[str, str]:
    """What to execute, and the function to call: the program's own, or its original test."""
    if job["around"] is None:
        return program, job["entry_point"]
    return _TESTED.format(around=job["around"], program=program, name=job["entry_point"]), "test_of_program"


@contextlib.contextmanager
def _computing_limit(seconds: float) -> Iterator[None]:
    """Ends the process when that much has been computed: time that passes on the clock is others' too."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
