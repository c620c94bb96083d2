"""What the tests of the judge share: a benchmark's folder, and a small server that says what a test wants."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from dropmatch.evaluation.backends import Group, Output
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import examples_of
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks.choose import choose_task

MODELS = ("wise", "wiser")
EXAMPLES = 6
Texts = dict[str, list[str]]


@dataclass(frozen=True)
class Asked:
    """What a question holds.

    Attributes:
        input: the prompt; empty for a conversation.
        texts: those between the tags, one or two; of a conversation the last ones.
        again: it was asked before.
        talks: conversations, each what was said turn by turn.
        references: by the name of their tags.
    """

    input: str
    texts: tuple[str, ...]
    again: bool
    talks: tuple[tuple[str, ...], ...] = ()
    references: dict[str, str] = field(default_factory=dict)


@dataclass
class Server:
    """Answers by `says`: a text, or a status with a message and headers.

    Attributes:
        says: what comes of a question.
        key: that it wants.
        refuses: the error that the body of a request gets, if any.
        asked: questions, in the order in which they came.
        bodies: of the requests.
    """

    says: Callable[[Asked], str | tuple[int, str, dict[str, str]]]
    key: str | None = None
    refuses: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda body: None
    asked: list[Asked] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> Server:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"


def read(question: str) -> Asked:
    """The texts in a question."""
    again = "An earlier answer" in question
    references = dict(re.findall(r"<(reference(?:_\d)?)>\n(.*?)\n</\1>", question, re.DOTALL))
    shown = re.findall(r"<(conversation(?:_[AB])?)>\n(.*?)\n</\1>", question, re.DOTALL)
    if shown:
        found = [re.findall(r"<((?:input|reply)_\d)>\n(.*?)\n</\1>", talk, re.DOTALL) for _, talk in shown]
        talks = tuple(tuple(text for _, text in talk) for talk in found)
        return Asked("", tuple(talk[-1] for talk in talks), again, talks, references)
    texts = re.findall(r"<(reply(?:_[AB])?)>\n(.*?)\n</\1>", question, re.DOTALL)
    (prompt,) = re.findall(r"<input>\n(.*?)\n</input>", question, re.DOTALL)
    return Asked(prompt, tuple(text for _, text in texts), again, (), references)


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                return self._send(404, {"detail": "Not Found"})
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                return self._send(401, {"error": {"message": f"wrong key {self.headers['Authorization']}"}})
            if body["model"] not in MODELS:
                return self._send(404, {"error": {"message": "no such model", "code": "model_not_found"}})
            asked, refusal = read(body["messages"][0]["content"]), server.refuses(body)
            with server.lock:
                server.bodies.append(body)
                server.asked += [] if refusal else [asked]
            if refusal:
                return self._send(400, {"error": refusal})
            said = server.says(asked)
            if isinstance(said, tuple):
                status, message, headers = said
                return self._send(status, {"error": {"message": message}}, headers)
            message = {"role": "assistant", "content": said}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._send(200, {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"],
                             "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 7,
                                                            "total_tokens": 8}})  # fmt: skip

        def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def texts_of(*lossy: str) -> Texts:
    """Strict says s0, s1, ...; the cells j0, j1, ... and so on, but the last text is the same of all."""
    return {
        cell: [f"{cell[0]}{i}" if i < EXAMPLES - 1 else "same" for i in range(EXAMPLES)] for cell in ("strict", *lossy)
    }


def benchmark(folder: Path, texts: Texts) -> Path:
    """A folder as dropmatch bench leaves it."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(EXAMPLES)))
    plan = Plan.from_values(
        {"target": "tiny", "tasks": [str(prompts)], "rules": [cell for cell in texts if cell != "strict"]}
    )
    store, task = Store(folder / "out", plan), choose_task(str(prompts))
    store.keep_plan()
    examples, _ = examples_of(task, plan.task(plan.tasks[0]))
    for cell, said in texts.items():
        for number, (example, text) in enumerate(zip(examples, said, strict=False)):
            output = Output(text, 4, "stop", 2, 5, 2, 0, {"exact": 2}, {1: 2})
            store.add(task.name, cell, number, [example], Group([output], 0.5))
    return folder / "out"


def judge(
    folder: Path, url: str, *more: str, model: str = "wise", width: int = 200, env: dict[str, str] | None = None
) -> Any:
    """Run the command, with short waits and neither the user's key nor a proxy."""
    from dropmatch.cli.app import app

    variables = dict.fromkeys(
        ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "DROPMATCH_DEBUG")
    )
    args = ["judge", str(folder), "--endpoint", url, "--model", model, *more]
    with mock.patch("dropmatch.evaluation.judge.endpoint.FIRST_WAIT", 0.001):
        return CliRunner(env={**variables, "COLUMNS": str(width), **(env or {})}).invoke(app, args)


def result(folder: Path, number: int = 0) -> dict[str, Any]:
    """Of the only task, what one judge has come to."""
    (task,) = json.loads((folder / "judge.json").read_text())["tasks"].values()
    return task[number]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "judgements.jsonl").read_text().splitlines()]
