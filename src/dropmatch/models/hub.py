"""The model hub: single files for the demo models, and safetensors repositories by their id.

The hub may be out of reach (a firewall, no network): every question waits a few seconds, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dropmatch.errors import ModelError
from dropmatch.models import resources
from dropmatch.models.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub.hf_api import ModelInfo

OnBytes = Callable[[int], None]
TIMEOUT = 4.0  # seconds
_WEIGHTS = ".safetensors"
_OTHER_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def offline() -> bool:
    """Whether the user said that the hub is not to be asked (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    asked = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    return asked or bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub library's bars and retry warnings stay away: this package reports progress itself."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    level, bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            enable_progress_bars()


def probe_file(repo: str, filename: str) -> int | None:
    """The size of a file on the hub; None when the hub cannot be asked or does not have it.

    Asked before any download, since the download call of the hub library retries for half a minute.
    """
    if offline():
        return None
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with _quiet():
        try:
            return get_hf_file_metadata(hf_hub_url(repo, filename), timeout=TIMEOUT).size
        except Exception:  # whatever is wrong with the hub, there is another source
            return None


def download_file(repo: str, filename: str, folder: Path) -> Path | None:
    """Downloads one file from the hub into `folder`, resuming; None when that fails."""
    from huggingface_hub import hf_hub_download

    with _quiet():
        try:
            return Path(hf_hub_download(repo, filename, local_dir=folder, etag_timeout=TIMEOUT))
        except Exception:
            return None


def cached_snapshot(repo: str) -> Path | None:
    """The folder of a repository that was downloaded before, or None. Asks nobody."""
    from huggingface_hub import snapshot_download

    try:
        # Not all of its files were wanted; without a pattern the hub library calls it incomplete.
        return Path(snapshot_download(repo, local_files_only=True, allow_patterns="config.json"))
    except Exception:
        return None


def fetch_snapshot(repo: str, reporter: Reporter, code: bool = False) -> Path:
    """The folder with a repository's config, tokenizer and safetensors weights, downloaded if need be.

    `code` also fetches the repository's Python files.
    Raises ModelError when the hub cannot be reached (and nothing is cached), when there is no such
    repository or no access to it, when it has no safetensors weights, and when the disk is too small.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if offline():
        return _cached_or_raise(repo, "HF_HUB_OFFLINE is set")
    try:
        with _quiet():
            info = HfApi().model_info(repo, timeout=TIMEOUT, files_metadata=True)
    except GatedRepoError as error:
        raise ModelError(
            f"access to {repo} must be asked for on its page on the model hub; then log in (`hf auth login`)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the model hub has no model {repo} (or it is private: log in with `hf auth login`), "
            "and there is no local folder of that name."
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repo!r} is no valid id of a model on the hub: {error}") from error
    except Exception as error:
        return _cached_or_raise(repo, f"{constants.ENDPOINT}: {_first_line(error)}")
    files = _files_to_fetch(info, repo, code)
    have = cached_snapshot(repo)
    if have is not None and have.name != info.sha:
        have = None  # an older state of the repository
    missing = [name for name in files if have is None or not (have / name).exists()]
    if have is not None and not missing:
        return have
    total = sum(files[name] for name in missing)
    resources.need_disk(Path(constants.HF_HUB_CACHE), total, f"download {repo}")
    try:
        with reporter.busy(f"{repo} from the model hub ({resources.human(total)})"), _quiet():
            # By branch, not by commit: only then does the cache note which snapshot "main" is.
            folder = snapshot_download(repo, allow_patterns=list(files), etag_timeout=TIMEOUT)
    except Exception as error:
        raise ModelError(
            f"the download of {repo} from the model hub failed ({_first_line(error)}). Try again: "
            "files that are complete are kept."
        ) from error
    return Path(folder)


def _files_to_fetch(info: ModelInfo, repo: str, code: bool) -> dict[str, int]:
    """The files of a repository that loading needs, with their sizes."""
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if "/" not in file.rfilename}
    if not any(name.endswith(_WEIGHTS) for name in files):
        kinds = sorted({Path(name).suffix for name in files} & {".bin", ".pt", ".pth", ".gguf", ".onnx"})
        raise ModelError(no_safetensors(f"the repository {repo}", kinds))
    wanted = (_WEIGHTS, *_OTHER_FILES, *((".py",) if code else ()))
    if "config.json" not in files:
        raise ModelError(f"the repository {repo} has no config.json: it is no transformers model.")
    # Some repositories carry the same weights twice, in the publisher's own layout.
    return {n: size for n, size in files.items() if n.endswith(wanted) and not n.startswith("consolidated")}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or repr(error)


def no_safetensors(what: str, kinds: list[str]) -> str:
    """The message about weights that are in no format that dropmatch reads."""
    found = f" (it has {', '.join(kinds)})" if kinds else ""
    advice = (
        "Pickled weights can run code when they are read, so dropmatch does not read them; "
        "convert them to safetensors, or use a model that is published so"
    )
    if kinds == [".gguf"]:
        advice = "Give the path of a downloaded .gguf file"
    return f"{what} has no safetensors weights{found}. {advice}."


def _cached_or_raise(repo: str, reason: str) -> Path:
    folder = cached_snapshot(repo)
    if folder is not None and (folder / "config.json").exists():
        return folder
    raise ModelError(
        f"cannot reach the model hub for {repo} ({reason}), and the model is not in the hub's local cache. "
        "Check the network, or give a local folder, a .gguf file or a demo: model."
    )
