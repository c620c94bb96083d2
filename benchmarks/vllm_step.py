"""What a rule adds to a vLLM step over strict: one engine, the rule switched per request, runs alternating.

    python benchmarks/vllm_step.py --data DIR --json results/vllm_step.json

A step is one call of the engine with a full batch that only decodes: draft, verification, verdicts. All texts
go on for the same number of tokens, so that the batch stays full. `overhead_pct` is what the rejection sampler,
verdicts included, takes longer under the rule than under strict, over strict's whole step; `step_ratio` compares
whole steps, and has the noise of the models' forwards in it.
"""

from __future__ import annotations

import gc
import statistics
import sys
from typing import Any

from common import arguments, report, spread
from vllm_engine import engine, read_prompts, run, start_over_with_environment


def measure(
    llm: Any, prompts: list[str], batch: int, length: int, pairs: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Median step of the rule over median step of strict, pair by pair."""
    ratios, overheads, strict_steps, counts = [], [], [], []
    tokens = 8 * (length + 1)
    for pair in range(pairs + 1):
        start = (pair * batch) % max(1, len(prompts) - batch + 1)
        chosen = prompts[start : start + batch]
        order = [{"dropmatch": "strict"}, settings]
        runs = {}
        for each in order if pair % 2 else order[::-1]:
            runs[each["dropmatch"]] = run(llm, chosen, each, tokens, batch, ignore_eos=True)
        if pair == 0:
            continue  # warm-up
        theirs = statistics.median(runs["strict"].full_steps)
        ours = runs[settings["dropmatch"]]
        ratios.append(statistics.median(ours.full_steps) / theirs)
        extra = statistics.mean(ours.full_samplings) - statistics.mean(runs["strict"].full_samplings)
        overheads.append(100 * extra / theirs)
        strict_steps.append(theirs)
        counts.append((ours.acceptance_length, runs["strict"].acceptance_length, len(ours.full_steps)))
    return {
        "overhead_pct": statistics.median(overheads),
        "overhead_pct_spread": spread(overheads),
        "step_ratio": spread(ratios),
        "strict_step_seconds": spread(strict_steps),
        "acceptance_length": statistics.mean(c[0] for c in counts),
        "strict_acceptance_length": statistics.mean(c[1] for c in counts),
        "steps_per_run": statistics.mean(c[2] for c in counts),
    }


def main() -> None:
    """Measure and report."""
    start_over_with_environment()
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("-L", "--draft-lengths", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--kinds", nargs="+", default=["gsm8k/dev", "mt_bench/all"])
    parser.add_argument("--rule", default="js")
    parser.add_argument("-K", "--heads", type=int, default=5)
    parser.add_argument("-p", "--dropout", type=float, default=0.3)
    options = parser.parse_args()
    if options.data is None:
        sys.exit("give --data, a folder with gsm8k/dev.jsonl and mt_bench/all.jsonl")
    settings = {"dropmatch": options.rule, "dropmatch_heads": options.heads, "dropmatch_dropout": options.dropout}
    cases: dict[str, Any] = {}
    for length in options.draft_lengths:
        llm = engine(options.target, options.draft, length, max(options.batches))
        for kind in options.kinds:
            prompts = [row["prompt"] for row in read_prompts(options.data, kind, 40)]
            for batch in options.batches:
                name = f"{kind.split('/')[0]} L={length} batch={batch}"
                cases[name] = measure(llm, prompts, batch, length, options.pairs, settings)
                print(name, cases[name], flush=True)
        del llm
        gc.collect()
    report({"settings": settings, "pairs": options.pairs, "cases": cases}, options.json)


if __name__ == "__main__":
    main()
