"""One process at a time writes to a benchmark's folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from dropmatch.errors import SettingError


@contextmanager
def alone(folder: Path, name: str = "run") -> Iterator[None]:
    """While active, no other process has the lock of this name; a process that is killed lets go of it.

    Folders that are made for it and get nothing else are removed.

    Raises:
        SettingError: another one has it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / f".{name}.lock", timeout=0):
            try:
                yield
            finally:
                if made and all(path.suffix == ".lock" for path in folder.iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)
                    for parent in made[1:]:
                        with suppress(OSError):  # another has put something there
                            parent.rmdir()
    except filelock.Timeout:
        raise SettingError(
            f"{folder}: another process of dropmatch is writing there: wait until it is done, stop it, or give another "
            "--out"
        ) from None
