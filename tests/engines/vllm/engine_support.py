"""Engines of vLLM in this process, requests to them, and what their counts should be."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

L = 4  # draft length
CHUNK = 384  # prompt tokens a step
QUESTIONS = (
    "A box holds 12 eggs. How many eggs are in 7 boxes? Explain briefly.",
    "Why is the sky blue?",
    "Write a short story about a ship and a whale.",
    "List five colours and something that has each of them.",
)
TINY_MARGIN = 1e-3  # of fp32 logits near 20: what another order of summation may turn


def start(target: Path, draft: Path | str | None, **options: Any) -> Any:
    """vLLM's `LLM` in fp32 with small limits; `draft` is a folder, "ngram" or None."""
    from vllm import LLM

    speculative: dict[str, Any] | None = None
    if draft == "ngram":
        speculative = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    elif draft is not None:
        speculative = {"method": "draft_model", "model": str(draft)}
    if speculative is not None:
        speculative = {**speculative, "num_speculative_tokens": L, **options.pop("speculative", {})}
    return LLM(
        str(target),
        speculative_config=speculative,
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": 512 << 20,
            "disable_log_stats": False,
            "per_request_spec_decode_metrics": "none" if speculative is None else "summary",
            **options,
        },
    )


@contextmanager
def engine(*args: Any, **options: Any) -> Iterator[Any]:
    """An engine that leaves no memory behind."""
    llm = start(*args, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def encode(hf: Any, question: str) -> list[int]:
    """Token ids of a question in the chat template."""
    return hf.encode([{"role": "user", "content": question}]).tolist()


def params(rule: str | None = None, extra: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """`SamplingParams`, greedy unless told, with a rule and its options in `extra_args`."""
    from vllm import SamplingParams

    keys = {} if rule is None else {"dropmatch": rule}
    keys |= {f"dropmatch_{name}": value for name, value in (extra or {}).items()}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "extra_args": keys or None, **options})


def ask(llm: Any, prompts: Sequence[list[int]], requests: Any) -> list[Any]:
    """The first output of each prompt, in order."""
    with unbroken(llm):
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], requests, use_tqdm=False)
    return [one.outputs[0] for one in found]


@contextmanager
def unbroken(llm: Any) -> Iterator[None]:
    """Around requests: after an error in a step an engine in this process would spin for ever at the next one."""
    from vllm.exceptions import VLLMClientError

    assert not hasattr(llm, "broken"), f"an earlier test broke this engine: {llm.broken}"
    try:
        yield
    except VLLMClientError:
        raise  # a refusal
    except BaseException as error:
        llm.broken = repr(error)
        raise


def ids(output: Any) -> list[int]:
    """Its token ids."""
    return list(output.token_ids)


def counts(output: Any) -> dict[str, Any]:
    """What dropmatch counted for a request."""
    return output.spec_decode_metrics.to_dict()["dropmatch"]


@dataclass
class Streamed:
    """A request as it came: its tokens step by step, and the last output."""

    blocks: list[list[int]] = field(default_factory=list)
    last: Any = None

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [token for block in self.blocks for token in block]


def stream(
    llm: Any, requests: Mapping[str, tuple[list[int], Any]], abort: Mapping[str, int] | None = None
) -> dict[str, Streamed]:
    """Run requests by name, step by step; abort some after so many tokens."""
    with unbroken(llm):
        return _stream(llm.llm_engine, requests, dict(abort or {}))


def _stream(core: Any, requests: Mapping[str, tuple[list[int], Any]], waiting: dict[str, int]) -> dict[str, Streamed]:
    from vllm.sampling_params import RequestOutputKind

    found = {name: Streamed() for name in requests}
    for name, (prompt, request) in requests.items():
        request = request.clone()
        request.output_kind = RequestOutputKind.DELTA
        core.add_request(name, {"prompt_token_ids": prompt}, request)
    while core.has_unfinished_requests():
        for one in core.step():
            record = found[one.request_id]
            record.last = one.outputs[0]
            if one.outputs[0].token_ids:
                record.blocks.append(list(one.outputs[0].token_ids))
            if len(record.ids) >= waiting.get(one.request_id, 1 << 30):
                del waiting[one.request_id]
                core.abort_request([one.request_id])
    return found


def expected_counts(blocks: list[list[int]], tokens: int) -> dict[str, int]:
    """What the first tokens of a run came to; its first block is the prefill's one token, each other ends in one
    of the target's own."""
    rounds = drafted = accepted = 0
    left = tokens - 1
    for block in blocks[1:]:
        if left <= 0:
            break
        whole = left >= len(block)
        rounds += 1
        accepted += len(block) - 1 if whole else left
        drafted += L if whole else left
        left -= len(block)
    return {"rounds": rounds, "draft_tokens": drafted, "accepted_tokens": accepted}


def subset(counted: Mapping[str, Any]) -> dict[str, int]:
    """The part of the counts that `expected_counts` knows."""
    return {name: counted[name] for name in ("rounds", "draft_tokens", "accepted_tokens")}


def from_hf(hf: Any, prompt: list[int], output: Any, **options: Any) -> tuple[list[int], dict[str, int], int]:
    """Ids, reasons of accepted tokens, and rounds that the engine of transformers comes to.

    It drafts from the first token on, while vLLM's prefill yields a token of its own; so it is given that one.
    It is given room to draft past the last token too, as vLLM does.
    """
    made = ids(output)
    result = hf.generate(prompt + made[:1], max_tokens=len(made) + L + 1, draft_length=L, **options)
    kept = result.tokens[: len(made) - 1]
    reasons = Counter(token.reason for token in kept if token.reason not in ("correction", "bonus"))
    own = len(kept) - sum(reasons.values())
    rounds = own + bool(kept and kept[-1].reason not in ("correction", "bonus"))
    return made[:1] + [token.id for token in kept], dict(reasons), rounds


def check_same(hf: Any, prompt: list[int], left: list[int], right: list[int]) -> bool:
    """Whether two texts are the same; where they part, the target or the draft must have been undecided."""
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None:
        assert len(left) == len(right)
        return True
    margins = [margin(model, prompt + left[:at]) for model in (hf.model, hf.drafter.model)]
    assert min(margins) < TINY_MARGIN, f"token {at}: {left[at]} and {right[at]}; margins {margins}"
    return False


@torch.inference_mode()
def margin(model: Any, prompt: list[int]) -> float:
    """Between the two likeliest next tokens."""
    top = model(input_ids=torch.tensor([prompt])).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


@torch.inference_mode()
def clean_logprobs(hf: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probabilities of tokens after a prompt, by a plain forward of the target."""
    logits = hf.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    picked = torch.tensor(tokens)[:, None]
    return logits.log_softmax(dim=-1).gather(1, picked).squeeze(1).tolist()


def grown(before: Counter[tuple[str, str, str, str]], rule: str) -> dict[str, int]:
    """What the plugin's counters grew by, as `subset` has it."""
    found = Counter(prometheus())
    found.subtract(before)
    names = {"rounds": "drafts", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens"}
    return {
        ours: sum(n for key, n in found.items() if key[:2] == (f"dropmatch:{theirs}_total", rule))
        for ours, theirs in names.items()
    }


def prometheus() -> Counter[tuple[str, str, str, str]]:
    """The plugin's counters: (name, rule, reason, lossy) -> value."""
    from prometheus_client import REGISTRY

    found: Counter[tuple[str, str, str, str]] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("dropmatch:") and sample.name.endswith("_total"):
                labels = sample.labels
                key = (sample.name, labels["rule"], labels.get("reason", ""), labels.get("lossy", ""))
                found[key] = int(sample.value)
    return found
