"""Requests to the server of the tests through the official client, and what its responses must be like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from server_support import block

openai = pytest.importorskip("openai")

TARGET = "demo:smollm2"
L = 4
QUESTION = "A box holds 12 eggs. How many eggs are in 7 boxes? Explain briefly."
STORY = "Once upon a time there was a town by the sea, and"
PROMPTS = {"chat": QUESTION, "complete": STORY}
OFF, STRICT, NAIVE = ({"dropmatch": name} for name in ("off", "strict", "naive"))
JS: dict[str, Any] = {}  # the server's default


class Client:
    """Short requests over HTTP; `xargs` are the dropmatch keys, `more` goes on to vLLM."""

    def __init__(self, url: str) -> None:
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def chat(self, text: str, xargs: Mapping[str, Any] = JS, max_tokens: int = 24, **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.api.chat.completions.create(messages=messages, **self._options(xargs, max_tokens, more))

    def complete(self, prompt: Any, xargs: Mapping[str, Any] = JS, max_tokens: int = 24, **more: Any) -> Any:
        return self.api.completions.create(prompt=prompt, **self._options(xargs, max_tokens, more))

    @staticmethod
    def _options(xargs: Mapping[str, Any], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
        body = {"vllm_xargs": dict(xargs), "return_token_ids": True, **more.pop("body", {})}
        return {"model": TARGET, "max_tokens": max_tokens, "temperature": 0, "extra_body": body, **more}


def text_of(response: Any) -> str:
    """The text of a response's first choice."""
    choice = response.choices[0]
    found: str = choice.text if hasattr(choice, "text") else choice.message.content
    return found


def check_block(response: Any, rule: str | None) -> dict[str, Any]:
    """The numbers of a response without a grammar fit each other and its usage."""
    found = block(response)
    theirs = response.metrics["speculative_decoding"]
    reasons = found["accepted_by_reason"]
    assert found["rule"] == rule
    assert found["accepted_tokens"] == sum(reasons.values())
    assert found["lossy_tokens"] == sum(n for reason, n in reasons.items() if reason not in ("exact", "sampled"))
    assert found["accepted_tokens"] <= found["draft_tokens"] <= L * found["rounds"]
    # the prompt's own step gives one token, each round its accepted ones and one more, unless it was cut before
    cut = 1 + found["rounds"] + found["accepted_tokens"] - response.usage.completion_tokens
    assert cut in (0, 1)
    # vLLM's numbers have what the last round lost by the cut
    assert found["rounds"] == theirs["num_spec_steps"]
    assert 0 <= theirs["num_accepted_draft_tokens"] - found["accepted_tokens"] < L
    assert 0 <= theirs["num_draft_tokens"] - found["draft_tokens"] < L
    assert cut or theirs["num_draft_tokens"] == found["draft_tokens"]
    return found


def unstreamed(chunks: Any) -> tuple[str, Any]:
    """The text of a stream, and its last chunk."""
    text, last = "", None
    for last in chunks:
        for choice in last.choices:
            text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
    return text, last
