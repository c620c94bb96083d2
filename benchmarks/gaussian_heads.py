"""Gaussian heads against dropout heads on real rows: the same rule? at what cost? and how much noise is left?

Rows are those where the draft first differs from the clean token while the pair decodes strictly. Each is judged
with many seeds by dropout heads and by Gaussian heads, and once denoised.

    python benchmarks/gaussian_heads.py --data DIR --rows 600 --json results/gaussian_heads.json --figure FILE.svg
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import arguments, chat, engine, prompts, report, spread
from dropmatch.acceptance import Evidence, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.decoding import loop
from dropmatch.decoding.verify import Outcome, verify
from dropmatch.engines.hf.engine import Engine
from dropmatch.heads import Head

STRICT = AcceptanceConfig(rule="strict")


class Collector:
    """Stands in for `verify`: keeps the first row of each block where the draft differs from the clean token."""

    def __init__(self) -> None:
        self.rows: list[Evidence] = []

    def __call__(
        self, draft: Any, logits: Any, hidden: Any, sequence: Any, chooser: Any, _: Any, head: Any, observer: Any
    ) -> Outcome:
        n = draft.tokens.shape[0]
        clean = logits[:n].float().argmax(dim=-1)
        differs = (draft.tokens != clean).nonzero().flatten()[:1]
        if len(differs):
            positions = torch.arange(sequence.shape[0] - n, sequence.shape[0])
            seeds = torch.full_like(positions, chooser.seed)
            row = Evidence(hidden[:n], logits[:n], draft.tokens, clean, seeds, positions, draft.logits.bfloat16())
            self.rows.append(row.rows(differs))
        return verify(draft, logits, hidden, sequence, chooser, STRICT, head)


def collect(pair: Engine, texts: list[str], count: int, tokens: int) -> Evidence:
    """At least `count` rows, if the texts have them."""
    keeper = Collector()
    loop.verify = keeper  # type: ignore[assignment]
    try:
        for seed, text in enumerate(texts):
            if len(keeper.rows) >= count:
                break
            pair.generate(chat(text), rule="strict", draft_length=5, max_tokens=tokens, seed=seed)
    finally:
        loop.verify = verify
    names = ("hidden", "clean_logits", "draft_tokens", "clean_tokens", "seeds", "positions", "draft_logits")
    return Evidence(**{name: torch.cat([getattr(row, name) for row in keeper.rows]) for name in names})


@dataclass
class Judged:
    """What one way to make heads says about N rows.

    Attributes:
        probability: [N] share of seeds that accept.
        disagreement: share of rows on which two seeds disagree, over all pairs of seeds.
    """

    probability: torch.Tensor
    disagreement: float


def over_seeds(rows: Evidence, config: AcceptanceConfig, head: Head, seeds: int) -> Judged:
    """The rule with many seeds."""
    each = torch.stack([judge(rows, replace(config, mask_seed=s), head).accept for s in range(seeds)]).float()
    share = each.mean(dim=0)  # [N]
    # over pairs of different seeds: 2 q (1 - q) n / (n - 1)
    disagreement = (2 * share * (1 - share) * seeds / (seeds - 1)).mean().item()
    return Judged(share, disagreement)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def liked(rows: Evidence, weight: torch.Tensor) -> dict[str, float]:
    """What the target gives the accepted tokens: mean probability, and share below 0.05; weight [N] in [0, 1]."""
    log_z = torch.logsumexp(rows.clean_logits.float(), dim=1)
    logit = rows.clean_logits.float().gather(1, rows.draft_tokens[:, None]).squeeze(1)
    p, total = (logit - log_z).exp(), weight.sum()
    return {
        "mean_target_probability": float((weight * p).sum() / total),
        "share_below_0.05": float((weight * (p < 0.05)).sum() / total),
    }


def effective_units(rows: Evidence, weight: torch.Tensor) -> dict[str, Any]:
    """How many units carry the difference between draft and clean logit: (Σ a²)² / Σ a⁴, a = h ⊙ (w_ŷ - w_y)."""
    gap = weight[rows.draft_tokens].float() - weight[rows.clean_tokens].float()  # [N, d]
    a = (rows.hidden.float() * gap) ** 2
    return spread((a.sum(dim=1) ** 2 / (a**2).sum(dim=1)).tolist())


def compare(rows: Evidence, rule: str, heads: int, dropout: float, head: Head, seeds: int) -> dict[str, Any]:
    """One rule on the rows of one kind."""
    base = AcceptanceConfig(rule=rule, verdict="sampled", heads=heads, dropout=dropout, token_floor=0.0)
    by_dropout = over_seeds(rows, base, head, seeds)
    by_gaussian = over_seeds(rows, replace(base, heads_mode="gaussian"), head, seeds)
    figures: dict[str, Any] = {
        "rows": len(rows),
        "dropout": {
            "acceptance": by_dropout.probability.mean().item(),
            "two_seeds_disagree": by_dropout.disagreement,
            **liked(rows, by_dropout.probability),
        },
        "gaussian": {
            "acceptance": by_gaussian.probability.mean().item(),
            "correlation": correlation(by_gaussian.probability, by_dropout.probability),
            "two_seeds_disagree": by_gaussian.disagreement,
        },
    }
    for m in (base.gaussian_tokens, 128):
        config = replace(base, verdict="denoised", gaussian_tokens=m)
        verdict = judge(rows, config, head)
        again = judge(replace(rows, seeds=rows.seeds + 1), config, head)
        figures[f"denoised m={m}"] = {
            "acceptance": verdict.accept.float().mean().item(),
            "mean_frequency": verdict.frequency.mean().item(),
            "correlation": correlation(verdict.frequency, by_dropout.probability),
            "two_seeds_disagree": float((again.accept != verdict.accept).float().mean()),
            "agrees_with_dropout_majority": float((verdict.accept == (by_dropout.probability >= 0.5)).float().mean()),
            **liked(rows, verdict.accept.float()),
        }
        if m == base.gaussian_tokens:
            figures["_points"] = (by_dropout.probability.tolist(), verdict.frequency.tolist())
    return figures


def milliseconds(rows: Evidence, head: Head, repeats: int) -> dict[str, Any]:
    """Time of a verdict on one row, by turns."""
    ways = {
        "js, dropout": AcceptanceConfig("js", verdict="sampled"),
        "js, gaussian": AcceptanceConfig("js", verdict="sampled", heads_mode="gaussian"),
        "js, denoised": AcceptanceConfig("js", verdict="denoised", token_floor=0.0),
        "naive, dropout": AcceptanceConfig("naive", verdict="sampled"),
        "naive, denoised": AcceptanceConfig("naive", verdict="denoised", token_floor=0.0),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        row = rows.rows(slice(i % len(rows), i % len(rows) + 1))
        for name, config in ways.items():
            began = time.perf_counter()
            judge(row, config, head)
            if i:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: spread(values) for name, values in times.items()}


class Linear:
    """A head that is a matrix."""

    can_gather = True

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.vocab_size = weight, weight.shape[0]

    def full(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, V]."""
        return hidden @ self.weight.T

    def gather(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, K, d], [n, S] -> [n, K, S]."""
        return hidden @ self.weight[token_ids].transpose(1, 2)

    def rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[n, S] -> [n, S, d]."""
        return self.weight[token_ids], None

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Nothing comes after."""
        return logits


def synthetic(units: int, heavy: bool, rule: str, dropout: float, seeds: int) -> dict[str, Any]:
    """Random rows of a random head: 200 runners-up, noise of the same size whatever d is.

    heavy: a few units carry most of the hidden state (Student's t of two degrees of freedom).
    """
    generator = torch.Generator().manual_seed(units)
    n, vocab = 200, 200
    hidden = torch.randn(n, units, generator=generator)
    if heavy:
        square = (torch.randn(n, units, 2, generator=generator) ** 2).mean(dim=2)
        hidden = hidden / square.sqrt()
    hidden = hidden / hidden.square().mean(dim=1, keepdim=True).sqrt()
    weight = torch.randn(vocab, units, generator=generator) * 1.6 / math.sqrt(units)
    head, clean = Linear(weight), hidden @ weight.T
    second = clean.topk(2, dim=1).indices[:, 1]
    rows = Evidence(
        hidden, clean, second, clean.argmax(dim=1), torch.arange(n), torch.arange(n),
        clean + torch.randn(clean.shape, generator=generator),
    )  # fmt: skip
    # both on the whole vocabulary: here the question is the Gaussian alone
    config = AcceptanceConfig(rule, verdict="sampled", dropout=dropout, gaussian_tokens=vocab)
    a = over_seeds(rows, config, head, seeds).probability
    b = over_seeds(rows, replace(config, heads_mode="gaussian"), head, seeds).probability
    return {
        "d": units,
        "hidden": "heavy-tailed" if heavy else "normal",
        "rule": rule,
        "effective_units": effective_units(rows, weight)["median"],
        "acceptance_dropout": a.mean().item(),
        "acceptance_gaussian": b.mean().item(),
        "correlation": correlation(a, b),
    }


def draw(cases: dict[str, Any], file: Path) -> None:
    """Acceptance probability by dropout heads against denoised frequency, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dropmatch"
    from matplotlib import pyplot

    chosen = {name: case["_points"] for name, case in cases.items()}
    figure, axes = pyplot.subplots(1, len(chosen), figsize=(3.2 * len(chosen), 3.5), sharey=True)
    for axis, (name, (x, y)) in zip(axes, chosen.items(), strict=True):
        axis.scatter(x, y, s=5, alpha=0.25, linewidths=0)
        axis.plot([0, 1], [0, 1], linewidth=0.6, color="grey")
        axis.set_title(f"{name} (n = {len(x)})", fontsize=9)
        axis.set_xlabel("accepted by dropout heads, share of seeds", fontsize=8)
    axes[0].set_ylabel("accepted by Gaussian heads, share of sets", fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=110)


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600, help="rows of each kind of prompt")
    parser.add_argument("--prompts", type=int, default=80, help="the most prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--synthetic-seeds", type=int, default=8, help="0 leaves the synthetic heads out")
    parser.add_argument("--keep-rows", type=Path, help="keep the rows in this file, and read them if it is there")
    parser.add_argument("--figure", type=Path, help="draw it to this file (needs matplotlib)")
    options = parser.parse_args()
    pair = engine(options)
    weight = pair.model.get_output_embeddings().weight
    kept = options.keep_rows
    cases: dict[str, Any] = {}
    with torch.inference_mode():
        rows: dict[str, Evidence] = {}
        if kept is not None and kept.exists():
            rows = {kind: Evidence(**values) for kind, values in torch.load(kept).items()}
        for kind in ("prose", "maths"):
            if kind not in rows:
                texts = prompts(options.data, kind, options.prompts)
                rows[kind] = collect(pair, texts, options.rows, options.max_tokens)
                print(kind, len(rows[kind]), "rows", flush=True)
        if kept is not None and not kept.exists():
            torch.save({kind: {k: v for k, v in vars(e).items() if v is not None} for kind, e in rows.items()}, kept)
        for kind, some in rows.items():
            for rule in ("naive", "js"):
                name = f"{rule}, {kind}"
                cases[name] = compare(some, rule, options.heads, options.dropout, pair.head, options.seeds)
                print(name, {k: v for k, v in cases[name].items() if k != "_points"}, flush=True)
        units = {kind: effective_units(some, weight) for kind, some in rows.items()}
        if options.figure is not None:
            draw(cases, options.figure)
        times = milliseconds(rows["prose"], pair.head, 60)
        made = [
            synthetic(d, heavy, rule, 0.1, options.synthetic_seeds)
            for d in (64, 256, 1024, 4096, 8192)
            for heavy in (False, True)
            for rule in ("naive", "js")
            if options.synthetic_seeds
        ]
    for case in cases.values():
        del case["_points"]
    about = {name: getattr(options, name) for name in ("heads", "dropout", "seeds", "max_tokens")}
    report({**about, "cases": cases, "effective_units": units, "ms_a_row": times, "synthetic": made}, options.json)


if __name__ == "__main__":
    main()
