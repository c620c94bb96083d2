"""A model behind an endpoint that speaks OpenAI's chat completions, as vLLM and others do."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dropmatch.errors import DropMatchError, SettingError

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds; the wait doubles from try to try
TIMEOUT, CONNECT_TIMEOUT = 600.0, 10.0
DEFAULT_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        text: the answer, or why there is none.
        tokens: its length, 0 if the endpoint does not say.
        rejected: the endpoint took the question for invalid, for example for too long.
    """

    text: str
    tokens: int = 0
    rejected: bool = False


class Endpoint:
    """Asks one question at a time; threads may share it.

    Args:
        url: where it is, as http://localhost:8000/v1.
        model: its name there.
        key_variable: the environment variable that holds the key. The default one may be unset.
        max_tokens: the most tokens of an answer.

    Raises:
        SettingError: the package is missing, or a setting will not do; nothing was sent.
    """

    def __init__(self, url: str, model: str, key_variable: str = DEFAULT_KEY, max_tokens: int = 2048) -> None:
        if not _is_address(url):
            raise SettingError(f"endpoint must be a URL such as http://localhost:8000/v1, got {url!r}")
        try:
            import openai
        except ImportError as error:
            raise SettingError("a judge needs the openai package: pip install 'dropmatch[eval]'") from error
        self._url, self._model, self._max_tokens, self._variable = url, model, max_tokens, key_variable
        self._key = os.environ.get(key_variable, "").strip()
        if not self._key and key_variable != DEFAULT_KEY:
            raise SettingError(f"the environment variable {key_variable} holds no key")
        if not self._key.isascii() or not self._key.isprintable():
            raise SettingError(f"the key in {key_variable} has characters that no key has")
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=url,
            api_key=self._key or "none",  # local servers ask for none
            max_retries=0,  # done here: waits end when the run does
            timeout=openai.Timeout(TIMEOUT, connect=CONNECT_TIMEOUT),
        )
        self._has_answered = False

    def ask(self, question: str, stop: threading.Event) -> Reply:
        """The answer to a question, by the likeliest tokens.

        Args:
            question: a user's message.
            stop: ends the waits between tries.

        Raises:
            SettingError: the endpoint refuses the key or does not know the model.
            DropMatchError: it cannot be reached, or fails again and again.
        """
        problem = ""
        for number in range(TRIES):
            try:
                return self._read(self._send(question))
            except self._openai.APIStatusError as error:
                said = self._said(error)
                self._refuse(error, said)
                if error.status_code not in (408, 409, 429) and error.status_code < 500:
                    self._has_answered = True
                    return Reply(f"HTTP {error.status_code}: {said}", rejected=True)
                problem = f"{self._url} answers {error.status_code} ({said})"
                wait = _asked_for(error)
            except self._openai.APITimeoutError:
                problem, wait = f"{self._url} does not answer in time", None
            except self._openai.APIConnectionError as error:
                problem, wait = f"cannot reach {self._url} ({self._clean(str(error.__cause__ or error))})", None
                if not self._has_answered and type(error.__cause__).__name__ == "ConnectError":
                    raise DropMatchError(f"{problem}: is it running, and is that its address?") from error
            if number + 1 < TRIES and stop.wait(
                wait if wait is not None else min(FIRST_WAIT * 2**number, LONGEST_WAIT)
            ):
                break
        raise DropMatchError(f"{problem}, after {TRIES} tries")

    def _send(self, question: str) -> Any:
        try:
            return self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=self._max_tokens,
            )
        except (ValueError, self._openai.APIResponseValidationError):  # no JSON, or of another form
            return None

    def _read(self, found: Any) -> Reply:
        """The answer out of a completion.

        Raises:
            SettingError: it is something else.
        """
        try:
            text, usage = found.choices[0].message.content or "", found.usage
            text = text.encode("utf-8", errors="replace").decode()  # halves of surrogate pairs cannot be written
        except (AttributeError, IndexError, TypeError):
            raise SettingError(
                f"what {self._url} answers is no chat completion: is that the address of an API? It often ends in /v1"
            ) from None
        self._has_answered = True
        tokens = getattr(usage, "completion_tokens", None) or 0
        return Reply(text, tokens)

    def _refuse(self, error: Any, said: str) -> None:
        """Give up on what no second try would change."""
        if error.status_code in (401, 403):
            if self._key:
                raise SettingError(f"{self._url} refuses the key in {self._variable}: {said}") from error
            raise SettingError(
                f"{self._url} wants a key: set {self._variable}, or name another variable with --api-key-env ({said})"
            ) from error
        if error.code == "insufficient_quota":
            raise DropMatchError(f"{self._url} answers: {said}") from error
        if error.status_code == 404 or error.code == "model_not_found":
            raise SettingError(self._unknown(said)) from error

    def _unknown(self, said: str) -> str:
        """Why there is nothing at this address, or no such model."""
        try:
            names = [model.id for model in self._client.models.list(timeout=CONNECT_TIMEOUT)]
        except (self._openai.OpenAIError, ValueError, AttributeError, TypeError):
            names = []
        if names and self._model not in names:
            return f"{self._url} does not know the model {self._model!r}; it has {self._clean(', '.join(names))}"
        return f"{self._url} does not know the model {self._model!r}, or is not the address of an API ({said})"

    def _said(self, error: Any) -> str:
        """What a server says about a failure."""
        body = error.body
        if isinstance(body, dict):
            body = body.get("message") or body.get("detail") or body
        return self._clean(str(body or error))

    def _clean(self, text: str) -> str:
        """One short line without control characters, and without the key."""
        if self._key:
            text = text.replace(self._key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= 200 else line[:197] + "..."


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _asked_for(error: Any) -> float | None:
    """Seconds that a server asks to wait for, within reason."""
    try:
        return min(max(float(error.response.headers["retry-after"]), 0.0), LONGEST_WAIT)
    except (KeyError, ValueError):
        return None
