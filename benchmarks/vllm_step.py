"""What rules add to a vLLM step over strict: one engine, the rule switched per request, runs alternating.

    python benchmarks/vllm_step.py --data DIR --cells js:p=0.3 js:p=0.3:sampled --json results/vllm_step.json

A step is one call of the engine with a full batch that only decodes: draft, verification, verdicts. All texts
go on for the same number of tokens, so that the batch stays full. All of these are over strict's whole step:
`overhead_pct` is what the rejection sampler, verdicts included, takes longer under the rule than under strict;
`own_pct` what dropmatch's own code in it takes longer, without what vLLM's copies of the logits take now and then;
`step_ratio` compares whole steps, and has the noise of the models' forwards in it.
"""

from __future__ import annotations

import gc
import statistics
import sys
from typing import Any

from common import arguments, report, spread
from vllm_engine import CELLS, engine, read_prompts, run, settings_of, start_over_with_environment


def measure(llm: Any, prompts: list[str], batch: int, length: int, pairs: int, cells: list[str]) -> dict[str, Any]:
    """By cell: median step under it over median step of strict, turn by turn."""
    found: dict[str, list[dict[str, float]]] = {cell: [] for cell in cells}
    tokens = 8 * (length + 1)
    order = ["strict", *cells]
    for turn in range(pairs + 1):
        start = (turn * batch) % max(1, len(prompts) - batch + 1)
        chosen = prompts[start : start + batch]
        shift = turn % len(order)
        runs = {
            cell: run(llm, chosen, settings_of(cell), tokens, batch, ignore_eos=True)
            for cell in order[shift:] + order[:shift]
        }
        if turn == 0:
            continue  # warm-up
        strict = runs["strict"]
        step = statistics.median(strict.full_steps)
        for cell in cells:
            ours = runs[cell]
            extra = statistics.mean(ours.full_samplings) - statistics.mean(strict.full_samplings)
            own = statistics.mean(ours.full_verdicts) - statistics.mean(strict.full_verdicts)
            found[cell].append(
                {
                    "overhead_pct": 100 * extra / step,
                    "own_pct": 100 * own / step,
                    "step_ratio": statistics.median(ours.full_steps) / step,
                    "strict_step_seconds": step,
                    "acceptance_length": ours.acceptance_length,
                    "strict_acceptance_length": strict.acceptance_length,
                    "steps_per_run": len(ours.full_steps),
                }
            )
    return {cell: _figures(turns) for cell, turns in found.items()}


def _figures(turns: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: [turn[name] for turn in turns] for name in turns[0]}
    spreads = ("overhead_pct", "own_pct", "step_ratio", "strict_step_seconds")
    figures = {f"{name}_spread": spread(columns[name]) for name in spreads}
    return (
        {"overhead_pct": figures["overhead_pct_spread"]["median"]}
        | figures
        | {name: statistics.mean(values) for name, values in columns.items() if name not in spreads}
    )


def main() -> None:
    """Measure and report."""
    start_over_with_environment()
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("-L", "--draft-lengths", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--kinds", nargs="+", default=["gsm8k/dev", "mt_bench/all"])
    parser.add_argument("--cells", nargs="+", default=["js:p=0.3", "naive:p=0.3"], metavar="CELL", help=CELLS)
    options = parser.parse_args()
    if options.data is None:
        sys.exit("give --data, a folder with gsm8k/dev.jsonl and mt_bench/all.jsonl")
    cases: dict[str, Any] = {}
    for length in options.draft_lengths:
        llm = engine(options.target, options.draft, length, max(options.batches))
        for kind in options.kinds:
            prompts = [row["prompt"] for row in read_prompts(options.data, kind, 40)]
            for batch in options.batches:
                name = f"{kind.split('/')[0]} L={length} batch={batch}"
                found = measure(llm, prompts, batch, length, options.pairs, options.cells)
                for cell, figures in found.items():
                    cases[f"{cell} {name}"] = figures
                    print(cell, name, figures, flush=True)
        del llm
        gc.collect()
    report({"pairs": options.pairs, "cases": cases}, options.json)


if __name__ == "__main__":
    main()
