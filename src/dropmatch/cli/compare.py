"""`dropmatch compare`: the same prompts decoded plainly and by several rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.rule import Rule
from rich.text import Text

from dropmatch.cli import options as o
from dropmatch.cli.comparison import PromptRecord, choose_methods, measure, totals
from dropmatch.cli.comparison_json import as_dict
from dropmatch.cli.comparison_view import caveats, show_prompt, show_totals, speculated, suspicions
from dropmatch.cli.console import error_console, has_color, output_console, say
from dropmatch.cli.failures import INTERRUPTED, say_warning
from dropmatch.cli.files import check_writable
from dropmatch.cli.highlight import key
from dropmatch.cli.progress import Display
from dropmatch.cli.prompts import collect
from dropmatch.cli.session import load_engine
from dropmatch.cli.settings import Settings
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.environment import machine
from dropmatch.errors import SettingError

if TYPE_CHECKING:
    from rich.console import Console

COMPARING = "Comparison"
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        show_default="three built-in ones",
        rich_help_panel=COMPARING,
        help="A prompt to compare on; may be given several times.",
    ),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        show_default=False,
        rich_help_panel=COMPARING,
        help='Prompts from a file: JSON lines with a "prompt" each, or plain text, one a line.',
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--rules",
        metavar="RULE,...",
        show_default="strict,naive,js",
        rich_help_panel=COMPARING,
        help="Rules to compare, see dropmatch rules; each may have settings of its own, as in "
        "js:p=0.1,js:p=0.3:sampled,typical:threshold=0.2. Plain greedy decoding always comes first.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="N",
        rich_help_panel=COMPARING,
        help="Decode each prompt N times by each method, in turns, and report medians (1 or more).",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default=False,
        rich_help_panel=o.OUTPUT,
        help="Write everything, per prompt and method, as one JSON object.",
    ),
]


def compare(
    ctx: typer.Context,
    prompt: Prompts = None,
    prompts: PromptsFile = None,
    rules: Rules = None,
    repeats: Repeats = 1,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: o.DraftWeights = "auto",
    device: o.Device = None,
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
    max_tokens: o.MaxTokens = 128,
    system: o.System = None,
    raw: o.Raw = False,
    color: o.Color = None,
    json_file: JsonFile = None,
) -> None:
    """Decode prompts plainly and by several rules, and show texts, speed and acceptance side by side.

    All methods are greedy and share all settings. A prompt is shown when all
    methods are through with it; the sums over all prompts come last. Ctrl-C
    ends early and keeps the prompts that are complete (exit code 130).
    """
    settings = Settings.from_options(ctx.params)  # the parameters declare the options; this reads them all
    if repeats < 1:
        raise SettingError(f"repeats must be an integer of at least 1, got {repeats}")
    texts = collect(prompt or (), prompts)
    names = [name.strip() for item in rules or () for name in item.split(",") if name.strip()]
    methods = choose_methods(names, settings)
    check_writable(json_file)

    output, errors = output_console(color), error_console(color)
    say(errors, "", f"loading {settings.target} and {settings.drafter}")
    engine = load_engine(settings)
    here = machine(engine.model.device)
    display = Display(errors, len(texts), len(methods), repeats, max_tokens)
    found: list[PromptRecord] = []
    interrupted = False
    with display.running():
        try:
            for record in measure(engine, texts, methods, settings, repeats, display):
                found.append(record)
                with display.paused():
                    output.print(show_prompt(record, len(found), len(texts), output))
        except KeyboardInterrupt:
            interrupted = True

    if found:
        _conclude(output, found, settings, repeats, here)
    if json_file is not None:
        everything = as_dict(found, settings, methods, repeats, here, complete=not interrupted)
        json_file.write_text(json.dumps(everything, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if interrupted:
        say(errors, "", f"interrupted: {len(found)} of {len(texts)} prompts are complete")
        raise typer.Exit(INTERRUPTED)


def _conclude(
    output: Console, found: list[PromptRecord], settings: Settings, repeats: int, here: dict[str, Any]
) -> None:
    """The overall table and what to know about it."""
    sums = totals(found)
    many = f"{len(found)} prompts" if len(found) > 1 else "1 prompt"
    output.print(Rule(f"overall, {many}", style="dim"))
    output.print(show_totals(sums, len(found)))
    output.print()
    if has_color(output):
        output.print(key(token for prompt in found for token in speculated(prompt)))
        output.print()
    a, d = settings.acceptance, settings.drafting
    output.print(
        Text(
            f"Greedy decoding, K={a.heads}, p={a.dropout}, L={d.draft_length}, at most "
            f"{settings.sampling.max_tokens} tokens; target {settings.target}, draft {settings.drafter}."
        )
    )
    where = here.get("gpu") or f"{here['cpu']}, {here['threads']} threads"
    for line in caveats(sums, repeats, where):
        output.print(Text(line))
    for line in suspicions(found, sums):
        say_warning(line)
    for i, total in enumerate(sums):
        warned = [prompt.records[i].warnings for prompt in found if prompt.records[i].warnings]
        if warned:
            say_warning(f"{total.method.name}, {len(warned)} of {many}: {warned[0][0]}")
