"""The command as a process: signals, pipes, and what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Pair, spawn

WAIT = 120  # seconds until a test gives up; none takes as long


def wait_for_lines(path: Path, count: int) -> None:
    """Until a file has so many lines."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if path.is_file() and path.read_text(encoding="utf-8").count("\n") >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"{path} did not get {count} lines")


def test_ctrl_c_keeps_the_text(pair: Pair) -> None:
    process = spawn("generate", "w10", *pair.args("--max-tokens", "30000"))
    assert process.stdout is not None
    begin = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    text = (begin + rest).decode()
    assert text.endswith("\n")
    assert all(word in ("user", "system", "assistant") or word[0] in "w<" for word in text.split())
    assert "finish: abort" in errors.decode()
    assert errors.count(b"\n") == 1


def test_ctrl_c_writes_the_partial_result(pair: Pair, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    process = spawn("generate", "w10", *pair.args("--max-tokens", "30000", "--json", "--trace", str(trace)))
    wait_for_lines(trace, 3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    found = json.loads(output)
    assert found["finish_reason"] == "abort"
    rounds = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert len(rounds) == found["statistics"]["rounds"] == len(found["trace"]) >= 3
    assert [token["id"] for r in rounds for token in r["committed"]] == found["token_ids"]
    assert found["statistics"]["generated"] == len(found["token_ids"]) < 30000


def test_ctrl_c_while_comparing_keeps_complete_prompts(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    prompts = [arg for i in range(60) for arg in ("--prompt", f"w{20 + i}")]
    process = spawn("compare", *pair.args("--max-tokens", "60", "--rules", "strict", "--json", str(path), *prompts))
    assert process.stdout is not None
    for line in process.stdout:
        if b"prompt 2 of 60" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    found = json.loads(path.read_text(encoding="utf-8"))
    complete = len(found["prompts"])
    assert found["complete"] is False
    assert 2 <= complete < 60
    assert f"interrupted: {complete} of 60 prompts are complete" in errors.decode()
    assert f"overall, {complete} prompts" in rest.decode()


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_broken_pipe_ends_quietly(pair: Pair, command: str) -> None:
    args = {
        "generate": ("generate", "w10", *pair.args("--max-tokens", "30000")),
        "compare": (
            "compare",
            *pair.args("--max-tokens", "20"),
            "--rules",
            "strict",
            "--prompt",
            "w10",
            "--prompt",
            "w11",
        ),
    }[command]
    process = spawn(*args)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=WAIT) == 141
    if command == "generate":
        assert errors == ""
    assert "Traceback" not in errors
    assert "Broken pipe" not in errors
    assert "Exception ignored" not in errors


IMPORTS = """
import sys
sys.argv = ["dropmatch", *sys.argv[1:]]
from dropmatch.cli import main
try:
    main()
except SystemExit as end:
    heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    print("code", end.code, "heavy", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["generate", "--help"], 0),
        (["compare", "--help"], 0),
        (["models", "--help"], 0),
        (["models", "list"], 0),
        (["generate", "x", "--no-such-option"], 2),
        (["generate", "x", "-K", "many"], 2),
        (["generate", "x", "-L", "-1"], 2),
        (["generate", "x", "--dtype", "int4"], 2),
        (["no-such-command"], 2),
    ],
    ids=str,
)
def test_torch_is_not_imported_for(args: list[str], code: int) -> None:
    process = subprocess.run([sys.executable, "-c", IMPORTS, *args], capture_output=True, text=True, timeout=WAIT)
    assert process.stderr.splitlines()[-1] == f"code {code} heavy []"


def test_module_can_be_run() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", "--version"], capture_output=True, text=True, timeout=WAIT
    )
    assert process.stdout.startswith("dropmatch ")


def test_a_character_that_the_terminal_lacks_is_replaced(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "mod→le"
    folder.symlink_to(pair.target)
    process = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", "models", "where", str(folder)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        timeout=WAIT,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode("latin-1").endswith("mod?le\n")
