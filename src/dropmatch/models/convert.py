"""From a GGUF file to a dense model folder (safetensors, config, tokenizer), once per file and dtype.

The conversion runs in a child process: its memory, twice that of the model, goes back to the system when it
ends, whatever the caller does next. A folder is trusted only with a marker that is written last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dropmatch.errors import ModelError
from dropmatch.models import resources
from dropmatch.models.cache import cache_root, lock, make_folder, publish, writing
from dropmatch.models.gguf_file import check_convertible
from dropmatch.models.progress import Reporter

MARKER = "dropmatch.json"
_LAYOUT = 1  # raise when folders made by an older version must be made again
_TAIL = 8
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def dense_path(sha256: str, dtype: str) -> Path:
    """Where the dense model of a GGUF file lies once it is converted."""
    return cache_root() / "dense" / f"{sha256[:16]}-{dtype}"


def find_dense(sha256: str, dtype: str) -> Path | None:
    """The dense model if it is in the cache, whole; else None."""
    folder = dense_path(sha256, dtype)
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        made_from = (marker["layout"], marker["source_sha256"], marker["dtype"])
        whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole and made_from == (_LAYOUT, sha256, dtype) else None


def dense_from_gguf(source: Path, sha256: str, dtype: str, name: str, reporter: Reporter) -> Path:
    """The dense model of a GGUF file whose SHA-256 is known, converted unless it is in the cache.

    Raises ModelError when the file is damaged or of a kind that cannot be converted, when disk or memory
    are too small, when the cache cannot be written, and when the conversion fails.
    """
    final = dense_path(sha256, dtype)
    if find_dense(sha256, dtype):
        return final
    with lock(f"dense-{final.name}", reporter):
        if find_dense(sha256, dtype):  # another process made it while this one waited
            return final
        header = check_convertible(source)
        dense_bytes = header.n_elements * ITEM_BYTES[dtype]
        resources.need_disk(cache_root(), int(dense_bytes * 1.02), f"convert {name}")
        resources.need_memory_to_convert(dense_bytes, name)
        folder = make_folder("dense")
        for leftover in [*folder.glob(f".{final.name}-*"), final]:
            shutil.rmtree(leftover, ignore_errors=True)
        with writing():
            temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=folder))
        try:
            with reporter.busy(f"converting {name} to {dtype} ({resources.human(dense_bytes)})"):
                _run_worker(source, temporary, dtype, name)
            with writing():
                _write_marker(temporary, sha256, dtype)
                publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _run_worker(source: Path, target: Path, dtype: str, name: str) -> None:
    """Runs the conversion in a child, which ends when this process does (its standard input closes)."""
    # -P (3.11+) has no equal in 3.10; the path is handed over so that the child imports this very package.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "dropmatch.models.convert_worker", str(source), str(target), dtype]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        try:
            output = child.stdout.read()
            child.wait()  # before its standard input is closed here, which would end it
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        return
    if child.returncode in (-9, 137):
        raise ModelError(
            f"the conversion of {name} was killed, most likely because memory ran out. Close other programs, "
            "or convert on a machine with more memory and copy the cache folder over."
        )
    tail = "\n".join("  " + line for line in output.strip().splitlines()[-_TAIL:])
    raise ModelError(f"{name} could not be converted from GGUF (exit status {child.returncode}):\n{tail}")


def _write_marker(folder: Path, sha256: str, dtype: str) -> None:
    import transformers

    marker = {
        "layout": _LAYOUT,
        "source_sha256": sha256,
        "dtype": dtype,
        "transformers": transformers.__version__,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
    # What was made as temporary is private to its maker; a cache may be shared.
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
