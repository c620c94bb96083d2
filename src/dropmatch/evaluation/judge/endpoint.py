"""A model behind an endpoint that speaks OpenAI's chat completions, as vLLM and others do."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dropmatch.errors import DropMatchError, SettingError

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds; the wait doubles from try to try
TIMEOUT, CONNECT_TIMEOUT = 600.0, 10.0
DEFAULT_KEY = "OPENAI_API_KEY"
# how endpoints say that they do not take a parameter; that max_tokens is too large is another matter
_UNSUPPORTED = r"(?:un|not |n't )support|not (?:allowed|permitted)|unrecogni[sz]ed|unknown|deprecated"
_REFUSALS = {"max_tokens": _UNSUPPORTED, "temperature": rf"{_UNSUPPORTED}|must be|only"}


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

    OpenAI's reasoning models take no `max_tokens` and no temperature: an endpoint that says so is asked again, and from
    then on, with `max_completion_tokens` and without a temperature.

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
        self._url, self._model, self._variable = url, model, key_variable
        self._options: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}  # replaced, never changed
        self._lock = threading.Lock()
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

    @property
    def samples(self) -> bool:
        """Whether the endpoint has turned out to take no temperature, so that it answers at its own."""
        return "temperature" not in self._options

    def ask(self, question: str, stop: threading.Event) -> Reply:
        """The answer to a question, by the likeliest tokens unless the endpoint `samples`.

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
        while True:  # each turn takes away a parameter that was sent
            options = self._options
            try:
                return self._client.chat.completions.create(
                    model=self._model, messages=[{"role": "user", "content": question}], **options
                )
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                refused = _refused(_message(error)) & set(options)
                if not refused:
                    raise
                self._leave_out(refused)
            except (ValueError, self._openai.APIResponseValidationError):  # no JSON, or of another form
                return None

    def _leave_out(self, names: Iterable[str]) -> None:
        """Do without parameters from now on; another thread may have come to the same."""
        with self._lock:
            options = {name: value for name, value in self._options.items() if name not in names}
            if "max_tokens" in self._options and "max_tokens" not in options:
                options["max_completion_tokens"] = self._options["max_tokens"]
            self._options = options

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
        """What a server says about a failure, as part of a line."""
        return self._clean(_message(error))

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


def _message(error: Any) -> str:
    """What a server says about a failure."""
    body = error.body
    if isinstance(body, dict):
        body = body.get("message") or body.get("detail") or body
    return str(body or error)


def _refused(message: str) -> set[str]:
    """The parameters that a message names as ones that the endpoint does not take."""
    found = set()
    for name, words in _REFUSALS.items():
        near = rf"\b{name}\b.{{0,60}}?(?:{words})|(?:{words}).{{0,60}}?\b{name}\b"
        if re.search(near, message, re.IGNORECASE | re.DOTALL):
            found.add(name)
    return found


def _asked_for(error: Any) -> float | None:
    """Seconds that a server asks to wait for, within reason."""
    try:
        return min(max(float(error.response.headers["retry-after"]), 0.0), LONGEST_WAIT)
    except (KeyError, ValueError):
        return None
