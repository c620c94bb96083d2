"""Problems of our own, and answers to them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from dropmatch.evaluation.tasks.humaneval import Limits

QUICK = Limits(input_seconds=0.5, program_seconds=1.0)

ADD = {
    "prompt": 'def add(a: int, b: int) -> int:\n    """Add two numbers.\n    >>> add(1, 2)\n    3\n    """\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "base_input": [[1, 2], [0, 0]],
    "plus_input": [[-5, 2]],
    "atol": 0,
}
HALVE = {
    "prompt": 'from typing import List\n\n\ndef halve(xs: List[float]) -> List[float]:\n    """Halve each."""\n',
    "entry_point": "halve",
    "canonical_solution": "    return [x / 2 for x in xs]\n",
    "base_input": [[[1.0, 3.0]], [[]]],
    "plus_input": [],
    "atol": 1e-6,
}
# EvalPlus knows this problem by its function's name, and judges it by what it puts into the polynomial
ZERO = {
    "prompt": 'def find_zero(xs: list):\n    """A zero of the polynomial with these coefficients; there are two."""\n',
    "entry_point": "find_zero",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "base_input": [[[4, 2]], [[-3, 1]]],
    "plus_input": [[[5, 10]]],
    "atol": 1e-4,
}
PROBLEMS = {"T/0": ADD, "T/1": HALVE, "T/2": ZERO}


def ours(name: str, problem: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in problem.items() if key != "prompt"}
    return {"id": name, "task": "humaneval_plus", "prompt": problem["prompt"], "answer": "", "meta": rest}


def write(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


RIGHT = ADD["prompt"] + ADD["canonical_solution"]


def body(lines: str) -> str:
    """A right answer that first does something else, and does not mind if it cannot."""
    inner = "\n".join("        " + line for line in lines.strip().splitlines())
    return f"def add(a, b):\n    try:\n{inner}\n    except Exception:\n        pass\n    return a + b\n"
