"""The cache folder: where it is, how files in it are locked, hashed and made durable."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import platformdirs

from dropmatch.errors import ModelError
from dropmatch.models.progress import Reporter

ENV = "DROPMATCH_CACHE"
_BLOCK = 4 << 20


def cache_root() -> Path:
    """The cache folder: $DROPMATCH_CACHE, else the platform's cache folder. Not created here."""
    override = os.environ.get(ENV)
    return Path(override).expanduser().absolute() if override else Path(platformdirs.user_cache_dir("dropmatch"))


def make_folder(*parts: str) -> Path:
    """A folder inside the cache, created if need be.

    Raises ModelError when the cache cannot be written.
    """
    folder = cache_root().joinpath(*parts)
    with writing():
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied", str(folder))
    return folder


@contextmanager
def writing() -> Iterator[None]:
    """Turns an OSError while the cache is written (read-only, disk full) into a ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write in the model cache {cache_root()} ({error.strerror or error}"
            f"{f': {error.filename}' if error.filename else ''}). "
            f"Free the folder or set {ENV} to one that can be written."
        ) from error


@contextmanager
def lock(name: str, reporter: Reporter) -> Iterator[None]:
    """One process at a time does the work called `name`; the others wait for it.

    Raises ModelError when the cache cannot be written.
    """
    file_lock = filelock.FileLock(make_folder("locks") / f"{name}.lock")
    with writing():
        try:
            file_lock.acquire(timeout=0)
        except filelock.Timeout:
            reporter.say("waiting for another process that is working on the same model")
            file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda done: None) -> str:
    """SHA-256 of a file; `on_bytes` is told how many bytes are done."""
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            on_bytes(done)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Makes a file, or the entries of a folder, durable before something else relies on it."""
    flags = os.O_RDONLY
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, final: Path) -> None:
    """Atomically gives a finished file or folder the name under which others trust it."""
    if temporary.is_dir():
        for file in temporary.iterdir():
            sync(file)
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


def folder_bytes(folder: Path) -> int:
    """Bytes in the files below a folder, which may change or vanish meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total
