"""What the tests of benchmarks share: a task, a backend, and runs of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks import Example


class Quiet:
    """Counts what is done."""

    def __init__(self) -> None:
        self.measured = self.found = 0
        self.order: list[str] = []

    def begin(self, what: str) -> None:
        self.order.append(what)

    def aside(self, what: str) -> None:
        self.order.append(what)

    def done(self, tokens: int, measured: bool, *, unit: str | None = None, count: int = 1, **_: Any) -> None:
        if unit is None:  # groups, not their texts' scores
            self.measured += measured
            self.found += not measured

    def lost(self, amount: float, *, unit: str | None = None) -> None: ...


class Words:
    """A task whose texts are right if they are at least so long."""

    name, metric = "words", "length"

    def __init__(self, prompts: Sequence[str], tokens: int = 6) -> None:
        self._prompts, self._tokens = prompts, tokens

    def examples(self, limit: int | None) -> list[Example]:
        return [Example(str(i), text) for i, text in enumerate(self._prompts)][:limit]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [float(len(text.split()) >= self._tokens) for text in texts]


def plan_of(*rules: str, **more: Any) -> Plan:
    return Plan.from_values({"target": "tiny", "draft": "tinier", "tasks": ["words"], "rules": list(rules), **more})


def run(plan: Plan, folder: Path, backend: Any, task: Any) -> tuple[Store, Quiet]:
    store, progress = Store(folder, plan), Quiet()
    store.keep_plan()
    Runner(plan, plan.rules, [task], backend, store).run(progress)
    return store, progress


class Batched:
    """A backend of groups of two; it fails where it is told to."""

    name, group = "fake", 2

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails

    def check(self, options: Mapping[str, Any]) -> None: ...

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None: ...

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        if options["rule"] == self.fails and max_tokens > 8:
            raise RuntimeError("out of memory")
        text = "\u2028one\x85two"  # what Unicode takes for line ends is none in JSON lines
        return Group([Output(text + e.id, 4, "stop", 2, 5, 2, 0, {"exact": 2}, {1: 2}) for e in examples], 0.5)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [-1.0] * len(texts)


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"w{20 + i} w7 w9"}) + "\n" for i in range(count)))
    return path
