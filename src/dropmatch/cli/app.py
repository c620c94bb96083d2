"""The `dropmatch` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from dropmatch import __version__
from dropmatch.cli.bench import bench
from dropmatch.cli.compare import compare
from dropmatch.cli.evaluate import evaluate
from dropmatch.cli.failures import Group
from dropmatch.cli.generate import generate
from dropmatch.cli.judge import judge
from dropmatch.cli.models import app as models
from dropmatch.cli.paper import app as paper
from dropmatch.cli.record import record
from dropmatch.cli.replay import replay
from dropmatch.cli.rules import rules
from dropmatch.cli.serve import serve

HELP = """\
Speculative decoding that also accepts draft tokens which the target model would be content with, \
judged by Monte Carlo dropout on its LM head.

Examples:
  dropmatch generate "Write a haiku about the sea."
  dropmatch generate - --rule strict --max-tokens 64 < question.txt
  dropmatch generate "def fib(n):" --raw --draft prompt-lookup --rule naive
  dropmatch generate "What is 17 * 23?" --json --trace rounds.jsonl
  dropmatch compare
  dropmatch compare --target ./big --draft ./small --prompts questions.jsonl
  dropmatch bench --task questions.jsonl --rules js:p=0.1,js:p=0.3,typical --out results/first
  dropmatch paper divergence --task questions.jsonl --limit 20
  dropmatch judge results/first --endpoint http://localhost:8000/v1 --model Qwen2.5-32B --kind pairwise
  dropmatch record rounds.safetensors --prompts questions.jsonl
  dropmatch replay rounds.safetensors js:p=0.1 js:p=0.3 typical margin
  dropmatch serve demo:qwen2.5-coder --rule js --port 8000
  dropmatch eval --tasks gsm8k_cot --model_args target=demo:qwen2.5-coder
  dropmatch models list
"""

app = typer.Typer(
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("compare")(compare)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command("bench")(bench)
app.command(
    "eval",
    add_help_option=False,  # it tells of the harness's options too
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(evaluate)
app.command("judge")(judge)
app.command("record")(record)
app.command("replay")(replay)
app.add_typer(paper, name="paper")
app.add_typer(models, name="models")
app.command("rules")(rules)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dropmatch {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of the command itself; its help is that of the app."""
