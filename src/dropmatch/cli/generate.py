"""`dropmatch generate`: one text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from dropmatch.cli import options as o
from dropmatch.cli.console import error_console, has_color, output_console, printable, say, to_json
from dropmatch.cli.failures import INTERRUPTED
from dropmatch.cli.highlight import legend, painted
from dropmatch.cli.interrupts import noting_interrupt
from dropmatch.cli.session import encode, follow, load_engine, start
from dropmatch.cli.settings import Settings
from dropmatch.cli.summary import summarize
from dropmatch.cli.tracing import TraceWriter, opened_for_writing
from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig
from dropmatch.environment import versions
from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from dropmatch.engines.hf.result import Token

Prompt = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT",
        help="The text to answer, or with --raw to continue. - reads it from stdin, less one newline at its end; "
        "a text that begins with a dash goes after --.",
        show_default=False,
    ),
]


def generate(
    ctx: typer.Context,
    prompt: Prompt,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: o.DraftWeights = "auto",
    device: o.Device = None,
    rule: o.Rule = AcceptanceConfig.rule,
    heads: o.Heads = AcceptanceConfig.heads,
    dropout: o.Dropout = AcceptanceConfig.dropout,
    verdict: o.Verdict = AcceptanceConfig.verdict,
    strictness: o.Strictness = AcceptanceConfig.strictness,
    heads_mode: o.HeadsMode = AcceptanceConfig.heads_mode,
    token_floor: o.TokenFloor = AcceptanceConfig.token_floor,
    support: o.Support = AcceptanceConfig.support,
    evaluation: o.Evaluation = AcceptanceConfig.evaluation,
    mask_seed: o.MaskSeed = AcceptanceConfig.mask_seed,
    draft_length: o.DraftLength = DraftConfig.draft_length,
    draft_stop_probability: o.DraftStopProbability = DraftConfig.draft_stop_probability,
    temperature: o.Temperature = SamplingConfig.temperature,
    top_k: o.TopK = SamplingConfig.top_k,
    top_p: o.TopP = SamplingConfig.top_p,
    seed: o.Seed = SamplingConfig.seed,
    max_tokens: o.MaxTokens = SamplingConfig.max_tokens,
    min_tokens: o.MinTokens = SamplingConfig.min_tokens,
    stop: o.Stop = None,
    system: o.System = None,
    raw: o.Raw = False,
    color: o.Color = None,
    logprobs: o.LogProbs = False,
    trace: o.Trace = None,
    as_json: o.Json = False,
) -> None:
    """Generate a text, and print it as it comes.

    A line about speed and acceptance follows on stderr. Ctrl-C ends the text
    at the next round and keeps what came (exit code 130).
    """
    settings = Settings.from_options(ctx.params)  # the parameters declare the options; this reads them all
    text = _read(prompt)
    with opened_for_writing(trace) as trace_file:
        engine = load_engine(settings)
        ids = encode(engine, text, settings)
        stream = start(engine, ids, settings, logprobs=logprobs, trace=trace_file is not None)
        writer = TraceWriter(trace_file, engine.tokenizer) if trace_file else None
        printer = None if as_json else _Printer(sys.stdout, color)

        def show(tokens: list[Token]) -> None:
            if writer:
                writer.add(stream.trace[-1], tokens)
            if printer:
                printer.add(tokens)

        with noting_interrupt() as interrupt:
            try:
                follow(stream, interrupt, show)
            except KeyboardInterrupt:  # before the first round, or pressed twice
                interrupt.pressed = True

    result = stream.result
    if printer:
        printer.end()
    else:
        found = {"settings": {"prompt": text, **settings.as_dict()}, "versions": versions(), **result.as_dict()}
        print(to_json(found, sys.stdout), flush=True)
    errors = error_console(color)
    if printer and printer.colored and draft_length:
        errors.print(legend(result.tokens))
    say(errors, "", summarize(result))
    if interrupt.pressed:
        raise typer.Exit(INTERRUPTED)


class _Printer:
    """Prints a text as it comes: coloured, or as it is."""

    def __init__(self, file: TextIO, color: bool | None) -> None:
        self._file = file
        self._last = "\n"
        self.colored = has_color(output_console(color))

    def add(self, tokens: list[Token]) -> None:
        """Print some tokens."""
        text = "".join(token.text for token in tokens)
        if self.colored:
            self._file.write("".join(painted(token) for token in tokens))
        else:
            self._file.write(printable(text) if self._file.isatty() else text)
        self._file.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        """End the last line."""
        if self._last != "\n":
            print(file=self._file, flush=True)


def _read(prompt: str) -> str:
    """The prompt, from stdin if it is "-".

    Raises:
        SettingError: it is empty, or no text.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise SettingError(f"the prompt on stdin is no text: {error}") from error
    if not prompt:
        raise SettingError("the prompt is empty: give some text")
    return prompt
