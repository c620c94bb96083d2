"""Tokens per second: dropmatch against transformers, lossy against lossless, and the memory-bandwidth floor.

Every comparison is a series of pairs, A then B then A again, on the same prompt with the same number of
tokens; a figure is the median over pairs of the ratio of their tokens per second.

    python benchmarks/side_by_side.py --data DIR --json results/side_by_side.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common import arguments, chat, engine, prompts, report, spread
from dropmatch import models
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.drafting import DraftModel, PromptLookup
from dropmatch.engines.hf.engine import Engine
from dropmatch.models.prepare import prepare_for_decoding


@dataclass(frozen=True)
class Run:
    """One generation: tokens per second, acceptance length (NaN if not known)."""

    rate: float
    length: float = float("nan")


Method = Callable[[str], Run]


def ours(pair: Engine, tokens: int, **settings: Any) -> Method:
    """A method of dropmatch."""

    def run(prompt: str) -> Run:
        statistics = pair.generate(chat(prompt), max_tokens=tokens, **settings).statistics
        return Run(statistics.tokens_per_second, statistics.acceptance_length)

    return run


def theirs(model: Any, pair: Engine, tokens: int, **settings: Any) -> Method:
    """transformers' own generate on its own copy of the target."""

    def run(prompt: str) -> Run:
        ids = pair.encode(chat(prompt))[None]
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **settings
            )
        return Run((out.shape[1] - ids.shape[1]) / (time.perf_counter() - began))

    return run


def compare(name: str, first: Method, second: Method, texts: list[str], repeats: int, about: dict[str, Any]) -> Any:
    """Alternate two methods; the ratio is the second's tokens per second over the first's."""
    ratios, lengths = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
    for repeat in range(repeats):
        for i, text in enumerate(texts):
            order = (0, 1) if (repeat + i) % 2 == 0 else (1, 0)
            runs = {which: (first, second)[which](text) for which in order}
            ratios.append(runs[1].rate / runs[0].rate)
            for which in order:
                lengths[which].append(runs[which].length)
    figures = {"comparison": name, **about, "ratio": spread(ratios), "pairs": len(ratios)}
    for label, values in zip(("first", "second"), lengths, strict=True):
        known = [value for value in values if value == value]
        if known:
            figures[f"acceptance_length_{label}"] = sum(known) / len(known)
    print(figures, flush=True)
    return figures


def streaming_bandwidth(gibibytes: float = 1.0) -> float:
    """Bytes per second that a sum over a large tensor reads; the best of a few runs."""
    data = torch.ones(int(gibibytes * 2**30 / 8), dtype=torch.int64)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.numel() * 8 / best


def bandwidth_share(model: Any, bandwidth: float, rows: int) -> dict[str, float]:
    """Share of the floor that a step of some rows reaches: bytes of its bf16 weights over bandwidth, over its time.

    A draft with a 4-bit copy of its weights reads fewer bytes than that, and may exceed 1.
    """
    cached = CachedModel(model)
    weights = sum(p.numel() * p.element_size() for p in _linear_weights(model))
    times = []
    with torch.inference_mode():
        cached.extend(torch.arange(256), keep=1)
        cached.rollback(256)
        for _ in range(25):
            began = time.perf_counter()
            cached.extend(torch.arange(rows), keep=rows)
            times.append(time.perf_counter() - began)
            cached.rollback(256)
    seconds = spread(times)["median"]
    return {"rows": rows, "weights_gb": weights / 1e9, "share": weights / bandwidth / seconds}


def _linear_weights(model: Any) -> list[torch.Tensor]:
    """What a step reads: the weight of every linear layer, once."""
    from dropmatch.models.packing import PackedLinear

    found = []
    for module in model.modules():
        if isinstance(module, PackedLinear):
            found.append(torch.empty(module.out_features, module.in_features, dtype=torch.bfloat16, device="meta"))
        elif isinstance(module, torch.nn.Linear):
            found.append(module.weight)
    return found


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each kind")
    parser.add_argument("--repeats", type=int, default=1, help="pairs per prompt")
    parser.add_argument("-L", "--draft-length", type=int, default=5)
    options = parser.parse_args()
    length, tokens = options.draft_length, options.max_tokens
    pair = engine(options)
    lookup = Engine(pair.model, pair.tokenizer, PromptLookup())
    draft_name = options.draft or models.default_draft(options.target)
    dense_draft = models.load(options.draft or models.default_draft(options.target)).model
    prepare_for_decoding(dense_draft)
    dense = Engine(pair.model, pair.tokenizer, DraftModel(dense_draft))
    plain_target, plain_draft = (models.load(name).model for name in (options.target, draft_name))
    plain_draft.generation_config.num_assistant_tokens = length
    plain_draft.generation_config.num_assistant_tokens_schedule = "constant"
    plain_draft.generation_config.assistant_confidence_threshold = 0.0

    kinds = {kind: prompts(options.data, kind, options.prompts) for kind in ("maths", "prose")}
    mixed = [text for two in zip(kinds["maths"], kinds["prose"], strict=True) for text in two]
    about = {"L": length, "max_tokens": tokens, "batch": 1}
    lossy = {"K": 5, "p": 0.3}
    hf_plain = theirs(plain_target, pair, tokens)
    hf_assisted = theirs(plain_target, pair, tokens, assistant_model=plain_draft)
    greedy, strict = ours(pair, tokens, draft_length=0), ours(pair, tokens, rule="strict", draft_length=length)
    for method in (hf_plain, hf_assisted, greedy, strict):
        method(mixed[0])

    figures = [
        compare("transformers generate -> our plain greedy", hf_plain, greedy, mixed, options.repeats, about),
        compare("transformers assisted -> our strict", hf_assisted, strict, mixed, options.repeats, about),
        compare("our plain greedy -> our strict", greedy, strict, mixed, options.repeats, about),
        compare(
            "our strict, dense draft weights -> our strict",
            ours(dense, tokens, rule="strict", draft_length=length),
            strict,
            mixed,
            options.repeats,
            about,
        ),
    ]
    for kind, texts in kinds.items():
        for rule in ("js", "naive"):
            method = ours(pair, tokens, rule=rule, draft_length=length)
            case = {**about, **lossy, "prompts": kind}
            figures.append(compare(f"our strict -> our {rule}", strict, method, texts, options.repeats, case))
        for rule in ("strict", "naive"):
            method = ours(lookup, tokens, rule=rule, draft_length=length)
            case = {**about, "prompts": kind, "drafter": "prompt lookup"}
            figures.append(compare(f"our plain greedy -> our {rule}", greedy, method, texts, options.repeats, case))

    bandwidth = streaming_bandwidth()
    assert isinstance(pair.drafter, DraftModel)
    share = {
        "streaming_gb_per_s": bandwidth / 1e9,
        "target": [bandwidth_share(pair.model, bandwidth, rows) for rows in (1, length + 1)],
        "draft": [bandwidth_share(pair.drafter.model, bandwidth, 1)],
        "transformers target": [bandwidth_share(plain_target, bandwidth, rows) for rows in (1, length + 1)],
        "transformers draft": [bandwidth_share(plain_draft, bandwidth, 1)],
    }
    report({"ratios": figures, "bandwidth": share}, options.json)


if __name__ == "__main__":
    main()
