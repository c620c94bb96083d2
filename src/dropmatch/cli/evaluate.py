"""`dropmatch eval`: lm-evaluation-harness with this package's engine as one of its models."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Annotated

import typer

from dropmatch.cli.session import quiet_libraries
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import DropMatchError, SettingError

COMMANDS = ("run", "ls", "validate")
HELP = """\
usage: dropmatch eval [--data [TASK=]FILE]... [--fewshot_data FILE] OPTION...

Run lm-evaluation-harness with DropMatch as the model. All its options work, and its commands: dropmatch eval ls tasks.

Example:
  dropmatch eval --model_args target=demo:qwen2.5-coder,rule=js:p=0.2,draft_length=5 \\
    --tasks gsm8k_cot --limit 20 --apply_chat_template

Arguments of the model, in --model_args NAME=VALUE,NAME=VALUE,...:
  target         the model to evaluate: a hub id, a local folder, a .gguf file, or a demo model
  draft          the model that drafts, or prompt-lookup; a demo target has its own
  dtype, draft_weights, device, trust_remote_code
  rule           how draft tokens are judged, with settings if wanted: strict, js, js:p=0.2:K=3 (see: dropmatch rules)
{decoding}
  max_gen_toks   the most tokens of requests that do not say (256)
  max_length     the most tokens of prompt and text (the model's); longer prompts lose their beginning
  seed           of requests that sample (0)

Examples out of files, where the hub cannot be reached:
  --data [TASK=]FILE   JSONL file of a task's examples, in its own fields or "id", "task", "prompt", "answer", "meta";
                       for a group, a row's "subject" says which task it is of. Once for each task.
  --fewshot_data FILE  JSONL file of rows to draw few-shots from, where a task draws them from a set of its own

Requests are decoded one at a time, whatever --batch_size. Acceptance length, lossy share and speed are printed then,
and are in the results' JSON under "config".
--model dropmatch is the default; --model hf and others are those of lm-evaluation-harness, whose options follow.
"""
Data = Annotated[list[str] | None, typer.Option("--data", metavar="[TASK=]FILE")]
FewshotData = Annotated[Path | None, typer.Option("--fewshot_data", metavar="FILE")]
Help = Annotated[bool, typer.Option("--help", "-h")]


def evaluate(ctx: typer.Context, data: Data = None, fewshot_data: FewshotData = None, help: Help = False) -> None:
    """Run lm-evaluation-harness: its tasks and options, with DropMatch as the model."""
    quiet_libraries()
    arguments = list(ctx.args)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "run"
    from dropmatch.evaluation.harness_library import require

    help = help or (command == "run" and not arguments)
    if help and command == "run":
        typer.echo(_help())
    require()
    if help:
        return _hand_over([command, *arguments, "--help"])
    if command != "run":
        return _hand_over([command, *arguments])

    from dropmatch.evaluation import harness_model  # noqa: F401  registers the model
    from dropmatch.evaluation.harness_library import need_punkt

    given = _look(arguments)
    if given.model is None:
        arguments += ["--model", "dropmatch"]
    if any("ifeval" in name for name in given.tasks):
        need_punkt()
    if fewshot_data is not None and not data:
        raise SettingError("--fewshot_data goes with --data: without, few-shots come from the task's own data set")
    with TemporaryDirectory(prefix="dropmatch-") as folder:
        if data:
            arguments += ["--include_path", _write(Path(folder), data, fewshot_data, given)]
        with _told_plainly():
            _hand_over(["run", *arguments])


def _look(arguments: Sequence[str]) -> argparse.Namespace:
    """What of the harness's options decides here too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-C")
    parser.add_argument("--model", "-M")
    parser.add_argument("--include_path")
    parser.add_argument("--num_fewshot", "-f")
    parser.add_argument("--tasks", "-t", nargs="+", default=[])
    found, _ = parser.parse_known_args(arguments)
    if found.config is not None:  # what stands there is no option here, but is no default either
        import yaml

        try:
            written = yaml.safe_load(Path(found.config).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            written = None  # for the harness to refuse
        if isinstance(written, dict):
            found.model = found.model or written.get("model")
    found.tasks = [name for each in found.tasks for name in each.split(",") if name]
    return found


def _write(folder: Path, data: Sequence[str], fewshot_data: Path | None, given: argparse.Namespace) -> str:
    """The folder of tasks that take their examples from files."""
    from dropmatch.evaluation.tasks.harness_files import write_tasks

    if given.include_path is not None:
        raise SettingError("--data and --include_path cannot be had together: name the file in the task's YAML")
    files: dict[str, Path] = {}
    for text in data:
        task, equals, file = text.partition("=")
        if not equals and len(given.tasks) != 1:
            raise SettingError(f"--data {text}: say which task it is for, as in --data gsm8k_cot={text}")
        task, file = (task, file) if equals else (given.tasks[0], text)
        if task in files:
            raise SettingError(f"--data is given twice for the task {task}")
        files[task] = Path(file)
    count = given.num_fewshot
    write_tasks(folder, files, fewshot_data, int(count) if count is not None and count.isdecimal() else None)
    return str(folder)


def _hand_over(arguments: Sequence[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    from dropmatch.evaluation.harness_library import cache_if_unreachable

    before = sys.argv
    sys.argv = ["dropmatch eval", *arguments]
    try:
        with cache_if_unreachable():
            cli_evaluate()
    finally:
        sys.argv = before


@contextmanager
def _told_plainly() -> Iterator[None]:
    """What a user can mend, as such; other failures of the harness keep their traceback."""
    from dropmatch.evaluation.harness_library import hub_answers, reason
    from dropmatch.evaluation.tasks.harness_configs import no_such_task

    try:
        yield
    except DropMatchError:
        raise
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, ConnectionError) or library in ("datasets", "huggingface_hub"):
            why = reason(error) if hub_answers() else f"the model hub does not answer; {reason(error)}"
            raise SettingError(
                f"cannot load a data set ({why}): check the network, or give the task's examples in a JSONL file "
                "(--data TASK=FILE)"
            ) from error
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
        if isinstance(error, ValueError) and where in ("evaluate_config.py", "evaluator.py"):
            unknown = str(error).removeprefix("Tasks not found: ")
            raise SettingError(str(error) if unknown == str(error) else no_such_task(unknown.split(", ")[0])) from error
        raise


def _help() -> str:
    decoding = [each.name for kind in (AcceptanceConfig, DraftConfig) for each in fields(kind)]
    names = ", ".join(name for name in decoding if name != "rule")
    return HELP.format(decoding=fill(names, 110, initial_indent="  ", subsequent_indent="  "))
