"""Settings and a prompt to a running generation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dropmatch.cli.settings import Settings
from dropmatch.errors import SettingError
from dropmatch.models.names import NO_DRAFT

if TYPE_CHECKING:
    from torch import Tensor

    from dropmatch.cli.interrupts import Interrupt
    from dropmatch.decoding.verify import Observer
    from dropmatch.engines.hf.engine import Engine, GenerationStream
    from dropmatch.engines.hf.result import Token


def load_engine(settings: Settings) -> Engine:
    """Load the target and its drafter; a drafter that would not be used is not loaded.

    Raises:
        ModelError: a model cannot be found, fetched or used.
    """
    quiet_libraries()
    from dropmatch.engines.hf.load import load

    drafter = settings.drafter if settings.drafting.draft_length else NO_DRAFT
    return load(
        settings.target,
        drafter,
        dtype=settings.dtype,
        device=settings.device,
        draft_weights=settings.draft_weights,
    )


def quiet_libraries() -> None:
    """Progress bars and warnings of transformers stay out of the output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def encode(engine: Engine, prompt: str, settings: Settings) -> Tensor:
    """Prompt to [T] ids: through the chat template if there is one, unless it is to be taken as it is.

    Raises:
        SettingError: there is a system message and no template, the template refuses them, or the prompt has no
            tokens.
    """
    if settings.raw or not getattr(engine.tokenizer, "chat_template", None):
        if settings.system is not None:
            raise SettingError("--system needs a chat template, and this model's tokenizer has none")
        return engine.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if settings.system is not None:
        messages.insert(0, {"role": "system", "content": settings.system})
    return engine.encode(messages)


def start(
    engine: Engine,
    prompt: Tensor,
    settings: Settings,
    changes: Mapping[str, Any] | None = None,
    *,
    logprobs: bool = False,
    trace: bool = False,
    observer: Observer | None = None,
) -> GenerationStream:
    """Start a generation.

    Args:
        engine: the loaded models.
        prompt: [T] ids.
        settings: what decides about it.
        changes: options to use instead.
        logprobs: keep the log-probability of each token.
        trace: keep the verdicts on draft tokens.
        observer: told of each draft before it is judged.

    Raises:
        SettingError: the request cannot be honoured.
    """
    options = {**settings.options(), **(changes or {})}
    return engine.stream(prompt, stop=settings.stop, logprobs=logprobs, trace=trace, observer=observer, **options)


def follow(stream: GenerationStream, interrupt: Interrupt, each: Callable[[list[Token]], None]) -> None:
    """Run a generation to its end, or to the end of the round in which Ctrl-C is pressed."""
    for tokens in stream:
        interrupt.gentle = True
        each(tokens)
        if interrupt.pressed:
            stream.close()
            return
