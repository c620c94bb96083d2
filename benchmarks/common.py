"""What the benchmarks share: arguments, prompts, the demo pair, medians, the report."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dropmatch
from dropmatch.engines.hf.engine import Engine
from dropmatch.environment import machine, versions

MATHS = [
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. Each roll costs $0.75. "
    "How much money does the baker take in a day?",
    "Tom reads 18 pages a day for 5 days, then 25 pages a day until his 240-page book is finished. "
    "How many days does he need in all?",
    "A tank holds 360 litres. One pipe fills it at 12 litres a minute while a leak loses 3 litres a minute. "
    "How long does it take to fill the empty tank?",
    "Three friends share a restaurant bill of $84 so that Ann pays half as much as Ben, and Ben as much as Cem. "
    "How much does each pay?",
    "A train leaves at 9:40 and covers 210 km at 84 km/h. When does it arrive?",
]
PROSE = [
    "Explain to a curious teenager why the sky is blue and sunsets are red.",
    "Write a short blog post about a weekend in a small harbour town.",
    "What are the advantages and disadvantages of working from home?",
    "Describe how bread is made, from the field to the table.",
    "Write a letter to a friend who is thinking about learning to play the cello.",
]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default="demo:qwen2.5-coder", help="target model")
    parser.add_argument("--draft", default=None, help="draft model; default: the demo target's own")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("DROPMATCH_DATA"),
        help="folder with gsm8k/dev.jsonl and chat/vicuna80.jsonl; without it, a few built-in prompts",
    )
    return parser


def prompts(data: Path | str | None, kind: str, count: int) -> list[str]:
    """Prompts of a kind ("maths" or "prose"), from the data folder or the built-in ones."""
    if data is None:
        found = MATHS if kind == "maths" else PROSE
    else:
        file = Path(data) / ("gsm8k/dev.jsonl" if kind == "maths" else "chat/vicuna80.jsonl")
        found = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    if len(found) < count:
        sys.exit(f"{kind}: {count} prompts are asked for and {len(found)} are there; give --data or ask for fewer")
    return found[:count]


def chat(prompt: str) -> list[dict[str, str]]:
    """A prompt as a conversation of one message."""
    return [{"role": "user", "content": prompt}]


def engine(options: argparse.Namespace) -> Engine:
    """The engine that the options name."""
    return dropmatch.load(options.target, options.draft)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of values."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": statistics.median(ordered), "quartiles": [quartiles[0], quartiles[2]], "n": len(ordered)}


def report(figures: dict[str, Any], file: Path | None) -> None:
    """Print the figures and, if asked for, keep them."""
    figures["environment"] = {**versions(), **machine("cuda" if torch.cuda.is_available() else "cpu")}
    text = json.dumps(figures, indent=2)
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
