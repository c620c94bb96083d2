"""The server over HTTP, through the official client: what a request gets, what is refused, what is counted."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_client import (
    JS,
    NAIVE,
    OFF,
    PROMPTS,
    QUESTION,
    STORY,
    STRICT,
    TARGET,
    Client,
    L,
    check_block,
    text_of,
    unstreamed,
)
from server_support import Server, block, counted, has_vllm, perturbed_copy

from dropmatch import ModelError, models

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.real_models,
    pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed"),
]

EOS = 2  # <|im_end|>
COUNT = "one two three four five six seven eight nine ten eleven"


@pytest.fixture(scope="module")
def target() -> Path:
    """The folder of the target."""
    try:
        return models.fetch(TARGET, progress=False)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests. In fp32, so that a text does not hang on what else is in its batch (case 9)."""
    root = tmp_path_factory.mktemp("server")
    draft = perturbed_copy(target, root / "draft")
    options = [TARGET, "--draft", str(draft), "-L", str(L), "--rule", "js"]
    options += ["--dtype", "float32"]
    with Server([*options, "--max-model-len", "1024", "--max-num-seqs", "8"], root / "log") as found:
        yield found.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    """A client of the server."""
    return Client(server.url)


@pytest.fixture(autouse=True)
def log_on_failure(server: Server, request: pytest.FixtureRequest) -> Iterator[None]:
    """A server that has died says why."""
    yield
    if server.process.poll() is not None and "ends" not in request.node.name:
        pytest.fail(f"the server has ended:\n{server.tail()}")


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_response_says_what_its_drafts_came_to(client: Client, endpoint: str) -> None:
    response = getattr(client, endpoint)(PROMPTS[endpoint])
    found = check_block(response, "js")
    assert set(found["accepted_by_reason"]) <= {"exact", "js", "majority"}
    assert 0 < found["lossy_tokens"] < found["accepted_tokens"]
    assert response.metrics["speculative_decoding"]["num_spec_tokens"] == L
    assert len(response.choices[0].token_ids) == response.usage.completion_tokens == 24
    assert response.model == TARGET


@pytest.mark.parametrize("budget", range(1, 8))
def test_case_4_exactly_max_tokens(client: Client, budget: int) -> None:
    response = client.complete(STORY, max_tokens=budget, body={"ignore_eos": True})
    assert response.usage.completion_tokens == len(response.choices[0].token_ids) == budget
    assert block(response)["accepted_tokens"] + block(response)["rounds"] >= budget - 1
    if budget > 1:
        check_block(response, "js")


def test_the_rule_of_a_request_without_a_round(client: Client) -> None:
    assert check_block(client.complete(STORY, max_tokens=1), None)["rounds"] == 0


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("heat", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_stream_is_the_response(client: Client, endpoint: str, heat: dict[str, Any]) -> None:
    ask = getattr(client, endpoint)
    whole = ask(PROMPTS[endpoint], **heat)
    text, last = unstreamed(ask(PROMPTS[endpoint], stream=True, stream_options={"include_usage": True}, **heat))
    assert text == text_of(whole)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert block(last) == block(whole)
    check_block(last, "js")


@pytest.mark.parametrize("heat", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_lossless_settings_agree(client: Client, heat: dict[str, Any]) -> None:
    """Off, strict and, if greedy, a rule without dropout are the same text; the default is lossy and is not."""
    texts = {}
    rules = {"off": OFF, "strict": STRICT} | ({} if heat else {"js": {"dropmatch_dropout": 0}})
    for name, xargs in rules.items():
        response = client.chat(QUESTION, xargs, 32, **heat)
        found = check_block(response, name)
        assert found["lossy_tokens"] == 0
        assert found["accepted_tokens"] < found["draft_tokens"]  # the draft is not the target
        texts[name] = text_of(response)
    assert len(set(texts.values())) == 1
    lossy = client.chat(QUESTION, JS, 32, **heat)
    assert block(lossy)["lossy_tokens"] > 0
    assert text_of(lossy) != texts["off"]


def test_a_request_chooses_its_rule(client: Client) -> None:
    """More heads accept more: with naive, a token that one of few heads chose is also that of one of many."""
    lossy = {}
    for heads in (3, 200):
        xargs = {"dropmatch": "naive", "dropmatch_heads": heads, "dropmatch_dropout": 0.5}
        found = check_block(client.chat(QUESTION, xargs, 32), "naive")
        assert set(found["accepted_by_reason"]) <= {"exact", "naive"}
        lossy[heads] = found["lossy_tokens"]
    assert lossy[3] < lossy[200]


def test_the_mask_seed_decides(client: Client) -> None:
    xargs = {"dropmatch": "naive", "dropmatch_heads": 1, "dropmatch_dropout": 0.5}
    texts = [text_of(client.complete(STORY, {**xargs, "dropmatch_mask_seed": seed})) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_case_2_stop_strings_inside_a_block(client: Client, endpoint: str) -> None:
    """Text, ids and log-probabilities end with the token that completes the stop string, streamed or not."""
    ask = getattr(client, endpoint)
    logprobs: dict[str, Any] = {"logprobs": True} if endpoint == "chat" else {"logprobs": 0}
    prompt = PROMPTS[endpoint]
    whole = ask(prompt, **logprobs)
    pieces, text, ids = _pieces(whole), text_of(whole), list(whole.choices[0].token_ids)
    assert "".join(pieces) == text
    for place in range(5, 9):  # a block
        stop = pieces[place][-1:] + pieces[place + 1][:2]
        at = text.index(stop)
        kept = next(n for n in itertools.count(1) if stop in "".join(pieces[:n]))
        response = ask(prompt, stop=["never said", stop], **logprobs)
        choice = response.choices[0]
        assert text_of(response) == text[:at]
        assert choice.token_ids == ids[:kept]
        assert _pieces(response) == pieces[:kept]
        assert response.usage.completion_tokens == kept
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert unstreamed(ask(prompt, stop=stop, stream=True))[0] == text[:at]


def _pieces(response: Any) -> list[str]:
    """The tokens that have log-probabilities, as text."""
    logprobs = response.choices[0].logprobs
    return list(logprobs.tokens) if hasattr(logprobs, "tokens") else [token.token for token in logprobs.content]


@pytest.mark.parametrize("heat", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_case_12_logprobs_are_the_clean_targets(client: Client, heat: dict[str, Any]) -> None:
    """Those of a prompt that ends with the response's tokens, which no draft and no rule has touched."""
    response = client.complete(STORY, logprobs=2, **heat)
    assert check_block(response, "js")["lossy_tokens"] > 0
    choice = response.choices[0]
    said = choice.logprobs.token_logprobs
    ids = [*choice.prompt_token_ids, *choice.token_ids]
    again = client.complete(ids, OFF, max_tokens=1, body={"prompt_logprobs": 0})
    rows = again.choices[0].prompt_logprobs[len(choice.prompt_token_ids) :]
    clean = [row[str(token)]["logprob"] for row, token in zip(rows, choice.token_ids, strict=True)]
    assert said == pytest.approx(clean, abs=0.15)  # bf16: steps of 1/8 for logits between 16 and 32
    assert all(value < 0 for value in said)
    if not heat:
        below = [max(top.values()) > own for top, own in zip(choice.logprobs.top_logprobs, said, strict=True)]
        assert 0 < sum(below) <= block(response)["lossy_tokens"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green", "blue"]},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "colour", "tall"],
    "additionalProperties": False,
}


def test_case_8_json_is_valid_whatever_the_rule(client: Client) -> None:
    """Also where the rules accept most: noisy heads, many of them."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    noisy = {"dropmatch_dropout": 0.6}
    rules = [JS, {"dropmatch": "js", **noisy}, {"dropmatch": "naive", "dropmatch_heads": 50, **noisy}]
    heats = [{}, *({"temperature": 0.8, "seed": seed} for seed in range(2))]

    def ask(case: tuple[dict[str, Any], dict[str, Any]]) -> Any:
        return client.chat("Describe a person.", case[0], 128, response_format=form, **case[1])

    with ThreadPoolExecutor(6) as pool:
        responses = list(pool.map(ask, itertools.product(rules, heats)))
    assert len(responses) == 9
    for response in responses:
        assert response.choices[0].finish_reason == "stop"
        found = json.loads(text_of(response))
        assert list(found) == SCHEMA["required"]
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 12
        assert type(found["age"]) is int
        assert 0 <= found["age"] <= 99
        assert found["colour"] in ("red", "green", "blue")
        assert type(found["tall"]) is bool
        # steps whose draft the grammar has emptied are no rounds
        counts = block(response)
        assert counts["rounds"] + counts["accepted_tokens"] <= response.usage.completion_tokens
    assert all(sum(block(r)["lossy_tokens"] for r in responses[i : i + 3]) > 0 for i in (0, 3, 6))


@pytest.mark.parametrize("xargs", [JS, NAIVE, OFF], ids=["js", "naive", "off"])
def test_case_10_a_seed_decides_alone_and_in_company(client: Client, xargs: dict[str, Any]) -> None:
    def seeded() -> Any:
        return client.complete(STORY, xargs, 24, temperature=0.8, seed=11)

    def unseeded(i: int) -> Any:
        rule = (JS, NAIVE, OFF)[i % 3]
        return client.complete(COUNT[: 9 * i + 3], rule, 8 + 5 * i, temperature=1.0, body={"ignore_eos": True})

    alone = seeded()
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(unseeded, i) for i in range(5)]
        among = [pool.submit(seeded).result() for _ in range(2)]
        assert all(other.result().usage.completion_tokens == 8 + 5 * i for i, other in enumerate(others))
    assert [text_of(response) for response in among] == [text_of(alone)] * 2
    assert [block(response) for response in among] == [block(alone)] * 2
    assert text_of(client.complete(STORY, xargs, 24, temperature=0.8, seed=12)) != text_of(alone)


def test_two_choices(client: Client, server: Server) -> None:
    before = server.counters("dropmatch:")
    asked = [client.complete(STORY, NAIVE, 16, temperature=0.9, seed=3, n=2, body={"ignore_eos": True})]
    grown = server.counters("dropmatch:") - before
    asked.append(client.complete(STORY, NAIVE, 16, temperature=0.9, seed=3, n=2, body={"ignore_eos": True}))
    texts = [[choice.text for choice in response.choices] for response in asked]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert asked[0].usage.completion_tokens == 32
    rounds = grown["dropmatch:drafts_total", "rule=naive"]
    accepted = sum(n for (name, *_), n in grown.items() if name == "dropmatch:accepted_tokens_total")
    assert 2 + rounds + accepted - 32 in (0, 1, 2)


@pytest.mark.parametrize(
    "xargs",
    [JS, {"dropmatch_dropout": 0.6}, {"dropmatch": "naive", "dropmatch_heads": 50}],
    ids=["js", "js noisy", "naive"],
)
def test_case_5_banned_tokens_and_the_end_are_never_emitted(client: Client, xargs: dict[str, Any]) -> None:
    """Banned is what the text says most, so that the draft proposes it."""
    ids = client.complete(STORY, xargs, 32).choices[0].token_ids
    banned = max(set(ids), key=ids.count)
    word = client.api.post("/detokenize".replace("/", "../", 1), body={"tokens": [banned]}, cast_to=object)["prompt"]
    response = client.complete(STORY, xargs, 32, body={"bad_words": [word.strip()]})
    assert banned not in response.choices[0].token_ids
    assert check_block(response, "js" if "dropmatch" not in xargs else "naive")["accepted_tokens"] > 0

    short = client.complete(QUESTION, xargs, 8)  # which this model ends at once
    assert short.choices[0].finish_reason == "stop"
    longer = client.complete(QUESTION, xargs, 16, body={"min_tokens": 16})
    assert longer.usage.completion_tokens == 16
    assert EOS not in longer.choices[0].token_ids


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"dropmatch": "nope"}, ["dropmatch", "'nope'", "off, ensemble, fly, fuzzy, js, margin, naive, strict"]),
    ({"dropmatch": 3}, ["dropmatch", "off, ensemble, fly, fuzzy, js, margin, naive, strict"]),
    ({"dropmatch_heads": 0}, ["dropmatch", "heads", "1 to 1024", "got 0"]),
    ({"dropmatch_heads": 2.5}, ["dropmatch", "heads", "integer", "2.5"]),
    ({"dropmatch_heads": [3]}, ["dropmatch", "heads", "single value"]),
    ({"dropmatch_dropout": 1}, ["dropmatch", "dropout", "[0, 1)", "got 1"]),
    ({"dropmatch_dropout": -0.1}, ["dropmatch", "dropout", "[0, 1)", "got -0.1"]),
    ({"dropmatch_dropout": "0.1"}, ["dropmatch", "dropout", "[0, 1)"]),
    ({"dropmatch_token_floor": 1.5}, ["dropmatch", "token_floor", "[0, 1]"]),
    ({"dropmatch_support": "some"}, ["dropmatch", "support", "auto, shortlist, full"]),
    ({"dropmatch": {"rule": "js"}}, ["vllm_xargs.dropmatch", "string", "list"]),  # vLLM's own words
    ({"dropmatch_foo": 1}, ["'dropmatch_foo'", "dropmatch_heads", "dropmatch_dropout", "dropmatch_mask_seed"]),
    ({"dropmatchheads": 1}, ["'dropmatchheads'", "dropmatch_heads"]),
    ({"dropmatch": "off", "dropmatch_heads": 3}, ["dropmatch_heads", "off", "js, margin, naive, strict"]),
]


def test_case_28_bad_settings_are_refused_and_disturb_nobody(client: Client) -> None:
    def refused(ask: Callable[..., Any], xargs: dict[str, Any]) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(QUESTION, xargs)
        assert caught.value.status_code == 400
        assert "vllm_xargs" in str(caught.value.body["param"])
        return str(caught.value.body["message"])

    alone = client.complete(STORY, NAIVE, 32)
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(client.complete, STORY, NAIVE, 32) for _ in range(2)]
        asks = itertools.cycle([client.chat, client.complete])
        bad = [pool.submit(refused, next(asks), xargs) for xargs, _ in BAD]
        for future, (xargs, words) in zip(bad, BAD, strict=True):
            message = future.result()
            assert all(word in message for word in words), (xargs, message)
        for future in good:
            assert future.result().choices[0].token_ids == alone.choices[0].token_ids
    check_block(alone, "naive")
    for ask in (client.chat, client.complete):  # vLLM itself begins to answer before it looks at the request
        with pytest.raises(openai.BadRequestError, match="unknown rule 'nope'"):
            list(ask(QUESTION, {"dropmatch": "nope"}, stream=True))


def test_metrics_count_what_was_delivered(client: Client, server: Server) -> None:
    """Rule by rule and reason by reason as the responses say; vLLM's own counters have what was cut off too."""
    before = server.counters("dropmatch:"), server.counters("vllm:spec_decode_num")
    asked = [(JS, {}), (JS, {"temperature": 0.8, "seed": 1}), (NAIVE, {}), (OFF, {}), (STRICT, {"temperature": 1.0})]

    def ask(case: tuple[dict[str, Any], dict[str, Any]]) -> Any:
        return client.chat(QUESTION, case[0], 21, **case[1])

    with ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(ask, asked))
    blocks = [block(response) for response in responses]
    grown = server.counters("dropmatch:") - before[0]
    assert grown == counted(blocks)
    assert {labels[1] for labels in grown if len(labels) > 2} == {"lossy=false", "lossy=true"}
    assert {labels[-1] for labels in grown} == {"rule=js", "rule=naive", "rule=off", "rule=strict"}

    ours = [sum(b[name] for b in blocks) for name in ("rounds", "draft_tokens", "accepted_tokens")]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    per_request = [sum(r.metrics["speculative_decoding"][name] for r in responses) for name in names]
    theirs = _vllm_counts(server, before[1], wanted=per_request)
    assert theirs == per_request
    assert ours[0] == theirs[0]
    assert all(mine <= other for mine, other in zip(ours, theirs, strict=True))

    # a stop string that ends a block early: vLLM says nothing per request, and counts all of the block
    loose = {"dropmatch_token_floor": 0.0}
    before = server.counters("dropmatch:"), server.counters("vllm:spec_decode_num")
    pieces = _pieces(client.chat(QUESTION, loose, 21, logprobs=True))
    middle = server.counters("dropmatch:")
    stopped = client.chat(QUESTION, loose, 21, stop=pieces[7][-1:] + pieces[8][:2])
    grown = server.counters("dropmatch:") - middle
    rounds = grown["dropmatch:drafts_total", "rule=js"]
    accepted = sum(n for (name, *_), n in grown.items() if name == "dropmatch:accepted_tokens_total")
    assert 1 + rounds + accepted - stopped.usage.completion_tokens in (0, 1)
    assert accepted <= grown["dropmatch:draft_tokens_total", "rule=js"] < stopped.usage.completion_tokens


def _vllm_counts(server: Server, before: Mapping[tuple[str, ...], float], wanted: list[int]) -> list[int]:
    """What vLLM's counters have grown by, once they are what is wanted or some time has passed."""
    end = time.monotonic() + 10
    while True:
        now = server.counters("vllm:spec_decode_num")
        names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
        found = [int(sum(n - before.get(key, 0) for key, n in now.items() if key[0] == name)) for name in names]
        if found == wanted or time.monotonic() > end:
            return found
        time.sleep(0.1)


def test_a_client_that_leaves_disturbs_nobody(client: Client, server: Server) -> None:
    """Its request ends long before its budget, and the others get what they get alone."""
    alone = [client.complete(STORY, xargs, 32).choices[0].token_ids for xargs in (JS, NAIVE)]
    with ThreadPoolExecutor(4) as pool:
        stream = client.complete(COUNT, JS, 900, stream=True, temperature=0.8, body={"ignore_eos": True})
        chunks = iter(stream)
        next(chunks)
        others = [pool.submit(client.complete, STORY, xargs, 32) for xargs in (JS, NAIVE)]
        next(chunks)
        stream.close()
        assert [other.result().choices[0].token_ids for other in others] == alone
    end = time.monotonic() + 10
    while sum(server.counters("vllm:num_requests_running").values()):
        assert time.monotonic() < end, "the request of the client that left goes on"
        time.sleep(0.1)
    counts = server.counters("dropmatch:")
    assert sum(n for (name, *_), n in counts.items() if name == "dropmatch:accepted_tokens_total") < 10_000
    time.sleep(0.5)
    assert server.counters("dropmatch:") == counts
    check_block(client.complete(STORY, JS), "js")


def test_the_log_is_silent_about_faults(server: Server) -> None:
    log = server.log.read_text(encoding="utf-8", errors="replace")
    assert "dropmatch: installed; rule js by default, heads over a shortlist" in log
    assert "note: rule js is lossy" in log
    faults = [line for line in log.splitlines() if "Traceback (most recent" in line or re.search(r"\bERROR \d", line)]
    assert faults == []


def test_sigint_ends_the_server(server: Server) -> None:
    """Ctrl-C, which a terminal sends to all processes of the command."""
    assert len(server.group()) > 1
    server.process.send_signal(signal.SIGINT)
    _ended(server)


def test_sigterm_ends_a_server_with_prompt_lookup(target: Path, tmp_path: Path) -> None:
    """What a service manager sends, to the first process; before that, prompt lookup over HTTP."""
    options = [TARGET, "--draft", "prompt-lookup", "-L", str(L), "--rule", "naive", "--max-model-len", "512"]
    with Server(options, tmp_path / "log") as server:
        client = Client(server.wait_until_ready().url)
        response = client.complete("red green blue, " * 6, max_tokens=24)
        found = block(response)
        assert found["rule"] == "naive"
        assert found["accepted_tokens"] > 0
        # case 27: nothing to look up, so steps have no draft row, and top-k alone is what vLLM stumbled over there
        for heat in ({"body": {"ignore_eos": True}}, {"temperature": 0.9, "body": {"ignore_eos": True, "top_k": 5}}):
            bare = client.complete("Zebra quilt fjord", max_tokens=6, **heat)
            assert bare.usage.completion_tokens == 6
        with pytest.raises(openai.BadRequestError, match=r"'js' compares distributions.*use rule 'naive'"):
            client.complete(STORY, {"dropmatch": "js"})
        server.process.send_signal(signal.SIGTERM)
        _ended(server)


def _ended(server: Server) -> None:
    """The server ends by itself, with all of its processes."""
    assert server.process.wait(timeout=30) in (0, 130, -signal.SIGINT, -signal.SIGTERM), server.tail()
    _, alive = psutil.wait_procs(server.group(), timeout=10)
    assert alive == []
