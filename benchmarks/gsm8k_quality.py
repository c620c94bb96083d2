"""GSM8K accuracy of lossy rules against strict decoding, paired question by question.

A sampled rule is partly a lottery on a small target: give several --mask-seeds, and read the interval.

    python benchmarks/gsm8k_quality.py --data DIR --questions 40 --rules js --json results/gsm8k.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from common import arguments, chat, engine, report
from dropmatch.engines.hf.engine import Engine

INSTRUCTION = "\nSolve it briefly, step by step, and end with a line 'Answer: <number>'."
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def answer_of(text: str) -> str | None:
    """The last number after "Answer:", else the last number of the text, without commas and trailing zeros."""
    tail = text.rsplit("Answer:", 1)[-1] if "Answer:" in text else text
    found = NUMBER.findall(tail) or NUMBER.findall(text)
    if not found:
        return None
    value = float(found[0 if "Answer:" in text else -1].replace(",", "").replace("$", ""))
    return f"{value:g}"


def degenerate(text: str, tokens: int = 40) -> bool:
    """Whether the end of the text repeats itself: its last words stand at least four times in a row."""
    words = text.split()
    for size in range(1, tokens // 4 + 1):
        tail = words[-size:]
        if len(words) >= 4 * size and all(words[-(i + 1) * size : len(words) - i * size] == tail for i in range(4)):
            return True
    return False


def paired(base: list[bool], other: list[bool]) -> dict[str, Any]:
    """Exact McNemar test of two settings on the same questions, and the interval of the difference it implies."""
    lost = sum(a and not b for a, b in zip(base, other, strict=True))
    gained = sum(b and not a for a, b in zip(base, other, strict=True))
    test = binomtest(gained, lost + gained) if lost + gained else None
    interval = test.proportion_ci() if test else None
    scale = 100 * (lost + gained) / len(base)
    return {
        "lost": lost,
        "gained": gained,
        "mcnemar_p": test.pvalue if test else 1.0,
        "difference_pct": 100 * (gained - lost) / len(base),
        "difference_pct_95ci": [scale * (2 * end - 1) for end in (interval.low, interval.high)] if interval else None,
    }


def run(pair: Engine, rows: list[dict[str, Any]], tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Decode all questions with one setting."""
    right, accepted, rounds, truncated, loops, seconds, generated, lossy = [], 0, 0, 0, 0, 0.0, 0, 0
    for i, row in enumerate(rows):
        result = pair.generate(chat(row["prompt"] + INSTRUCTION), max_tokens=tokens, **settings)
        stats = result.statistics
        right.append(answer_of(result.text) == f"{float(row['meta']['final']):g}")
        accepted, rounds, seconds = accepted + stats.accepted, rounds + stats.rounds, seconds + stats.seconds
        generated, lossy = generated + stats.generated, lossy + stats.lossy
        truncated += result.finish_reason == "length"
        loops += degenerate(result.text)
        if sys.stderr.isatty():
            print(f"\r{settings} {i + 1}/{len(rows)} right {sum(right)}", end="", file=sys.stderr, flush=True)
    figures = {
        **settings,
        "accuracy_pct": 100 * sum(right) / len(right),
        "acceptance_length": 1 + accepted / rounds,
        "truncated": truncated,
        "degenerate": loops,
        "lossy_share": lossy / generated,
        "tokens_per_second": generated / seconds,
        "right": right,
    }
    print({name: value for name, value in figures.items() if name != "right"}, flush=True)
    return figures


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--rules", nargs="+", default=["js"])
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.3])
    parser.add_argument("--mask-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("-L", "--draft-length", type=int, default=5)
    options = parser.parse_args()
    if options.data is None:
        sys.exit("GSM8K is not part of the package: give --data, a folder with gsm8k/dev.jsonl")
    lines = (Path(options.data) / "gsm8k/dev.jsonl").read_text().splitlines()[: options.questions]
    rows = [json.loads(line) for line in lines]

    pair = engine(options)
    pair.generate(chat("Hello"), max_tokens=16)
    base = run(pair, rows, options.max_tokens, {"rule": "strict", "draft_length": options.draft_length})
    cells = []
    for rule in options.rules:
        for dropout in options.dropout:
            for seed in options.mask_seeds:
                settings = {
                    "rule": rule,
                    "heads": options.heads,
                    "dropout": dropout,
                    "mask_seed": seed,
                    "draft_length": options.draft_length,
                }
                cell = run(pair, rows, options.max_tokens, settings)
                cell |= paired(base["right"], cell["right"])
                cells.append(cell)
    report({"questions": len(rows), "max_tokens": options.max_tokens, "strict": base, "lossy": cells}, options.json)


if __name__ == "__main__":
    main()
