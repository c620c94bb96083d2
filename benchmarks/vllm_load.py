"""A mixed load on `dropmatch serve`, and whether all of it came out right.

    python benchmarks/vllm_load.py --json results/vllm_load.json
    python benchmarks/vllm_load.py --base-url http://127.0.0.1:8000 --requests 1000 --concurrency 32

Without --base-url it starts a server itself. Rules off, strict, naive and js with different K and p, greedy and
seeded at temperature 0.7, stop strings, JSON schemas, streams, clients that leave early, bad requests. Checked:
- each request is answered or refused as it should be, and JSON is valid (how many equal requests got different
  texts is only reported: in bf16 the rest of the batch can tip a close decision);
- the server's dropmatch counters are the sum of the responses' own numbers, rule by rule and reason by reason, and
  fit the tokens in their usage; of a client that left, or of a stop string, a response has none (bounds are checked);
- after the load nothing runs on, and the memory of the server's processes is flat once it is warm.
Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common import MATHS, PROSE, report

RULES: list[dict[str, Any]] = [
    {"dropmatch": "off"},
    {"dropmatch": "strict"},
    {"dropmatch": "naive", "dropmatch_heads": 3},
    {"dropmatch": "naive", "dropmatch_heads": 8, "dropmatch_dropout": 0.1},
    {"dropmatch": "js"},
    {"dropmatch": "js", "dropmatch_heads": 10, "dropmatch_dropout": 0.1},
    {"dropmatch": "js", "dropmatch_evaluation": "eager"},
]
BAD: list[dict[str, Any]] = [
    {"dropmatch": "typical"},
    {"dropmatch": "js", "dropmatch_heads": 0},
    {"dropmatch": "js", "dropmatch_dropout": 1},
    {"dropmatch": "naive", "dropmatch_typo": 1},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Ben", "Cem"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOSSLESS = ("exact", "sampled")
MAX_TOKENS = 64
FLAT = 0.03  # the last third of the load may add so much to the memory
_SAMPLE = re.compile(r"^([\w:]+)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Counts = Counter[tuple[str, ...]]


@dataclass
class Request:
    """One request of the load.

    Attributes:
        kind: plain, stop, json, leave or bad.
        stream: whether it is streamed; clients that leave always stream.
        body: what it asks for.
    """

    kind: str
    stream: bool
    body: dict[str, Any]

    @property
    def rule(self) -> str:
        """Its acceptance rule."""
        return str(self.body["extra_body"]["vllm_xargs"]["dropmatch"])


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        text, tokens, finish: of its choice; `tokens` are those of the usage, None if it never came.
        block: dropmatch's numbers, None if the response has none.
        error: what went wrong.
        seconds: from sending to the end.
    """

    text: str = ""
    tokens: int | None = None
    finish: str | None = None
    block: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass
class Load:
    """Requests and their answers, with what was seen of the server meanwhile."""

    requests: list[Request]
    answers: list[Answer] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # share of the load that is done, bytes
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def check(self, right: bool, failure: str) -> None:
        """Keep a failure unless it is right."""
        if not right:
            self.failures.append(failure)


def make_requests(count: int, model: str, seed: int) -> list[Request]:
    """A mix of so many: 10 % leave early, 4 % are bad, 15 % have a stop string, 15 % a schema, the rest is plain."""
    source = random.Random(seed)
    kinds = source.choices(["leave", "bad", "stop", "json", "plain"], [10, 4, 15, 15, 56], k=count)
    kinds[: len(BAD)] = ["bad"] * len(BAD)
    source.shuffle(kinds)
    found = []
    for i, kind in enumerate(kinds):
        xargs = BAD[i % len(BAD)] if kind == "bad" else RULES[i % len(RULES)]
        text = "Describe a person as JSON." if kind == "json" else source.choice(MATHS + PROSE)
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "extra_body": {"vllm_xargs": xargs},
        }
        if source.random() < 0.5:
            body |= {"temperature": 0.7, "seed": source.randrange(4)}
        if kind == "stop":
            body["stop"] = [source.choice([" the", ".", " a", "e t"]), "never said"]
        if kind == "json":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        found.append(Request(kind, kind == "leave" or (kind != "bad" and source.random() < 0.4), body))
    return found


async def send(client: openai.AsyncOpenAI, request: Request) -> Answer:
    """Send a request and wait for its end, or leave in the middle of it."""
    answer, start = Answer(), time.perf_counter()
    try:
        if request.stream:
            await _read_stream(client, request, answer)
        else:
            response = await client.chat.completions.create(**request.body)
            choice = response.choices[0]
            answer.text, answer.finish = choice.message.content or "", choice.finish_reason
            answer.tokens, answer.block = response.usage.completion_tokens, _block(response)
    except openai.APIStatusError as error:
        answer.error = f"{error.status_code}: {error.message}"
    except openai.APIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - start
    return answer


async def _read_stream(client: openai.AsyncOpenAI, request: Request, answer: Answer) -> None:
    stream = await client.chat.completions.create(**request.body, stream=True, stream_options={"include_usage": True})
    chunks = 0
    async for chunk in stream:
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            answer.finish = choice.finish_reason or answer.finish
        if chunk.usage is not None:
            answer.tokens, answer.block = chunk.usage.completion_tokens, _block(chunk)
        chunks += 1
        if request.kind == "leave" and chunks == 4:
            await stream.close()
            return


def _block(response: Any) -> dict[str, Any] | None:
    metrics = getattr(response, "metrics", None) or {}
    return (metrics.get("speculative_decoding") or {}).get("dropmatch")


async def run(client: openai.AsyncOpenAI, load: Load, concurrency: int, processes: list[psutil.Process]) -> None:
    """Send all requests, so many at once; the memory is looked at after every 2 % of them."""
    gate, done = asyncio.Semaphore(concurrency), 0
    step = max(1, len(load.requests) // 50)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("requests", total=len(load.requests))

        async def one(request: Request) -> Answer:
            nonlocal done
            async with gate:
                answer = await send(client, request)
            done += 1
            progress.advance(task)
            if done % step == 0:
                load.memory.append((done / len(load.requests), resident(processes)))
            return answer

        start = time.perf_counter()
        load.answers = list(await asyncio.gather(*map(one, load.requests)))
        load.seconds = time.perf_counter() - start


def resident(processes: list[psutil.Process]) -> int:
    """Resident memory of the server's processes, in bytes; what they share is counted once for each."""
    found = 0
    for process in processes:
        try:
            found += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def read_counters(url: str) -> Counts:
    """dropmatch's counters, and the number of requests that run or wait."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: Counts = Counter()
    for match in filter(None, map(_SAMPLE.match, lines)):
        name, labels, value = match.groups()
        if name.startswith("dropmatch:") and name.endswith("_total"):
            found[(name, *(f"{k}={v}" for k, v in sorted(_LABEL.findall(labels))))] = int(float(value))
        if name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            found[("requests",)] += int(float(value))
    return found


def counted(block: dict[str, Any]) -> Counts:
    """The counters that one request has made, by what its response says."""
    rule = f"rule={block['rule']}"
    found: Counts = Counter()
    found["dropmatch:drafts_total", rule] = block["rounds"]
    found["dropmatch:draft_tokens_total", rule] = block["draft_tokens"]
    for reason, count in block["accepted_by_reason"].items():
        lossy = f"lossy={'false' if reason in LOSSLESS else 'true'}"
        found["dropmatch:accepted_tokens_total", lossy, f"reason={reason}", rule] = count
    return found


def check_answers(load: Load) -> dict[str, Any]:
    """Each by itself, and the same requests against each other."""
    finished: Counter[str] = Counter()
    same: dict[str, set[str]] = {}
    unfinished_json = 0
    for request, answer in zip(load.requests, load.answers, strict=True):
        what = f"{request.kind} request with {request.body['extra_body']['vllm_xargs']}"
        finished[f"{request.kind}: {(answer.error or answer.finish or 'left')[:4].rstrip(':')}"] += 1
        if request.kind == "bad":
            load.check((answer.error or "").startswith("400"), f"{what} was not refused by a 400: {answer.error}")
            continue
        load.check(answer.error is None, f"{what}: {answer.error}")
        if request.kind == "leave" or answer.error is not None:
            continue
        load.check(answer.finish in ("stop", "length"), f"{what} ended by {answer.finish}")
        key = json.dumps(request.body, sort_keys=True)
        same.setdefault(key, set()).add(answer.text)
        if request.kind == "stop":
            load.check(not any(stop in answer.text for stop in request.body["stop"]), f"{what}: text after its stop")
        if request.kind == "json" and answer.finish == "length":
            unfinished_json += 1
        elif request.kind == "json":
            load.check(_is_person(answer.text), f"{what}: not what the schema asks for: {answer.text!r}")
        if answer.block is not None and request.kind in ("plain", "stop"):
            cut = 1 + answer.block["rounds"] + answer.block["accepted_tokens"] - (answer.tokens or 0)
            load.check(cut in (0, 1), f"{what}: {answer.block} does not fit {answer.tokens} tokens")
        if answer.block is not None and answer.block["rounds"]:
            load.check(answer.block["rule"] == request.rule, f"{what} was judged by {answer.block['rule']}")
        wanted = request.kind != "stop" or answer.finish == "length"
        load.check(answer.block is not None or not wanted, f"{what}: the response has no numbers")
    several = sum(len(texts) > 1 for texts in same.values())
    return {"ended": dict(sorted(finished.items())), "unfinished_json": unfinished_json, "texts_that_vary": several}


def _is_person(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    right = isinstance(found, dict) and set(found) == {"name", "age"} and found["name"] in ("Ann", "Ben", "Cem")
    return bool(right and type(found["age"]) is int and 0 <= found["age"] <= 99)


def check_counters(load: Load, grown: Counts) -> dict[str, Any]:
    """The counters against the responses: equal, but for the requests that have no numbers of their own."""
    known: Counts = Counter()
    silent: Counter[str] = Counter()  # by rule: the most tokens that requests without numbers have had
    least: Counter[str] = Counter()  # and the tokens that those with a usage are known to have had
    for request, answer in zip(load.requests, load.answers, strict=True):
        if answer.block is not None:
            known.update(counted(answer.block))
        elif request.kind != "bad":
            rule = request.rule
            silent[rule] += MAX_TOKENS if answer.tokens is None else answer.tokens
            least[rule] += 0 if answer.tokens is None else max(0, answer.tokens - 1)
    for rule in sorted({request.rule for request in load.requests if request.kind != "bad"}):
        more = {key: n - known[key] for key, n in (grown | known).items() if key[-1] == f"rule={rule}"}
        load.check(all(n >= 0 for n in more.values()), f"{rule}: the counters have less than the responses: {more}")
        tokens = sum(n for key, n in more.items() if key[0] != "dropmatch:draft_tokens_total")
        # each round gives its accepted tokens and one more, unless it was cut before that
        low, high = least[rule], silent[rule]
        load.check(low <= tokens <= high, f"{rule}: {tokens} tokens without a response, expected {low} to {high}")
        if not silent[rule]:
            load.check(not any(more.values()), f"{rule}: the counters differ from the responses by {more}")
    accepted = {" ".join(key[1:]): n for key, n in sorted(grown.items()) if key[0] == "dropmatch:accepted_tokens_total"}
    return {"accepted": accepted, "by_responses": sum(known.values()), "by_counters": sum(grown.values())}


def check_memory(load: Load) -> dict[str, Any]:
    """The last third against the middle one: the first warms caches up."""
    middles, lasts = ([n for share, n in load.memory if low < share <= low + 1 / 3] for low in (1 / 3, 2 / 3))
    if not middles or not lasts or not load.memory[0][1]:
        return {}  # too few requests, or a server on another machine
    middle, last = statistics.median(middles), statistics.median(lasts)
    growth = last / middle - 1
    load.check(growth <= FLAT, f"the server's memory has grown by {growth:.1%} in the last third of the load")
    mib = {"start": load.memory[0][1], "middle": middle, "end": load.memory[-1][1]}
    return {"mib": {name: round(size / 2**20) for name, size in mib.items()}, "growth_pct": round(100 * growth, 2)}


def settle(url: str, load: Load) -> Counts:
    """The counters once nothing runs any more; what clients have left must end soon."""
    end = time.monotonic() + 15
    while (found := read_counters(url))["requests",] and time.monotonic() < end:
        time.sleep(0.2)
    load.check(not found.pop(("requests",), 0), "requests run on after their clients have gone")
    return found


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The address of the server: the one that was given, or one that is started for the load."""
    if options.base_url is not None:
        yield options.base_url.rstrip("/").removesuffix("/v1")
        return
    url = f"http://127.0.0.1:{options.port}"
    command = [str(Path(sys.executable).with_name("dropmatch")), "serve", options.target, "-L", str(options.length)]
    command += [] if options.draft is None else ["--draft", options.draft]
    command += ["--rule", "js", "--port", str(options.port), "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(options.concurrency)]
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        print(f"starting the server; its log is {log.name}", file=sys.stderr)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit("the server did not get ready; see its log")


def processes_of(url: str) -> list[psutil.Process]:
    """The processes behind an address on this machine; none if it is on another one."""
    port = int(url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            main = psutil.Process(connection.pid)
            return [main, *main.children(recursive=True)]
    return []


async def measure(url: str, options: argparse.Namespace) -> tuple[dict[str, Any], Load]:
    """A small load without silent requests, whose counters must agree to the token; then the whole of it."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id
    processes = processes_of(url)
    requests = make_requests(options.requests, model, options.seed)
    figures: dict[str, Any] = {"model": model, "requests": len(requests), "concurrency": options.concurrency}
    failures: list[str] = []
    speaking = [request for request in requests if request.kind in ("plain", "json")][: max(1, len(requests) // 10)]
    for name, chosen in (("warm-up", speaking), ("load", requests)):
        load = Load(chosen)
        before = settle(url, load)
        await run(client, load, options.concurrency, processes)
        grown = settle(url, load) - before
        tokens = sum(answer.tokens or 0 for answer in load.answers)
        figures[name] = {
            **check_answers(load),
            "counters": check_counters(load, grown),
            "tokens": tokens,
            "tokens_per_second": round(tokens / load.seconds, 1),
            "rules": dict(sorted(Counter(r.rule for r in chosen if r.kind != "bad").items())),
        }
        failures += [f"{name}: {failure}" for failure in load.failures]
        load.failures = failures
    figures["memory"] = check_memory(load)
    await client.close()
    return figures, load


def main() -> None:
    """Run the load, report, and fail if a check does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a server that runs already; without it one is started")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the mix")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--target", default="demo:qwen2.5-coder", help="target model of the server that is started")
    parser.add_argument("--draft", help="its draft model; default: the demo target's own")
    parser.add_argument("-L", "--length", type=int, default=5, help="its draft length")
    parser.add_argument("--port", type=int, default=8765, help="its port")
    options = parser.parse_args()
    with served(options) as url:
        figures, load = asyncio.run(measure(url, options))
    figures["failures"] = load.failures
    report(figures, options.json)
    if load.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
