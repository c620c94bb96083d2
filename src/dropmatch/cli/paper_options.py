"""The options of `dropmatch paper`, each declared once, and their texts as numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dropmatch.cli import options as o
from dropmatch.errors import SettingError

RUNNING = "What is run"
Number = TypeVar("Number", int, float)

Task = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="TASK",
        rich_help_panel=RUNNING,
        help="A task, or a .jsonl file of prompts where no score is needed. TASK=FILE takes its examples from a JSONL "
        "file instead of the hub.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="TASK",
        rich_help_panel=RUNNING,
        show_default="gsm8k_cot, mmlu_generative, ifeval and humaneval",
        help="A task, may be given several times. TASK=FILE takes its examples from a JSONL file instead of the hub.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", metavar="N", show_default="all", rich_help_panel=RUNNING, help="The first N examples of each task."
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        metavar="N",
        rich_help_panel=RUNNING,
        help="The most tokens of a text; a task's own limit holds too.",
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        "--seeds",
        metavar="N,...",
        rich_help_panel=RUNNING,
        help="Mask seeds. With several, numbers are means over seeds with the least and the greatest in brackets.",
    ),
]
Heads = Annotated[
    int,
    typer.Option("--heads", "-K", metavar="K", rich_help_panel=RUNNING, help="K, how many dropout heads there are."),
]
Dropout = Annotated[
    float,
    typer.Option(
        "--dropout",
        "-p",
        metavar="P",
        rich_help_panel=RUNNING,
        help="p, the probability that a unit of the hidden state is dropped (0 to below 1).",
    ),
]
Dropouts = Annotated[
    str,
    typer.Option(
        "--dropout",
        "-p",
        metavar="P,...",
        rich_help_panel=RUNNING,
        help="p, the probabilities that a unit of the hidden state is dropped (0 to below 1), a row each.",
    ),
]
DraftLength = Annotated[
    int,
    typer.Option(
        "--draft-length", "-L", metavar="L", rich_help_panel=RUNNING, help="L, the most tokens proposed per round."
    ),
]
Support = Annotated[
    str,
    typer.Option(
        "--support",
        metavar="WHICH",
        rich_help_panel=RUNNING,
        help="Tokens that heads are evaluated on. full: the whole vocabulary, as in the paper; shortlist: the "
        "likeliest ones and one bucket for the rest, which is faster and can only lower a divergence.",
    ),
]
Evaluation = Annotated[
    str,
    typer.Option(
        "--evaluation",
        metavar="WHEN",
        rich_help_panel=RUNNING,
        help="lazy asks the rule where the draft differs from the target's own token; eager about every draft token, "
        "as in the paper: slower, and rounds end where the heads refuse the target's own token.",
    ),
]
DenseDraftWeights = Annotated[
    str,
    typer.Option(
        "--draft-weights",
        metavar="KIND",
        rich_help_panel=o.MODELS,
        help="Weights of the draft model on a CPU: dense, since its distribution is what is measured; int4 (a 4-bit "
        "copy, faster), or auto.",
    ),
]
Texts = Annotated[
    Path,
    typer.Option(
        "--texts",
        metavar="FILE",
        rich_help_panel=o.OUTPUT,
        help="The JSONL file of the texts; what is found out about them goes into one beside it. Given again, a run "
        "goes on where it was stopped; paper heads and paper similarity may share one.",
    ),
]
Rows = Annotated[
    Path,
    typer.Option(
        "--rows",
        metavar="FILE",
        rich_help_panel=o.OUTPUT,
        help="The JSONL file of the draft rows, the same for paper majority and paper divergence: what is there is not "
        "decoded again. Given again, a run goes on where it was stopped.",
    ),
]
TABLES_2_AND_3 = Path("tables2-3.jsonl")
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default=False,
        rich_help_panel=o.OUTPUT,
        help="Write everything as one JSON object: numbers, the paper's, settings, versions, machine.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        rich_help_panel=o.OUTPUT,
        help="The folder of records. Given again, a run goes on where it was stopped.",
    ),
]
Color = Annotated[
    bool | None,
    typer.Option(
        "--color/--no-color",
        show_default="if the terminal can",
        rich_help_panel=o.OUTPUT,
        help="Style the tables' headings.",
    ),
]
DraftAlone = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        show_default="none",
        rich_help_panel=o.MODELS,
        help="Also score what this smaller model says alone; in the paper all heads do better up to p=0.4. Its texts "
        "go into a file beside that of --texts (texts.draft.jsonl).",
    ),
]
Tokens = Annotated[
    int, typer.Option("--tokens", metavar="N", rich_help_panel=RUNNING, help="Input tokens, all of them judged.")
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", metavar="N", rich_help_panel=RUNNING, help="How many times everything is timed, in turns."
    ),
]
Batches = Annotated[
    str, typer.Option("--batches", metavar="N,...", rich_help_panel=RUNNING, help="Batch sizes, a row each.")
]
Lengths = Annotated[
    str,
    typer.Option(
        "--draft-length",
        "-L",
        metavar="L,...",
        rich_help_panel=RUNNING,
        help="L, the most tokens proposed per round: values of the rows. Speedups are relative to SD at the smallest.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        rich_help_panel=o.MODELS,
        help="hf: one example at a time; vllm: each draft length in a process of its own.",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", rich_help_panel=o.MODELS, help="vLLM: requests at once; the paper has 1.")
]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", rich_help_panel=o.OUTPUT, help="Run nothing; show what the folder holds.")
]
Encoder = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        metavar="MODEL",
        show_default="all-MiniLM-L6-v2, from the package index",
        rich_help_panel=o.MODELS,
        help="A sentence encoder with mean pooling: a hub id or a local folder.",
    ),
]
Nli = Annotated[
    str | None,
    typer.Option(
        "--nli",
        metavar="MODEL",
        show_default="none: entailment is left out",
        rich_help_panel=o.MODELS,
        help="A model of natural language inference for the entailment: a hub id or a local folder.",
    ),
]
TextsTask = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="TASK",
        show_default=False,
        rich_help_panel=RUNNING,
        help="A .jsonl file of prompts (the paper: Spec-Bench), or a task.",
    ),
]


def integers(text: str, option: str) -> list[int]:
    """`1,4,16` as numbers.

    Raises:
        SettingError: an item is none.
    """
    return _numbers(text, option, int, "integers")


def probabilities(text: str) -> list[float]:
    """`0.1,0.3` as numbers.

    Raises:
        SettingError: an item is none, or no dropout probability.
    """
    from dropmatch.evaluation.paper.settings import check_dropouts

    found = _numbers(text, "--dropout", float, "numbers")
    check_dropouts(found)
    return found


def seeds_of(text: str) -> list[int]:
    """Mask seeds.

    Raises:
        SettingError: an item is none, or stands there twice.
    """
    from dropmatch.evaluation.paper.settings import check_seeds

    found = integers(text, "--seeds")
    check_seeds(found)
    return found


def _numbers(text: str, option: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    try:
        return [kind(item) for item in text.split(",")]
    except ValueError:
        raise SettingError(f"{option} must be {what} with commas between them, got {text!r}") from None


def at_least_one(**values: Any) -> None:
    """Refuse counts below 1; None is no count.

    Raises:
        SettingError: one is.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise SettingError(f"{name} must be at least 1, got {value}")
