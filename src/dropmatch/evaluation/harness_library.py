"""lm-evaluation-harness where it is installed, and the model hub where it answers."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache

from dropmatch.errors import SettingError

PUNKT = (
    "ifeval counts sentences with NLTK's punkt_tab, which is not on this machine and could not be fetched: run 'python "
    "-m nltk.downloader punkt_tab' where its server can be reached and copy the folder nltk_data to the home folder "
    "here, or point NLTK_DATA at it. On PyPI the package llama-index-core carries it: 'pip download --no-deps "
    "llama-index-core', unzip the wheel, and point NLTK_DATA at its llama_index/core/_static/nltk_cache"
)


def require() -> None:
    """Import the harness.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import lm_eval.models  # noqa: F401  before any model is registered: its own would be left out
    except ImportError as error:
        raise SettingError(
            f"this needs lm-evaluation-harness, which is not installed ({error}): pip install 'dropmatch[eval]'"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No bars, notes and warnings of the harness meanwhile."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@cache
def hub_answers() -> bool:
    """Whether the model hub can be asked; the wait is a few seconds at most, once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    from dropmatch.models import hub

    if hub.offline():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=hub.TIMEOUT)
    except Exception:  # whatever is wrong, nothing can be fetched
        return False
    return True


@contextmanager
def cache_if_unreachable() -> Iterator[None]:
    """Where the hub does not answer, take data sets from its local cache at once: the library retries half a minute."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def need_punkt() -> None:
    """Refuse now what would fail when texts are scored.

    Raises:
        SettingError: NLTK's punkt_tab is not here and cannot be fetched; the message says how to get it.
    """
    try:
        import nltk
    except ImportError as error:
        raise SettingError(f"ifeval needs NLTK ({error}): pip install 'dropmatch[eval]'") from error
    for fetch in (True, False):
        try:
            nltk.data.find("tokenizers/punkt_tab")
            return
        except LookupError:
            if fetch:
                with quiet():
                    nltk.download("punkt_tab", quiet=True)
    raise SettingError(PUNKT)


def reason(error: BaseException) -> str:
    """An error as part of a line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
