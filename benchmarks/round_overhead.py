"""What a rule adds to a strict round; whether the shortlist judges like the full vocabulary; peak memory.

Overhead: the pair decodes strictly, and in every round the same block is verified twice, by `strict` and by
the rule, in alternating order; only the strict verdict is committed. So both are timed on the same state, a
fraction of a second apart. `overhead_pct` is the extra time over the time of the whole strict round (draft,
target forward, strict verification), a median over prompts.

    python benchmarks/round_overhead.py --data DIR --json results/round_overhead.json
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch

from common import arguments, chat, engine, prompts, report, spread
from dropmatch.acceptance import Evidence, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.decoding import loop
from dropmatch.decoding.verify import Outcome, verify
from dropmatch.engines.hf.engine import Engine
from dropmatch.heads import common_vocab

STRICT = AcceptanceConfig(rule="strict")
WAYS: dict[str, dict[str, Any]] = {
    "js-shortlist": {"rule": "js", "support": "shortlist"},
    "naive-shortlist": {"rule": "naive", "support": "shortlist"},
    "js-full": {"rule": "js", "support": "full"},
    "js-gaussian": {"rule": "js", "verdict": "sampled", "heads_mode": "gaussian"},
    "js-denoised": {"rule": "js", "verdict": "denoised"},
    "js-denoised-no-floor": {"rule": "js", "verdict": "denoised", "token_floor": 0.0},
    "naive-denoised": {"rule": "naive", "verdict": "denoised"},
    "naive-denoised-no-floor": {"rule": "naive", "verdict": "denoised", "token_floor": 0.0},
}


class PairedTimer:
    """Stands in for `verify`: times a strict and a lossy verification of each block, and commits the strict one."""

    def __init__(self, config: AcceptanceConfig) -> None:
        self.config, self.strict_first = config, True
        self.extra = self.strict = 0.0
        self.judged = self.rounds = 0

    def __call__(
        self, draft: Any, logits: Any, hidden: Any, sequence: Any, chooser: Any, _: Any, head: Any, observer: Any
    ) -> Outcome:
        outcomes, seconds = {}, {}
        order = (STRICT, self.config) if self.strict_first else (self.config, STRICT)
        for config in order:
            began = time.perf_counter()
            outcomes[config.rule] = verify(draft, logits, hidden, sequence, chooser, config, head)
            seconds[config.rule] = time.perf_counter() - began
        self.strict_first = not self.strict_first
        self.strict += seconds["strict"]
        self.extra += seconds[self.config.rule] - seconds["strict"]
        self.judged += sum(entry.probability is not None for entry in outcomes[self.config.rule].trace)
        self.rounds += 1
        return outcomes["strict"]


def overhead(pair: Engine, kind: str, texts: list[str], length: int, config: AcceptanceConfig, tokens: int) -> Any:
    """`overhead_pct` of one case."""
    percents, judged, rounds, round_ms = [], 0, 0, []
    for text in texts:
        timer = PairedTimer(config)
        loop.verify = timer  # type: ignore[assignment]
        try:
            stats = pair.generate(chat(text), rule="strict", draft_length=length, max_tokens=tokens).statistics
        finally:
            loop.verify = verify
        strict_rounds = stats.draft_seconds + stats.verify_seconds + timer.strict
        percents.append(100 * timer.extra / strict_rounds)
        round_ms.append(1000 * strict_rounds / timer.rounds)
        judged, rounds = judged + timer.judged, rounds + timer.rounds
    figures = spread(percents)
    return {
        "prompts": kind,
        "L": length,
        "rule": config.rule,
        "verdict": config.verdict,
        "heads_mode": config.heads_mode,
        "support": config.support,
        "K": config.heads,
        "p": config.dropout,
        "overhead_pct": figures["median"],
        "quartiles": figures["quartiles"],
        "pairs": rounds,
        "n_prompts": len(texts),
        "judged_rows_per_round": judged / rounds,
        "strict_round_ms": spread(round_ms)["median"],
    }


class RowKeeper:
    """Stands in for `verify`: compares the two supports on every draft row, and commits the strict verdict."""

    def __init__(self, heads: int, dropout: float, size: int) -> None:
        self.configs = {
            support: AcceptanceConfig(
                rule="js", heads=heads, dropout=dropout, support=support, shortlist_size=size, evaluation="eager"
            )
            for support in ("shortlist", "full")
        }
        self.rows = self.alike = self.mismatched = self.mismatched_alike = 0

    def __call__(
        self, draft: Any, logits: Any, hidden: Any, sequence: Any, chooser: Any, _: Any, head: Any, observer: Any
    ) -> Outcome:
        n = draft.tokens.shape[0]
        if n:
            start = sequence.shape[0] - n
            positions = torch.arange(start, start + n)
            clean = logits[:n].float().argmax(dim=-1)
            evidence = Evidence(
                hidden[:n],
                logits[:n],
                draft.tokens,
                clean,
                torch.full_like(positions, chooser.seed),
                positions,
                draft.logits,
            )
            verdicts = {support: judge(evidence, config, head).accept for support, config in self.configs.items()}
            same = verdicts["shortlist"] == verdicts["full"]
            differs = draft.tokens != clean
            self.rows, self.alike = self.rows + n, self.alike + int(same.sum())
            self.mismatched += int(differs.sum())
            self.mismatched_alike += int((same & differs).sum())
        return verify(draft, logits, hidden, sequence, chooser, STRICT, head)


def agreement(pair: Engine, texts: list[str], rows: int, tokens: int, keeper: RowKeeper) -> Any:
    """`agreement_pct` over at least `rows` draft rows."""
    loop.verify = keeper  # type: ignore[assignment]
    try:
        for seed, text in enumerate(texts):
            if keeper.rows >= rows:
                break
            pair.generate(chat(text), rule="strict", draft_length=5, max_tokens=tokens, seed=seed)
    finally:
        loop.verify = verify
    return {
        "agreement_pct": 100 * keeper.alike / keeper.rows,
        "rows": keeper.rows,
        "agreement_pct_where_draft_differs": 100 * keeper.mismatched_alike / max(1, keeper.mismatched),
        "rows_where_draft_differs": keeper.mismatched,
        "shortlist_size": keeper.configs["shortlist"].shortlist_size,
    }


def peak_extra_mib(pair: Engine, support: str) -> float:
    """Growth of the resident set's peak during one verdict on 50 rows; Linux only."""
    generator = torch.Generator().manual_seed(0)
    head = pair.head
    model_width = pair.model.config.get_text_config().hidden_size
    hidden = torch.randn(50, model_width, generator=generator).to(pair.model.dtype)
    with torch.inference_mode():
        clean = head.full(hidden)
        draft = clean.float() + torch.randn(clean.shape, generator=generator)
        evidence = Evidence(
            hidden, clean, draft.argmax(-1), clean.argmax(-1), torch.zeros(50).long(), torch.arange(50), draft
        )
        assert common_vocab(evidence) == head.vocab_size
        config = AcceptanceConfig(rule="js", support=support)
        judge(evidence.rows(slice(0, 2)), config, head)  # one-time buffers of the kernels
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory that an earlier verdict freed would hide the growth
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _status("VmHWM")
        judge(evidence, config, head)
        return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """A field of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=5, help="prompts per case")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per prompt, overhead")
    parser.add_argument("--rows", type=int, default=5000, help="draft rows for the agreement; 0 leaves it out")
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--shortlist-size", type=int, default=AcceptanceConfig.shortlist_size)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    pair = engine(options)
    pair.generate(chat("Hello"), max_tokens=16)

    cases = []
    for way in options.ways:
        config = AcceptanceConfig(
            **WAYS[way],
            heads=options.heads,
            dropout=options.dropout,
            shortlist_size=options.shortlist_size,
        )
        for length in (5, 10):
            for kind in ("maths", "prose"):
                texts = prompts(options.data, kind, options.prompts)
                cases.append(overhead(pair, kind, texts, length, config, options.max_tokens))
                print(cases[-1], flush=True)

    figures: dict[str, Any] = {"overhead": cases}
    if options.rows:
        keeper = RowKeeper(options.heads, options.dropout, options.shortlist_size)
        most = 5 if options.data is None else 40
        texts = [t for two in zip(*(prompts(options.data, kind, most) for kind in ("maths", "prose"))) for t in two]
        figures["agreement"] = agreement(pair, texts, options.rows, 256, keeper)
        figures["peak_extra_mib"] = {support: peak_extra_mib(pair, support) for support in ("shortlist", "full")}
    report(figures, options.json)


if __name__ == "__main__":
    main()
