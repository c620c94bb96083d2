"""Programs that mean harm: they fail, touch nothing, and the next one is judged."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropmatch.errors import SettingError

pytest.importorskip("evalplus", reason="EvalPlus is not installed")
pytest.importorskip("resource", reason="programs are judged on Linux and macOS only")

from humaneval_support import ADD, QUICK, RIGHT, body, ours, write

from dropmatch.evaluation.tasks.humaneval import HumanEval, UnconfinedWarning, judging

Judged = Callable[..., list[float | None]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("humaneval") / "one.jsonl", ours("T/0", ADD))


@pytest.fixture(scope="module")
def judged(data: Path) -> Judged:
    """Scores of answers to the addition, and of a right one after them."""
    task = HumanEval(plus=True, data=data, limits=QUICK)
    (example,) = task.examples(1)

    def judge(*texts: str) -> list[float | None]:
        *scores, last = task.score([example] * (len(texts) + 1), [*texts, RIGHT])
        assert last == 1.0, "the problem after it was not judged"
        return scores

    return judge


@pytest.fixture
def confined() -> None:
    if not judging._confinement():
        pytest.skip("the kernel refuses seccomp filters")


HANGS = {
    "loop": "while True: pass",
    "loop that catches all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "loop that ignores signals": "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except Exception: pass\nwhile True: pass",
    "deadlock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "loop in C": "'a' * 40 + 'b'\nimport re\nre.match('(a+)+$', 'a' * 40 + 'b')",
}


@pytest.mark.usefixtures("confined")
def test_programs_that_hang_fail(judged: Judged) -> None:
    assert judged(*map(body, HANGS.values())) == [0.0] * len(HANGS)
    assert judged("x = [0]\nfor i in x: x.append(i)\n" + RIGHT) == [1.0]  # the sanitiser keeps only definitions


ENDS = {
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "abort": "import ctypes\nctypes.CDLL(None).abort()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "memory": "x = [0]\nwhile True: x = x + x",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "output": "while True: print('x' * 10**6)",
    "output past Python": "import os\nwhile True: os.write(1, b'x' * 10**6)",
    "output to whatever is open": "import os\nwhile True:\n    for i in range(3, 30):\n"
    "        try: os.write(i, b'x' * 10**6)\n        except OSError: pass",
}


def test_programs_that_end_their_process_fail(judged: Judged) -> None:
    for name, score in zip(ENDS, judged(*map(body, ENDS.values())), strict=True):
        # what only runs out of memory may carry on and answer, as with EvalPlus
        assert score == 0.0 or name in ("memory", "recursion", "output"), name


def test_programs_get_no_input(judged: Judged) -> None:
    assert judged(body("input()"), body("import sys\nsys.stdin.read()"), body("import os\nos.read(0, 1)")) == [1.0] * 3


@pytest.mark.usefixtures("confined")
def test_waiting_is_over_at_once(judged: Judged) -> None:
    assert judged(body("import time\ntime.sleep(10**6)")) == [1.0]


@pytest.mark.usefixtures("confined")
def test_programs_change_nothing(judged: Judged, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("as it was")
    (tmp_path / "folder").mkdir()
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    mark = f"dropmatch-test-{os.getpid()}"
    places = [str(tmp_path / mark), str(Path.cwd() / mark), str(Path.home() / mark), str(shared / mark), f"/tmp/{mark}"]
    writes = [
        line
        for place in [*places, mark]
        for line in (
            f"attempt(io.open, {place!r}, 'w')",
            f"attempt(posix.open, {place!r}, posix.O_CREAT | posix.O_RDWR, 0o600)",
            f"attempt(posix.mkdir, {place!r})",
            f"attempt(libc.creat, {place.encode()!r}, 0o600)",
            f"attempt(posix.symlink, '/', {place!r})",
            f"attempt(posix.link, {str(tmp_path / 'kept')!r}, {place!r})",
        )
    ]
    kept, folder = str(tmp_path / "kept"), str(tmp_path / "folder")
    harms = [
        f"attempt(posix.unlink, {kept!r})",
        f"attempt(libc.unlink, {kept.encode()!r})",
        f"attempt(posix.rename, {kept!r}, {kept + '2'!r})",
        f"attempt(posix.truncate, {kept!r}, 0)",
        f"attempt(posix.chmod, {kept!r}, 0)",
        f"attempt(posix.utime, {kept!r}, (0, 0))",
        f"attempt(posix.rmdir, {folder!r})",
        f"attempt(io.open, {kept!r}, 'r+')",
        f"attempt(io.open, {kept!r}, 'a')",
    ]
    program = (
        "import io, posix, ctypes\nlibc = ctypes.CDLL(None)\ndone = []\n\ndef attempt(act, *values):\n    try:\n"
        "        if act(*values) != -1: done.append(act)\n    except OSError: pass\n    return None\n\n"
        "def add(a, b):\n" + "\n".join("    " + line for line in writes + harms) + "\n    assert not done\n"
        "    return a + b\n"
    )
    assert judged(program) == [1.0]
    assert not [place for place in places if os.path.lexists(place)]
    assert (tmp_path / "kept").read_text() == "as it was"
    assert sorted(os.listdir(tmp_path)) == ["folder", "kept"]


@pytest.mark.usefixtures("confined")
def test_programs_reach_nobody(judged: Judged) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with bystander, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        program = f"""
import ctypes, posix, signal, socket, subprocess, threading, multiprocessing
libc = ctypes.CDLL(None)
done = []

def attempt(act, *values):
    try:
        if act(*values) != -1: done.append((act, values))
    except (OSError, RuntimeError, ValueError, TypeError): pass
    return None

def add(a, b):
    attempt(posix.fork)
    attempt(libc.fork)
    attempt(libc.vfork)
    attempt(libc.syscall, 57)
    attempt(posix.posix_spawn, "/bin/true", ["true"], {{}})
    attempt(posix.execv, "/bin/true", ["true"])
    attempt(threading.Thread(target=print).start)
    attempt(multiprocessing.Process(target=print).start)
    attempt(socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}))
    attempt(socket.socket, socket.AF_UNIX)
    attempt(socket.socketpair)
    attempt(posix.kill, {bystander.pid}, signal.SIGKILL)
    attempt(posix.killpg, {bystander.pid}, signal.SIGKILL)
    attempt(libc.syscall, 234, {bystander.pid}, {bystander.pid}, 9)
    attempt(libc.ptrace, 16, {bystander.pid}, 0, 0)
    attempt(libc.unshare, 0x10000000)
    attempt(libc.mount, 0, b"/tmp", 0, 4096, 0)
    attempt(libc.prctl, 38, 0, 0, 0, 0)
    assert not done, done
    return a + b
"""
        assert judged(program) == [1.0]
        with pytest.raises(TimeoutError):
            server.accept()
        assert bystander.poll() is None


def test_workers_leave_nothing_behind(judged: Judged, tmp_path: Path) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    judged(body("import os\nos._exit(1)"), body("pass"))
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if name.startswith("dropmatch-")]


def test_programs_see_no_environment(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    assert judged("import os\n\ndef add(a, b):\n    assert 'SECRET_TOKEN' not in os.environ\n    return a + b") == [1.0]


def test_without_confinement_the_limits_remain(data: Path) -> None:
    task = HumanEval(plus=True, data=data, limits=QUICK)
    task._judge = judging.Judge(QUICK, confine=False)
    example = task.examples(1)[0]
    texts = [
        RIGHT,
        body("while True: pass"),
        body("import os\nos._exit(0)"),
        body("import os\nwhile True: os.write(1, b'x' * 10**6)"),
        body("open('written', 'w')\nraise SystemExit"),
    ]
    assert task.score([example] * len(texts), texts) == [1.0, 0.0, 0.0, 0.0, 1.0]
    task._judge._limits = replace(QUICK, unconfined_clock_seconds=6.0)
    assert task.score([example], [body("import time\ntime.sleep(10**6)")]) == [0.0]


def test_without_confinement_there_is_one_warning(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = judging._run

    def on_a_kernel_that_refuses(job: Mapping[str, Any], clock_seconds: float) -> bytes:
        if job["confine"]:
            raise SettingError("refused")
        return run(job, clock_seconds)

    monkeypatch.setattr(judging, "_run", on_a_kernel_that_refuses)
    judging._confinement.cache_clear()
    try:
        task = HumanEval(data=data)
        with pytest.warns(UnconfinedWarning, match="does not confine"):
            examples = task.examples(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            HumanEval(data=data).examples(1)
        assert task.score(examples, [RIGHT]) == [1.0]
    finally:
        judging._confinement.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_worker_that_is_not_confined_judges_nothing() -> None:
    script = (
        "import sys, pickle\nfrom pathlib import Path\n"
        "from dropmatch.evaluation.tasks.humaneval import confinement, worker\n"
        "confinement.confine = lambda: False\nworker.main(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    job = judging.Judge(QUICK, confine=True)._judged({**ADD, "suites": [ADD["base_input"]]}, RIGHT, b"", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "job", Path(folder) / "result"
        paths[0].write_bytes(pickle.dumps(job))
        subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=False)
        assert paths[1].read_bytes() == b"refused"
