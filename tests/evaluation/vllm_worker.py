"""The process that runs vLLM, with an engine that takes it down where it is told to.

python vllm_worker.py FOLDER LENGTH STEPS < plan.json
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from bench_support import Batched

from dropmatch.evaluation.backends import EngineLost, Group, vllm
from dropmatch.evaluation.bench import worker
from dropmatch.evaluation.tasks import Example


class Mortal(Batched):
    """Is killed with `naive` once it has decoded a group, lost with `typical`, and killed when it reads `margin`'s."""

    def about(self) -> dict[str, Any]:
        return {"engine": "vllm", "cpu": "clockwork"}

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        if options["rule"] == "naive" and examples[0].id == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        if options["rule"] == "typical":
            raise EngineLost("EngineDeadError: the GPU has fallen off the bus")
        group = super().generate(examples, options, max_tokens)
        for output in group.outputs:
            object.__setattr__(output, "text", f"{options['rule']} {output.text}")
        return group

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        if texts[0].startswith("margin"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().log_likelihoods(examples, texts)


if __name__ == "__main__":
    vllm.VLLM.load = lambda *args: Mortal()  # type: ignore[assignment,method-assign]
    vllm.longest = lambda *args: 64  # type: ignore[assignment]
    worker.main()
