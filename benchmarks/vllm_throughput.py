"""Tokens per second of lossy rules over strict in vLLM, with GSM8K accuracy from the same runs.

    python benchmarks/vllm_throughput.py --data DIR --kind gsm8k --prompts 100 --batch 10 \
        --cells js:p=0.3 js:p=0.3:token_floor=0 naive:p=0.3 --json results/vllm_gsm8k.json

One engine; every cell decodes the same prompts, in groups of twice the batch, the cells in rotating order within
a group. A ratio is that of one group; the figures are medians over groups. Finished groups are kept in FILE.jsonl,
and a run that was stopped goes on after them.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import arguments, report
from gsm8k_quality import answer_of, degenerate, paired
from vllm_engine import CELLS, INSTRUCTION, engine, ratio, read_prompts, run, settings_of, start_over_with_environment

SETS = {"gsm8k": ("gsm8k/dev",), "prose": ("mt_bench/all", "spec_bench/dev")}


def rows_of(data: Path, kind: str, count: int) -> list[dict[str, Any]]:
    """Rows of a kind; prose takes them from its sets in turn."""
    names = SETS[kind]
    share = -(-count // len(names))
    sets = [read_prompts(data, name, share) for name in names]
    return [row for rows in zip(*sets, strict=True) for row in rows][:count]


def group_record(llm: Any, rows: list[dict[str, Any]], cell: str, options: Any) -> dict[str, Any]:
    """One cell on one group of prompts."""
    maths = options.kind == "gsm8k"
    prompts = [row["prompt"] + (INSTRUCTION if maths else "") for row in rows]
    found = run(llm, prompts, settings_of(cell), options.max_tokens, options.batch)
    return {
        "cell": cell,
        "ids": [row["id"] for row in rows],
        "seconds": found.seconds,
        "tokens": found.tokens,
        "accepted": found.accepted,
        "rounds": found.rounds,
        "lossy": found.lossy,
        "truncated": sum(reason == "length" for reason in found.finish),
        "degenerate": sum(map(degenerate, found.texts)),
        "right": [answer_of(t) == f"{float(r['meta']['final']):g}" for t, r in zip(found.texts, rows, strict=True)]
        if maths
        else None,
        "texts": found.texts,
    }


def figures(records: list[dict[str, Any]], cells: list[str]) -> dict[str, Any]:
    """Speed against strict, acceptance, and accuracy where there is one."""
    by_cell = {cell: [r for r in records if r["cell"] == cell] for cell in cells}
    result = {}
    for cell, mine in by_cell.items():
        base = by_cell["strict"][: len(mine)]
        speed, base_speed = ([r["tokens"] / r["seconds"] for r in each] for each in (mine, base))
        entry: dict[str, Any] = {
            "over_strict": ratio(speed, base_speed),
            "tokens_per_second": statistics.median(speed),
            "acceptance_length": 1 + sum(r["accepted"] for r in mine) / sum(r["rounds"] for r in mine),
            "lossy_share": sum(r["lossy"] for r in mine) / sum(r["tokens"] for r in mine),
            "prompts": sum(len(r["ids"]) for r in mine),
            "tokens": sum(r["tokens"] for r in mine),
            "truncated": sum(r["truncated"] for r in mine),
            "degenerate": sum(r["degenerate"] for r in mine),
        }
        if mine[0]["right"] is not None:
            right, base_right = ([yes for r in each for yes in r["right"]] for each in (mine, base))
            entry["accuracy_pct"] = 100 * sum(right) / len(right)
            entry |= paired(base_right, right) if cell != "strict" else {}
        result[cell] = entry
    return result


def main() -> None:
    """Measure and report."""
    start_over_with_environment()
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=sorted(SETS), default="prose")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--group", type=int, help="prompts per group; default: twice the batch")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("-L", "--draft-length", type=int, default=5)
    parser.add_argument("--cells", nargs="+", default=["js:p=0.3", "naive:p=0.3"], metavar="CELL", help=CELLS)
    options = parser.parse_args()
    if options.data is None or options.json is None:
        sys.exit("give --data, a folder with the prompt sets, and --json FILE")
    cells = ["strict", *options.cells]
    rows = rows_of(options.data, options.kind, options.prompts)
    size = options.group or 2 * options.batch

    options.json.parent.mkdir(parents=True, exist_ok=True)
    raw = options.json.with_suffix(".jsonl")
    records = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    done = {(record["cell"], tuple(record["ids"])) for record in records}

    llm = engine(options.target, options.draft, options.draft_length, options.batch)
    run(llm, ["Hello"] * options.batch, {"dropmatch": "naive"}, 16, options.batch)  # warm-up
    for number, start in enumerate(range(0, len(rows), size)):
        group = rows[start : start + size]
        turn = number % len(cells)
        for cell in cells[turn:] + cells[:turn]:
            if (cell, tuple(row["id"] for row in group)) in done:
                continue
            record = group_record(llm, group, cell, options)
            records.append(record)
            with raw.open("a") as file:
                file.write(json.dumps(record) + "\n")
            speed = record["tokens"] / record["seconds"]
            print(f"group {number + 1}: {cell} {speed:.1f} tokens/s, {sum(record['right'] or [])} right", flush=True)
    setting = {name: str(value) for name, value in vars(options).items() if name != "json"}
    report({"settings": setting, "cells": figures(records, cells)}, options.json)


if __name__ == "__main__":
    main()
