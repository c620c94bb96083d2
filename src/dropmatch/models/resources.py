"""Is there room on the disk and in memory for a step? Asked before the step starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from dropmatch.errors import ModelError
from dropmatch.models.cache import ENV
from dropmatch.models.progress import human

# Measured peaks of a conversion (resident, the mapped GGUF file included): 0.9 GB for 0.27 GB of dense
# weights, 3.1 GB for 1.26, 5.7 GB for 3.55. The factor leaves room for the fp32 copies of a large embedding.
CONVERT_FACTOR = 1.9
LOAD_FACTOR = 1.1
INTERPRETER_BYTES = 600_000_000


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def available_memory() -> int:
    """Bytes of memory a new process could take, within the container's limit where there is one."""
    available = int(psutil.virtual_memory().available)
    control = Path("/sys/fs/cgroup")
    try:
        limit = int((control / "memory.max").read_text())
        stat = dict(line.split() for line in (control / "memory.stat").read_text().splitlines())
        # The page cache counts as used there, but goes when memory is needed.
        used = int((control / "memory.current").read_text()) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return available  # no such limit ("max" is no number), or not Linux
    return min(available, max(limit - used, 0))


def need_disk(folder: Path, nbytes: int, what: str) -> None:
    """Raises ModelError unless `nbytes` are free on the disk of `folder`."""
    free = free_disk(folder)
    if nbytes > free:
        raise ModelError(
            f"not enough disk space to {what}: {human(nbytes)} needed in {folder}, {human(free)} free. "
            f"Free some space or set {ENV} to a folder on a larger disk."
        )


def need_memory(nbytes: int, what: str, advice: str) -> None:
    """Raises ModelError unless `nbytes` of memory are available."""
    available = available_memory()
    if nbytes > available:
        raise ModelError(f"not enough memory to {what}: {human(nbytes)} needed, {human(available)} available. {advice}")


def need_memory_to_convert(dense_bytes: int, name: str) -> None:
    """Raises ModelError when converting to `dense_bytes` of weights would not fit in memory."""
    need_memory(
        int(dense_bytes * CONVERT_FACTOR) + INTERPRETER_BYTES,
        f"convert {name}",
        "Close other programs, or convert on a machine with more memory and copy the cache folder over.",
    )


def need_memory_to_load(weight_bytes: int, name: str) -> None:
    """Raises ModelError when `weight_bytes` of weights would not fit in memory."""
    need_memory(
        int(weight_bytes * LOAD_FACTOR),
        f"load {name}",
        "Close other programs, choose a smaller model, or load it in a smaller dtype (bfloat16).",
    )
