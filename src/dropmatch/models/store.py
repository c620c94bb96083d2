"""From a model name to a folder that is ready to load: `fetch`, `where` and the catalogue of demo models."""

from __future__ import annotations

import hashlib
import json
import os
import re
from enum import Enum
from pathlib import Path

from dropmatch.errors import ModelError
from dropmatch.models import hub, resources
from dropmatch.models.cache import cache_root, make_folder, publish, sha256_of, writing
from dropmatch.models.convert import ITEM_BYTES, dense_from_gguf, find_dense
from dropmatch.models.demos import DEMOS, PREFIX, CatalogueEntry, Demo, demo_named
from dropmatch.models.download import disk_to_download, have_gguf, obtain
from dropmatch.models.folder import check_folder
from dropmatch.models.gguf_file import check_convertible
from dropmatch.models.progress import Reporter, reporter_for

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Kind(Enum):
    """The forms that a model name can have."""

    DEMO = "demo"
    GGUF = "gguf"
    FOLDER = "folder"
    HUB = "hub"


def classify(name: str) -> Kind:
    """The form of a model name; looks at the disk, not at the network.

    Raises ModelError, with the accepted forms, for a name of no known form and for a file or folder that
    does not exist.
    """
    if name.startswith(PREFIX):
        demo_named(name)
        return Kind.DEMO
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the current folder
        return Kind.FOLDER
    if name.lower().endswith(".gguf"):
        if path.is_file():
            return Kind.GGUF
        raise ModelError(f"there is no file {name}. {_accepted()}")
    if name and path.exists():
        raise ModelError(f"{name} is neither a model folder nor a .gguf file. {_accepted()}")
    if _HUB_ID.fullmatch(name):
        return Kind.HUB
    hint = f" Did you mean {PREFIX}{name}?" if PREFIX + name in DEMOS else ""
    raise ModelError(f"no model is called {name!r}.{hint} {_accepted()}")


def _accepted() -> str:
    return (
        "A model is named by an id on the model hub (owner/name), a local folder with safetensors weights, "
        f"a .gguf file, or a demo model ({', '.join(DEMOS)})."
    )


def fetch(name: str, *, dtype: str = "auto", progress: bool | Reporter = True, trust_remote_code: bool = False) -> Path:
    """The folder of a model, ready to load; downloaded and converted as far as it is not in the cache.

    `dtype` is the one to convert a GGUF file to; "auto" is bfloat16, or float32 for a file that holds
    nothing else. Other models keep the dtype that they are stored in.
    `progress` is told on stderr.

    Raises ModelError when the name is not known, or the model cannot be reached, is damaged, has no
    safetensors weights, or does not fit on the disk or in memory; when the cache cannot be written.
    """
    reporter = reporter_for(progress)
    kind = classify(name)
    if kind is Kind.DEMO:
        return _fetch_demo(demo_named(name), _gguf_dtype(dtype, False), reporter)
    path = Path(name).expanduser()
    if kind is Kind.GGUF:
        header = check_convertible(path)
        target = _gguf_dtype(dtype, header.all_float32)
        return dense_from_gguf(path.absolute(), _hash_of_user_file(path, reporter), target, path.name, reporter)
    folder = hub.fetch_snapshot(name, reporter, code=trust_remote_code) if kind is Kind.HUB else path
    check_folder(folder)
    return folder


def where(name: str, *, dtype: str = "auto") -> Path | None:
    """The folder that `fetch` would return, if nothing remains to be done for it; else None.

    Raises ModelError when the name is of no known form, or names a file or folder that cannot be used.
    """
    kind = classify(name)
    if kind is Kind.DEMO:
        return find_dense(demo_named(name).sha256, _gguf_dtype(dtype, False))
    path = Path(name).expanduser()
    if kind is Kind.GGUF:
        sha256 = _known_hash(path)
        target = _gguf_dtype(dtype, check_convertible(path).all_float32)
        return find_dense(sha256, target) if sha256 else None
    if kind is Kind.HUB:
        folder = hub.cached_snapshot(name)
        try:
            if folder is not None:
                check_folder(folder)
        except ModelError:
            return None  # cached in part, or files of it only
        return folder
    check_folder(path)
    return path


def catalogue() -> list[CatalogueEntry]:
    """The demo models, and which of them are in the cache."""
    entries = []
    for demo in DEMOS.values():
        path = find_dense(demo.sha256, "bfloat16")
        entries.append(
            CatalogueEntry(
                name=demo.name,
                description=demo.description,
                licence=demo.licence,
                download_bytes=demo.nbytes,
                dense_bytes=demo.dense_bytes,
                cached=path is not None,
                path=path,
            )
        )
    return entries


def _gguf_dtype(dtype: str, all_float32: bool) -> str:
    if dtype == "auto":
        return "float32" if all_float32 else "bfloat16"
    if dtype not in ITEM_BYTES:
        raise ModelError(f"dtype {dtype!r} is not known; choose auto, {', '.join(ITEM_BYTES)}.")
    return dtype


def _fetch_demo(demo: Demo, dtype: str, reporter: Reporter) -> Path:
    found = find_dense(demo.sha256, dtype)
    if found:
        return found
    # Asked for the whole way before its first step: a download that cannot be converted helps nobody.
    dense_bytes = demo.dense_bytes // 2 * ITEM_BYTES[dtype]
    to_come = 0 if have_gguf(demo) else demo.nbytes
    resources.need_disk(
        cache_root(), max(disk_to_download(demo), to_come + int(dense_bytes * 1.02)), f"fetch {demo.name}"
    )
    resources.need_memory_to_convert(dense_bytes, demo.name)
    source = obtain(demo, reporter)
    return dense_from_gguf(source, demo.sha256, dtype, demo.name, reporter)


def _hash_note(path: Path) -> tuple[Path, dict[str, object]]:
    """Where the hash of a user's file is noted, and the state of the file that the note holds for."""
    resolved = path.resolve()
    stat = resolved.stat()
    state: dict[str, object] = {"path": str(resolved), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    name = hashlib.sha256(str(resolved).encode()).hexdigest()[:24]
    return cache_root() / "hashes" / f"{name}.json", state


def _known_hash(path: Path) -> str | None:
    note, state = _hash_note(path)
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        return str(known["sha256"]) if {key: known[key] for key in state} == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hash_of_user_file(path: Path, reporter: Reporter) -> str:
    known = _known_hash(path)
    if known:
        return known
    note, state = _hash_note(path)
    with reporter.transfer(f"reading {path.name}", path.stat().st_size) as update:
        sha256 = sha256_of(path, update)
    make_folder("hashes")
    temporary = note.with_suffix(f".{os.getpid()}")
    with writing():
        temporary.write_text(json.dumps({**state, "sha256": sha256}), encoding="utf-8")
        publish(temporary, note)
    return sha256
