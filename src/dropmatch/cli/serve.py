"""`dropmatch serve`: vLLM's OpenAI-compatible server with the plugin's settings and a sensible environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o
from dropmatch.cli.console import error_console, say
from dropmatch.cli.settings import with_rule_text
from dropmatch.config import AcceptanceConfig, DraftConfig

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The model to serve: a hub id (owner/name), a local folder, a .gguf file, or a demo model.",
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="The draft model, named like the target; or prompt-lookup (vLLM's ngram). Other ways to draft, EAGLE "
        "among them: vLLM's --speculative-config instead.",
        show_default="the demo target's own",
        rich_help_panel=o.MODELS,
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="How draft tokens are judged unless a request says otherwise: off (lossless), strict (the same), naive, "
        "js, or another of dropmatch rules; with settings, as in js:p=0.2.",
        rich_help_panel=o.JUDGING,
    ),
]
MaskSeed = Annotated[
    int | None,
    typer.Option(
        "--mask-seed",
        metavar="N",
        help="Seed of the heads of a sampled verdict.",
        show_default="the request's seed, or 0",
        rich_help_panel=o.JUDGING,
    ),
]
# no -p here: vLLM has -tp, -pp and -dp
Dropout = Annotated[
    float,
    typer.Option(
        "--dropout",
        metavar="P",
        help="p, the probability that a unit of the hidden state is dropped (0 to below 1).",
        rich_help_panel=o.JUDGING,
    ),
]
PrintCommand = Annotated[
    bool,
    typer.Option(
        "--print-command", help="Print what would be run, environment included, and stop.", rich_help_panel=o.OUTPUT
    ),
]


def serve(
    ctx: typer.Context,
    target: Target,
    draft: Draft = None,
    draft_length: o.DraftLength = DraftConfig.draft_length,
    rule: Rule = AcceptanceConfig.rule,
    heads: o.Heads = AcceptanceConfig.heads,
    dropout: Dropout = AcceptanceConfig.dropout,
    verdict: o.Verdict = AcceptanceConfig.verdict,
    strictness: o.Strictness = AcceptanceConfig.strictness,
    heads_mode: o.HeadsMode = AcceptanceConfig.heads_mode,
    token_floor: o.TokenFloor = AcceptanceConfig.token_floor,
    mask_seed: MaskSeed = AcceptanceConfig.mask_seed,
    print_command: PrintCommand = False,
) -> None:
    """Serve a model over the OpenAI API with vLLM. All options of vLLM's server may be added.

    Requests override the rule by flat keys in vllm_xargs:

    {"dropmatch": "naive", "dropmatch_dropout": 0.1}, or {"dropmatch": "off"}.

    Example: dropmatch serve demo:qwen2.5-coder --rule js --max-model-len 4096 --port 8000
    """
    from dropmatch.engines.vllm import command, environment  # imports torch, which --help need not wait for

    acceptance: dict[str, Any] = {
        "rule": rule,
        "draft_length": draft_length,
        "heads": heads,
        "dropout": dropout,
        "verdict": verdict,
        "strictness": strictness,
        "heads_mode": heads_mode,
        **({} if token_floor is None else {"token_floor": token_floor}),
        **({} if mask_seed is None else {"mask_seed": mask_seed}),
    }
    acceptance = with_rule_text(acceptance)
    rule, draft_length = acceptance["rule"], acceptance.pop("draft_length")
    on_cpu = environment.require_vllm()
    v2_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    arguments = command.server_command(target, draft, draft_length, acceptance, list(ctx.args), on_cpu, v2_runner)
    more = environment.wanted(os.environ, on_cpu, command.ranks(ctx.args))
    if print_command:
        typer.echo(_as_shell(more, arguments))
        return
    for name, value in more.items():
        say(error_console(), "set ", f"{name}={value}")
    if rule not in ("off", "strict"):
        lossy = f"rule {rule} is lossy, texts may differ from the target's own; requests may choose another, or off"
        say(error_console(), "note: ", lossy)
    sys.stdout.flush()
    os.execve(arguments[0], arguments, {**os.environ, **more})


def _as_shell(environment: Mapping[str, str], arguments: list[Any]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join(["env", *variables, shlex.join(arguments)])
