"""The plugin in a real vLLM engine: one target and draft, fp32, many requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_support as support
import pytest
from engine_support import L, ask, counts, expected_counts, ids, params, stream, subset

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.real_models

LOSSY = [
    ("naive", {"verdict": "sampled", "heads": 5, "dropout": 0.1}, 7),
    ("naive", {"verdict": "sampled", "heads": 2, "dropout": 0.3}, 8),
    ("js", {"verdict": "sampled", "heads": 5, "dropout": 0.05}, 7),
    ("js", {"heads": 3, "dropout": 0.1, "token_floor": 0.05, "mask_seed": 11}, 9),
    ("js", {"heads": 4, "dropout": 0.02, "support": "full"}, 2**31),
    ("js", {"verdict": "sampled", "heads": 5, "dropout": 0.1, "evaluation": "eager", "token_floor": 0.02}, 7),
    ("js", {"dropout": 0.1, "verdict": "denoised", "strictness": 0.4}, 7),
    ("naive", {"verdict": "sampled", "dropout": 0.2, "heads_mode": "gaussian", "gaussian_tokens": 24}, 8),
    ("strict", {}, 0),
]
PLAIN = """
import json, sys
import engine_support as support
target, draft, prompts = json.loads(sys.stdin.read())
llm = support.start(target, draft)
import vllm.v1.sample.rejection_sampler as sampler
assert sampler.rejection_sample.__module__ == sampler.__name__ and "dropmatch.engines.vllm.install" not in sys.modules
found = [(support.ids(o), o.spec_decode_metrics.to_dict()) for o in support.ask(llm, prompts, support.params())]
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def off(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Greedy answers with the rule off."""
    return ask(llm, prompts, params())


def test_rule_off_is_vllm_without_the_plugin(
    target: Path, draft: Path, prompts: list[list[int]], off: list[Any]
) -> None:
    """Same token ids and same acceptance, greedy."""
    environment = {**os.environ, "VLLM_PLUGINS": "", "PYTHONPATH": str(Path(__file__).parent)}
    said = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=json.dumps([str(target), str(draft), prompts]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in said.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, said.stderr[-3000:]
    plain = json.loads(lines[0].removeprefix("FOUND "))
    for (tokens, metrics), output in zip(plain, off, strict=True):
        assert ids(output) == tokens
        ours = output.spec_decode_metrics.to_dict()
        assert ours.pop("dropmatch")["rule"] == "off"
        assert ours == metrics
        assert 0 < ours["num_accepted_draft_tokens"] < ours["num_draft_tokens"]


def test_rule_off_is_greedy_decoding_of_transformers(hf: Any, prompts: list[list[int]], off: list[Any]) -> None:
    for prompt, output in zip(prompts[:2], off, strict=False):
        result = hf.generate(prompt, draft_length=0, max_tokens=40)
        support.check_same(hf, prompt, result.token_ids, ids(output))


@pytest.mark.parametrize(("rule", "extra", "seed"), LOSSY, ids=lambda value: str(value) if value != {} else "-")
def test_judges_like_the_engine_of_transformers(
    llm: Any, hf: Any, prompts: list[list[int]], off: list[Any], rule: str, extra: dict[str, Any], seed: int
) -> None:
    """Same tokens, same reasons, same rounds; and a lossy rule does change the text."""
    chosen = prompts[2:4] if seed in (7, 8) else prompts[2:3]
    outputs = ask(llm, chosen, params(rule, extra, seed=seed, max_tokens=28))
    lossy = compared = 0
    for prompt, output in zip(chosen, outputs, strict=True):
        tokens, reasons, rounds = support.from_hf(hf, prompt, output, rule=rule, seed=seed, **extra)
        if support.check_same(hf, prompt, tokens, ids(output)):
            compared += 1
            found = counts(output)
            assert found["rule"] == rule
            if extra.get("evaluation") != "eager":  # then our engine names the rule for exact matches too
                assert found["accepted_by_reason"] == reasons
            assert found["rounds"] == rounds
            assert found["accepted_tokens"] == sum(reasons.values())
            lossy += found["lossy_tokens"]
    assert compared
    assert (lossy > 0) == (rule != "strict")
    assert ([ids(a) for a in outputs] != [ids(b)[:28] for b in off[2:4]][: len(chosen)]) == (rule != "strict")


def mixed() -> list[Any]:
    """One request of each kind; the last is not seeded."""
    made = [
        params("js", {"dropout": 0.05}, seed=1),
        params("naive", {"heads": 3, "dropout": 0.3}, seed=2),
        params(),
        params("js", {"dropout": 0.1, "heads": 4}, seed=3, temperature=0.8, top_p=0.9),
        params("naive", {"heads": 2}, seed=4, temperature=1.0, top_k=40),
        params(seed=5, temperature=0.7),
        params("js", {"verdict": "denoised", "dropout": 0.1}, seed=6),
        params("js", temperature=1.0),
    ]
    for request in made:
        request.max_tokens = 24
    return made


def test_a_request_says_the_same_alone_in_a_batch_and_in_another_order(llm: Any, prompts: list[list[int]]) -> None:
    """Case 10: mixed rules, greedy and sampled, one unseeded request among them."""
    requests = mixed()
    asked = [prompts[i % 4] for i in range(len(requests))]
    together = ask(llm, asked, requests)
    reordered = ask(llm, asked[::-1], mixed()[::-1])[::-1]
    alone = [ask(llm, [prompt], [request])[0] for prompt, request in zip(asked[:7], mixed()[:7], strict=True)]
    for i, one in enumerate(alone):
        for other in (together[i], reordered[i]):
            assert ids(other) == ids(one), i
            assert counts(other) == counts(one), i
    assert sum(counts(one)["lossy_tokens"] > 0 for one in alone) >= 2


def test_seeded_siblings_are_requests_of_their_own(llm: Any, prompts: list[list[int]]) -> None:
    """Case 10: n=2 is twice the same pair, each as alone with the seed that vLLM gives it."""
    options = {"temperature": 0.8, "max_tokens": 24}
    prompt = {"prompt_token_ids": prompts[2]}
    pairs = [
        llm.generate(prompt, params("js", {"dropout": 0.1}, seed=21, n=2, **options), use_tqdm=False)[0].outputs
        for _ in range(2)
    ]
    alone = [ask(llm, [prompts[2]], params("js", {"dropout": 0.1}, seed=s, **options))[0] for s in (21, 22)]
    assert [ids(o) for o in pairs[0]] == [ids(o) for o in pairs[1]] == [ids(o) for o in alone]
    assert ids(alone[0]) != ids(alone[1])
    assert [counts(o) for o in pairs[0]] == [counts(o) for o in alone]


def test_max_tokens_are_delivered_and_counted_exactly(llm: Any, prompts: list[list[int]]) -> None:
    """Case 4: budgets from 1 to 12, cut inside and at the end of blocks."""
    options = {"rule": "js", "extra": {"dropout": 0.1}, "seed": 7, "ignore_eos": True}
    whole = stream(llm, {"whole": (prompts[2], params(max_tokens=30, **options))})["whole"]
    budgets = range(1, 13)
    cut = stream(llm, {str(n): (prompts[2], params(max_tokens=n, **options)) for n in budgets})
    for n in budgets:
        found = cut[str(n)]
        assert found.ids == whole.ids[:n]
        assert found.last.finish_reason == "length"
        if n > 1:  # a request without a draft may have no metrics
            assert subset(counts(found.last)) == expected_counts(whole.blocks, n), n
    assert max(map(len, whole.blocks)) == L + 1


@pytest.mark.parametrize("end", ["stop string", "stop token"])
def test_stops_inside_an_accepted_block_end_everything_alike(
    llm: Any, hf: Any, prompts: list[list[int]], end: str
) -> None:
    """Case 2: text, token ids, log-probabilities and counts end with the token that stops."""
    options = {"rule": "js", "extra": {"dropout": 0.1}, "seed": 7, "logprobs": 0}
    whole = stream(llm, {"whole": (prompts[2], params(max_tokens=40, **options))})["whole"]
    tested, start = 0, 1
    for block in whole.blocks[1:]:
        n = start + 2  # the second token of a block of at least four
        start += len(block)
        piece = hf.tokenizer.decode(whole.ids[n - 2 : n])
        before = hf.tokenizer.decode(whole.ids[: n - 1])
        if len(block) < 4 or whole.ids[n - 1] in whole.ids[: n - 1] or piece in before or not piece.strip():
            continue
        stop = {"stop": [piece]} if end == "stop string" else {"stop_token_ids": [whole.ids[n - 1]]}
        before = support.prometheus()
        found = ask(llm, [prompts[2]], params(max_tokens=40, **stop, **options))[0]
        assert found.finish_reason == "stop"
        assert found.stop_reason == (piece if end == "stop string" else whole.ids[n - 1])
        assert ids(found) == whole.ids[:n]
        # vLLM leaves both a stop string and a stop token out of the text
        text = hf.tokenizer.decode(whole.ids[: n - 2] if end == "stop string" else whole.ids[: n - 1])
        assert found.text == text
        assert len(found.logprobs) == n
        wanted = expected_counts(whole.blocks, n)
        assert support.grown(before, "js") == wanted
        # vLLM makes its metrics in the scheduler, which learns nothing of stop strings: none come with them
        assert end == "stop string" or subset(counts(found)) == wanted
        tested += 1
        if tested == 3:
            break
    assert tested


def test_end_of_sequence_in_an_accepted_block_ends_everything_alike(llm: Any, hf: Any) -> None:
    """Case 1: nothing behind an accepted end-of-sequence token is emitted or counted."""
    prompt = support.encode(hf, "What is the capital of France? One word.")
    eos = hf.tokenizer.eos_token_id
    for rule in ("js", "naive"):
        on = stream(llm, {"on": (prompt, params(rule, {"dropout": 0.05}, seed=1, ignore_eos=True))})["on"]
        n = on.ids.index(eos) + 1
        sizes = [sum(map(len, on.blocks[: i + 1])) for i in range(len(on.blocks))]
        assert n not in sizes, "end of sequence is not inside a block here: choose another prompt"
        found = ask(llm, [prompt], params(rule, {"dropout": 0.05}, seed=1, logprobs=0))[0]
        assert (found.finish_reason, ids(found)) == ("stop", on.ids[:n])
        assert len(found.logprobs) == n
        assert found.text == hf.tokenizer.decode(on.ids[: n - 1])
        assert subset(counts(found)) == expected_counts(on.blocks, n)


def test_banned_tokens_are_never_accepted(llm: Any, hf: Any, prompts: list[list[int]], off: list[Any]) -> None:
    """Case 5: min_tokens, bad words and a list of allowed tokens hold, although the draft proposes what they ban."""
    eos, said = hf.tokenizer.eos_token_id, ids(off[2])
    most = max(set(said), key=said.count)
    word = next(w for w in (" the", " a", " of") if w in off[2].text)
    allowed = [i for i in range(hf.head.vocab_size) if i != most]
    short = support.encode(hf, "What is the capital of France? One word.")
    kinds = [
        (short, {"min_tokens": 20}),
        (prompts[2], {"bad_words": [word.strip()]}),
        (prompts[2], {"allowed_token_ids": allowed}),
    ]
    for rule in ("js", "naive"):
        common = {"rule": rule, "extra": {"dropout": 0.3}, "seed": 3, "max_tokens": 24}
        asked = [(prompt, params(temperature=t, **ban, **common)) for t in (0.0, 0.9) for prompt, ban in kinds]
        found = ask(llm, [prompt for prompt, _ in asked], [request for _, request in asked])
        for long, barred, limited in (found[:3], found[3:]):
            assert len(ids(long)) >= 20
            assert eos not in ids(long)[:20]
            assert word + " " not in barred.text + " "
            assert most not in ids(limited)
        assert sum(counts(one)["lossy_tokens"] for one in found) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_of_lossy_tokens_are_the_clean_targets(
    llm: Any, hf: Any, prompts: list[list[int]], temperature: float
) -> None:
    """Case 12: below 0, not always the likeliest, and equal to a plain forward of the target."""
    output = ask(llm, [prompts[2]], params("js", {"dropout": 0.1}, seed=7, temperature=temperature, logprobs=1))[0]
    assert counts(output)["lossy_tokens"] > 2
    found = [step[token] for step, token in zip(output.logprobs, ids(output), strict=True)]
    wanted = support.clean_logprobs(hf, prompts[2], ids(output))
    assert [one.logprob for one in found] == pytest.approx(wanted, abs=2e-3)
    assert all(one.logprob < 0 for one in found)
    assert max(one.rank for one in found) > 1


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "size"],
    "additionalProperties": False,
}


def test_json_schema_output_is_always_valid(llm: Any, hf: Any) -> None:
    """Case 8: js and naive with far too much dropout, greedy and sampled, in one batch."""
    from vllm.sampling_params import StructuredOutputsParams

    prompt = support.encode(hf, "Describe a ship as JSON with name, colour and size.")
    requests = [
        params(
            rule,
            {"dropout": dropout},
            seed=seed,
            temperature=temperature,
            max_tokens=150,
            structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        )
        for rule in ("js", "naive")
        for seed, temperature, dropout in ((1, 0.0, 0.3), (2, 0.0, 0.6), (3, 0.9, 0.3), (4, 1.2, 0.6))
    ]
    outputs = ask(llm, [prompt] * len(requests), requests)
    for output in outputs:
        value = json.loads(output.text)
        assert output.finish_reason == "stop"
        assert list(value) == ["name", "colour", "size"]
        assert len(value["name"]) <= 12
        assert value["colour"] in ("red", "blue")
        assert type(value["size"]) is int
        assert 0 <= value["size"] <= 99
    assert sum(counts(output)["lossy_tokens"] for output in outputs) > 3
