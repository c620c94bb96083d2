"""`dropmatch record`: keep the evidence of real rounds in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.console import error_console, say
from dropmatch.cli.failures import INTERRUPTED
from dropmatch.cli.files import check_writable
from dropmatch.cli.progress import Display
from dropmatch.cli.prompts import collect
from dropmatch.cli.session import encode, load_engine, start
from dropmatch.cli.settings import Settings
from dropmatch.config import DraftConfig, SamplingConfig
from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from dropmatch.engines.hf.engine import Engine
    from dropmatch.evaluation.lab import Record

KEEP_EVERY = 8  # prompts after which the file is written, for what no one can catch
RECORDING = "Recording"
Out = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The record to write, a .safetensors file.", show_default=False),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        show_default="three built-in ones",
        rich_help_panel=RECORDING,
        help='Prompts from a file: JSON lines with a "prompt" each, or plain text, one a line.',
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        show_default="all prompts",
        rich_help_panel=RECORDING,
        help="Stop after the prompt in which N draft tokens have differed from the target's own.",
    ),
]
Tokens = Annotated[
    int,
    typer.Option(
        "--tokens",
        metavar="M",
        rich_help_panel=RECORDING,
        help="How many of the target's likeliest tokens are kept a row (64 or more); dropout heads over a shortlist "
        "need as many as the shortlist has.",
    ),
]
DropoutHeads = Annotated[
    bool,
    typer.Option(
        "--dropout-heads",
        rich_help_panel=RECORDING,
        help="Also keep what the paper's sampled dropout heads need: the LM head's rows for all these tokens, up to "
        "hundreds of megabytes.",
    ),
]


def record(
    ctx: typer.Context,
    out: Out,
    prompts: Prompts = None,
    rows: Rows = None,
    tokens: Tokens = 2048,
    dropout_heads: DropoutHeads = False,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: o.DraftWeights = "auto",
    device: o.Device = None,
    rule: o.Rule = "strict",
    draft_length: o.DraftLength = DraftConfig.draft_length,
    temperature: o.Temperature = SamplingConfig.temperature,
    top_k: o.TopK = SamplingConfig.top_k,
    top_p: o.TopP = SamplingConfig.top_p,
    seed: o.Seed = SamplingConfig.seed,
    max_tokens: o.MaxTokens = 128,
    system: o.System = None,
    raw: o.Raw = False,
) -> None:
    """Decode prompts, and keep the evidence of their rounds for dropmatch replay.

    Of each draft token that is not the target's own: hidden state, likeliest
    tokens of target and draft, and the LM head's rows that rules look at. The
    text goes on by --rule; a record of strict decoding is that of plain texts.
    The file is written every few prompts, and at Ctrl-C or an error.

    Example: dropmatch record rounds.safetensors --prompts questions.jsonl --rows 500
    """
    from dropmatch.evaluation.lab import Recorder

    settings = Settings.from_options(ctx.params)
    if not settings.drafting.draft_length:
        raise SettingError("draft_length is 0, so that there is nothing to record: give at least 1")
    if rows is not None and rows < 1:
        raise SettingError(f"rows must be an integer of at least 1, got {rows}")
    texts = collect((), prompts)
    check_writable(out)
    errors = error_console(None)
    say(errors, "", f"loading {settings.target} and {settings.drafter}")
    engine = load_engine(settings)
    recorder = Recorder(engine, tokens, dropout_heads=dropout_heads)
    encoded = _encoded(engine, texts, settings)
    display = Display(errors, len(texts), 1, 1, settings.sampling.max_tokens)
    done = 0

    def keep() -> Record:
        about = {"target": settings.target, "draft": settings.drafter, "settings": settings.as_dict()}
        found = recorder.record(**about, prompts=done)
        found.save(out)
        return found

    def keep_all() -> None:
        found = keep()
        size = out.stat().st_size / 2**20
        say(errors, "", f"{out}: {len(found)} rows of {found.blocks} rounds on {done} prompts, {size:.1f} MiB")

    try:
        with display.running():
            for ids in encoded:
                recorder.begin(ids)
                stream = start(engine, ids, settings, observer=recorder)
                display.begin(done + 1, f"{len(recorder)} rows", 0)
                for block in stream:
                    recorder.add([token.id for token in block])
                    display.add(len(block))
                recorder.end()
                display.end(stream.result)
                done += 1
                if rows is not None and len(recorder) >= rows:
                    break
                if done % KEEP_EVERY == 0 and len(recorder):
                    keep()
    except BaseException as error:  # whatever it is, the rounds before it are good
        if len(recorder):
            keep_all()
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise
    keep_all()


def _encoded(engine: Engine, prompts: list[str], settings: Settings) -> list[Tensor]:
    """All prompts to [T] ids, each checked before the first is decoded.

    Raises:
        SettingError: one cannot be decoded; the message has its number.
    """
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = encode(engine, prompt, settings)
            start(engine, ids, settings)  # only checked: nothing runs before it is iterated
        except SettingError as error:
            raise SettingError(f"prompt {number} of {len(prompts)}: {error}") from error
        found.append(ids)
    return found
