"""What the vLLM benchmarks share: the engine in this process, and one run with one setting."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import spread
from dropmatch.engines.vllm.environment import require_vllm, wanted
from dropmatch.rule_text import parse_rule

INSTRUCTION = "\nSolve it briefly, step by step, and end with a line 'Answer: <number>'."
CELLS = "RULE[:NAME=VALUE]... as in `dropmatch bench`: js:p=0.3, js:p=0.3:token_floor=0, js:p=0.3:sampled:mask_seed=1"


def settings_of(cell: str) -> dict[str, Any]:
    """Flat keys of a request for a cell, as CELLS says."""
    options = parse_rule(cell)
    return {"dropmatch": options.pop("rule")} | {f"dropmatch_{name}": value for name, value in options.items()}


def start_over_with_environment() -> None:
    """Run this script again with the variables that vLLM wants, some of which are read at start only."""
    if os.environ.get("DROPMATCH_BENCHMARK") != "1":
        more = wanted(os.environ, require_vllm())
        more |= {"DROPMATCH_BENCHMARK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **more})


def engine(target: str, draft: str | None, draft_length: int, batch: int, **more: Any) -> Any:
    """vLLM's LLM with a draft model, eager, in this process."""
    from vllm import LLM

    from dropmatch import models

    return LLM(
        str(models.fetch(target)),
        speculative_config={
            "method": "draft_model",
            "model": str(models.fetch(draft or models.default_draft(target) or "")),
            "num_speculative_tokens": draft_length,
        },
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=batch,
        disable_log_stats=False,
        per_request_spec_decode_metrics="summary",
        **more,
    )


@dataclass
class Run:
    """One run over all prompts with one setting.

    Attributes:
        texts, token_ids, finish: by prompt.
        seconds: wall time.
        full_steps: seconds of each step in which the batch was full and nothing was prefilled.
        full_samplings: seconds that the rejection sampler took in each of them, verdicts included.
        full_verdicts: seconds of it in dropmatch's own code.
        accepted, rounds, lossy: over all prompts.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    seconds: float = 0.0
    full_steps: list[float] = field(default_factory=list)
    full_samplings: list[float] = field(default_factory=list)
    full_verdicts: list[float] = field(default_factory=list)
    accepted: int = 0
    rounds: int = 0
    lossy: int = 0

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Prefill included."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds."""
        return 1.0 + self.accepted / max(1, self.rounds)


def run(llm: Any, prompts: list[str], settings: dict[str, Any], max_tokens: int, batch: int, **sampling: Any) -> Run:
    """Decode all prompts, at most `batch` at once.

    settings: flat dropmatch keys, as a request has them.
    """
    from vllm import SamplingParams

    from dropmatch.engines.vllm import verifier

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling}, extra_args=dict(settings))
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    engine = llm.llm_engine
    step, found = engine.step, Run()
    core = engine.engine_core.engine_core
    sampler = core.model_executor.driver_worker.worker.model_runner.rejection_sampler
    clock: dict[str, float] = defaultdict(float)  # seconds of this step

    def timed() -> Any:
        running = core.scheduler.running
        decodes = len(running) == batch and all(request.num_output_tokens for request in running)
        clock.clear()
        start = time.perf_counter()
        outputs = step()
        if decodes and len(running) == batch:
            found.full_steps.append(time.perf_counter() - start)
            found.full_samplings.append(clock["sampler"])
            found.full_verdicts.append(
                clock["sampler"] - clock["vllm_sampler"] + clock["verify"] - clock["vllm_rejection_sample"]
            )
        return outputs

    engine.step = timed
    llm.reset_prefix_cache()  # else the first setting on some prompts would read them for all that follow
    try:
        with (
            _timed(type(sampler), "forward", clock, "sampler"),
            _timed(type(sampler).__base__, "forward", clock, "vllm_sampler"),
            _timed(verifier.Verifier, "verify", clock, "verify"),
            _timed(verifier, "_rejection_sample", clock, "vllm_rejection_sample"),
        ):
            start = time.perf_counter()
            outputs = llm.chat(chats, params, use_tqdm=False)
            found.seconds = time.perf_counter() - start
    finally:
        engine.step = step
    for output in outputs:
        completion = output.outputs[0]
        found.texts.append(completion.text)
        found.token_ids.append(list(completion.token_ids))
        found.finish.append(completion.finish_reason)
        if completion.spec_decode_metrics is not None:
            counts = completion.spec_decode_metrics.to_dict()["dropmatch"]
            found.accepted += counts["accepted_tokens"]
            found.rounds += counts["rounds"]
            found.lossy += counts["lossy_tokens"]
    return found


@contextmanager
def _timed(owner: Any, name: str, clock: dict[str, float], key: str) -> Iterator[None]:
    """While active, add up the seconds of a function."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            clock[key] += time.perf_counter() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def read_prompts(data: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Rows of a set below the data folder ("gsm8k/dev", "mt_bench/all", "spec_bench/dev")."""
    lines = (Path(data) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        sys.exit(f"{name}: {count} prompts are asked for and {len(lines)} are there")
    return [json.loads(line) for line in lines[:count]]


def ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Spread of the ratios of pairs of runs."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
