"""The demo pair in vLLM: on one rank and on two, which must decide alike. `make test-pair`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dropmatch import ModelError, models
from dropmatch.engines.vllm.environment import require_vllm, wanted

pytestmark = pytest.mark.pair
TARGET, DRAFT = "demo:qwen2.5-coder", "demo:qwen2.5-coder-draft"
RULES: list[dict[str, Any]] = [
    {"dropmatch": "off"},
    {"dropmatch": "naive", "dropmatch_dropout": 0.3, "dropmatch_token_floor": 0.0},
    {"dropmatch": "js", "dropmatch_dropout": 0.3, "dropmatch_token_floor": 0.0},
    {"dropmatch": "js", "dropmatch_dropout": 0.0},
]
# one engine in a process of its own: two ranks bind their threads when they start
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
target, draft, ranks, rules = json.loads(sys.argv[1])
llm = LLM(target, enforce_eager=True, max_model_len=1024, max_num_seqs=4, tensor_parallel_size=ranks,
          per_request_spec_decode_metrics="summary",
          speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 5})
question = [{"role": "user", "content": "Why do leaves turn red in autumn? Answer in two sentences."}]
params = [SamplingParams(temperature=0, max_tokens=48, extra_args=rule) for rule in rules]
found = []
for output in llm.chat([question] * len(rules), params, use_tqdm=False):
    out = output.outputs[0]
    found.append([list(out.token_ids), out.text, out.spec_decode_metrics.to_dict()["dropmatch"]])
print("RESULT " + json.dumps(found))
"""


def decode(ranks: int) -> list[Any]:
    """Token ids, text and counts of one question under each rule."""
    try:
        folders = [str(models.fetch(name, progress=False)) for name in (TARGET, DRAFT)]
    except ModelError as error:
        pytest.skip(str(error))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "LD_PRELOAD"))}
    environment = clean | wanted(clean, require_vllm(), ranks) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*folders, ranks, RULES])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def one_rank() -> list[Any]:
    """On one rank."""
    return decode(1)


def test_lossy_rules_accept_more_and_say_why(one_rank: list[Any]) -> None:
    off, naive, js, without_dropout = (counts for _, _, counts in one_rank)
    assert off["lossy_tokens"] == without_dropout["lossy_tokens"] == 0
    assert one_rank[3][0] == one_rank[0][0]
    for counts in (naive, js):
        assert counts["lossy_tokens"] > 0
        assert counts["rounds"] < off["rounds"]
        assert counts["accepted_tokens"] == sum(counts["accepted_by_reason"].values())
    assert all("leaves" in text.lower() for _, text, _ in one_rank)


def test_two_ranks_decide_as_one_does(one_rank: list[Any]) -> None:
    """In bf16 two ranks round otherwise than one, which may move a token where two are nearly as likely."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    two = decode(2)
    same = sum(a[0] == b[0] for a, b in zip(one_rank, two, strict=True))
    prefix = [next((i for i, (a, b) in enumerate(zip(x[0], y[0])) if a != b), 48) for x, y in zip(one_rank, two)]
    assert same >= 2 or min(prefix) >= 12, (same, prefix, one_rank, two)
    assert two[1][2]["lossy_tokens"] > 0
    assert two[2][2]["lossy_tokens"] > 0
