"""One process at a time writes to a benchmark's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from dropmatch.errors import SettingError


@contextmanager
def alone(folder: Path, name: str = "run") -> Iterator[None]:
    """While active, no other process has the lock of this name; a process that is killed lets go of it.

    Raises:
        SettingError: another one has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / f".{name}.lock", timeout=0):
            yield
    except filelock.Timeout:
        raise SettingError(
            f"{folder}: another process of dropmatch is writing there: wait until it is done, stop it, or give another "
            "--out"
        ) from None
