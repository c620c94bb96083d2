"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from dropmatch.errors import SettingError


def check_writable(path: Path | None) -> None:
    """Refuse a path now that could not be written in the end; a file that is there is left as it is.

    Raises:
        SettingError: it cannot be written.
    """
    if path is None:
        return
    problem = None
    if path.is_dir():
        problem = "it is a folder"
    elif not path.absolute().parent.is_dir():
        problem = "its folder does not exist"
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        problem = "permission denied"
    if problem:
        raise SettingError(f"cannot write {path}: {problem}")
