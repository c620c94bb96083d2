"""Table 4: what the LM head, K heads and their JS divergences take beside the target's blocks.

One forward over a few tokens without a cache, as in the paper, is cut in two where the LM head begins; the rules are
then asked about all of these tokens (eagerly, as in the paper; decoding asks where the draft differs). In every round
each part runs once, in an order that rotates from round to round, and shares are taken within a round: so all share
what the machine does meanwhile. On a GPU every clock is read after all work is done.

n tokens, V in the vocabulary, d units in the hidden state.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from dropmatch.acceptance import Evidence, judge
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.settings import sampled

WARM_UP = 3  # rounds that are not counted
FORWARD = "forward"


def ways(heads: int, dropout: float, can_gather: bool) -> dict[str, tuple[str, AcceptanceConfig]]:
    """What is asked beside the forward, by name: a few words, and the settings.

    Raises:
        SettingError: a value out of range.
    """
    found = {
        "naive": (f"K={heads} heads, naive", sampled("naive", heads, dropout, 0)),
        "js": (f"K={heads} heads and JS", sampled("js", heads, dropout, 0)),
    }
    if can_gather:
        shortlist = sampled("js", heads, dropout, 0, "shortlist")
        found["js_shortlist"] = ("the same on a shortlist", shortlist)
        denoised = AcceptanceConfig("js", heads=heads, dropout=dropout, token_floor=0.0)  # else some rows get no heads
        found["js_denoised"] = ("js as this library has it", denoised)
    return found


def check_latency(tokens: int, rounds: int) -> None:
    """Refuse counts that measure nothing.

    Raises:
        SettingError: one is below 1.
    """
    for option, number in (("tokens", tokens), ("rounds", rounds)):
        if number < 1:
            raise SettingError(f"{option} must be at least 1, got {number}")


@torch.inference_mode()
def measure_latency(
    engine: Any, heads: int, dropout: float, tokens: int, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Table 4.

    Args:
        engine: of the Hugging Face kind; its drafter is not used.
        heads: K.
        dropout: p.
        tokens: n, input tokens.
        rounds: how many are counted.
        progress: told of each.

    Returns:
        For JSON: `parts`, by name: `what` it is, `ms` alone, and with the blocks and the head's own run `total_ms`,
        `share_pct` (of head and heads in that total) and `times_the_head`; each with median and quartiles.

    Raises:
        SettingError: a number out of range, or more tokens than the model's context.
    """
    check_latency(tokens, rounds)
    limit = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None) or tokens
    if tokens > limit:
        raise SettingError(f"tokens={tokens} do not fit the model's context of {limit}: lower --tokens")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.head.vocab_size, (1, tokens), generator=generator).to(engine.model.device)
    asked = ways(heads, dropout, engine.head.can_gather)
    evidence = _evidence(engine, ids, generator)

    def ask(config: AcceptanceConfig) -> Callable[[], Any]:
        return lambda: judge(evidence, config, engine.head)

    parts: dict[str, Callable[[], Any]] = {name: ask(config) for name, (_, config) in asked.items()}
    names = [FORWARD, *parts]
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(WARM_UP + rounds):
        progress.begin("warming up" if number < WARM_UP else f"round {number - WARM_UP + 1} of {rounds}")
        turn = number % len(names)
        taken: dict[str, float] = {}
        for name in names[turn:] + names[:turn]:
            if name == FORWARD:
                taken["blocks"], taken["head"] = _forward(engine.model, ids)
            else:
                taken[name] = _timed(parts[name], engine.model.device)
        if number >= WARM_UP:
            for name, value in taken.items():
                seconds[name].append(value)
            progress.done(0, measured=True)
    about: dict[str, Any] = {"heads": heads, "dropout": dropout, "tokens": tokens, "rounds": rounds}
    return {**about, "parts": _parts(seconds, {name: what for name, (what, _) in asked.items()})}


def _parts(seconds: dict[str, list[float]], words: dict[str, str]) -> dict[str, Any]:
    blocks, head = seconds["blocks"], seconds["head"]
    found: dict[str, Any] = {"blocks": {"what": "transformer blocks", "ms": _spread([1000 * t for t in blocks])}}
    for name, what in {"head": "LM head, no dropout", **words}.items():
        extra = [0.0] * len(head) if name == "head" else seconds[name]
        after = [own + more for own, more in zip(head, extra, strict=True)]  # all that comes after the blocks
        total = [before + rest for before, rest in zip(blocks, after, strict=True)]
        found[name] = {
            "what": what,
            "ms": _spread([1000 * t for t in (head if name == "head" else extra)]),
            "total_ms": _spread([1000 * t for t in total]),
            "share_pct": _spread([100 * rest / whole for rest, whole in zip(after, total, strict=True)]),
            "times_the_head": _spread([rest / own for rest, own in zip(after, head, strict=True)]),
        }
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": median(values), "low": low, "high": high}


def _evidence(engine: Any, ids: Tensor, generator: torch.Generator) -> Evidence:
    """What rules see of the tokens [1, n]; the draft is the target's distribution and noise."""
    with engine.head.capture():
        logits = engine.model(input_ids=ids, use_cache=False).logits[0]  # [n, V]
        hidden = engine.head.hidden(ids.shape[1]).clone()  # [n, d]
    draft = logits.float() + torch.randn(logits.shape, generator=generator).to(logits.device)
    places = torch.arange(ids.shape[1], device=ids.device)
    return Evidence(hidden, logits, draft.argmax(-1), logits.argmax(-1), torch.zeros_like(places), places, draft)


def _forward(model: Any, ids: Tensor) -> tuple[float, float]:
    """Seconds of the blocks, and of the LM head with what comes after it; ids: [1, n]."""
    begun = []

    def note(*_: Any) -> None:
        begun.append(_now(model.device))

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        start = _now(model.device)
        model(input_ids=ids, use_cache=False)
        end = _now(model.device)
    finally:
        handle.remove()
    return begun[0] - start, end - begun[0]


def _timed(act: Callable[[], Any], device: torch.device) -> float:
    start = _now(device)
    act()
    return _now(device) - start


def _now(device: torch.device) -> float:
    """The time at which all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def latency_sheet(found: dict[str, Any], target: str) -> Sheet:
    """Table 4 as texts."""
    rows: list[tuple[str, ...]] = []
    for name, part in found["parts"].items():
        paper = published.LATENCY.get(name)
        row = [part["what"], _text(part["ms"], 2)]
        if name == "blocks":
            rows.append((*row, *[""] * 7))
            continue
        row += [_text(part["total_ms"], 1), _text(part["share_pct"], 2), _text(part["times_the_head"], 2)]
        rows.append((*row, *(_paper(*paper) if paper else [""] * 4)))
    theirs = ("paper: ms", "paper: total ms", "paper: share %", "paper: times the head")
    headings = ("", "ms", "total ms", "share %", "times the head", *theirs)
    notes = [
        f"{found['tokens']} input tokens, K={found['heads']}, p={found['dropout']:g}; medians and quartiles of "
        f"{found['rounds']} rounds. ms: the part alone, a rule's on top of the LM head; share: of LM head and rule in "
        "the total of the same round.",
        "The rules are asked about all tokens; decoding asks them where the draft differs from the target. The paper: "
        f"{published.INPUT_TOKENS} tokens, Llama-3.1-70B-Instruct; its head of 0.05 ms is launch time: reading the "
        "weights alone takes about 0.26 ms on its four GPUs.",
    ]
    return Sheet(f"Table 4: latency of a forward, {target}", headings, rows, notes)


def _paper(total: float, alone: float, share: float) -> list[str]:
    """A row of the paper's, in the order of ours."""
    return [f"{alone:.2f}", f"{total:.0f}", f"{share:.2f}", f"{alone / published.LATENCY['head'][1]:.1f}"]


def _text(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} [{spread['low']:.{digits}f}, {spread['high']:.{digits}f}]"
