"""`dropmatch eval`: options reach the harness, and examples may come from files."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from harness_support import chat_tokenizer, gsm8k_rows, mmlu_rows, write
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra: eval)")

from dropmatch.cli.app import app
from dropmatch.evaluation.tasks import harness_configs

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process; the harness reads its list of tasks once for all tests."""
    monkeypatch.delenv("DROPMATCH_DEBUG", raising=False)
    # else it would write to the stderr of the first run
    monkeypatch.setattr("lm_eval.utils._LOGGING_CONFIGURED", False)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["eval", *arguments])

    return invoke


@pytest.fixture(scope="module")
def target(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk, with room for eight examples before the question."""
    tokenizer = chat_tokenizer(tiny)
    folder = tmp_path_factory.mktemp("model")
    model = tiny.build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the harness would be run with."""
    import sys

    found: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: found.append(sys.argv[1:]))
    return found


def test_a_task_on_a_file_from_end_to_end(run: Run, target: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", gsm8k_rows())
    found = run(
        *("--tasks", "gsm8k_cot", "--data", str(data), "--limit", "2", "--apply_chat_template"),
        *("--model_args", f"target={target},draft={target},rule=js:p=0.2,draft_length=3,max_gen_toks=8"),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
    )
    assert found.exit_code == 0, found.output
    assert "flexible-extract" in found.stdout
    assert "acceptance length" in found.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    about = json.loads(results.read_text())["config"]["dropmatch"]
    assert about["options"] == {"rule": "js", "dropout": 0.2, "draft_length": 3}
    assert about["statistics"]["generated"] <= 16
    (samples,) = (tmp_path / "out").rglob("samples_gsm8k_cot_*.jsonl")
    first = json.loads(samples.read_text().splitlines()[0])
    prompt = first["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("<user>Q: There are 15 trees")
    assert prompt.endswith(f"<user>Q: {gsm8k_rows()[0]['prompt']}\nA:</user><assistant>")


def test_our_model_is_the_default(run: Run, handed: list[list[str]], tmp_path: Path) -> None:
    assert run("--tasks", "gsm8k_cot").exit_code == 0
    assert handed.pop() == ["run", "--tasks", "gsm8k_cot", "--model", "dropmatch"]
    for own in (["--model", "hf"], ["-M", "hf"], ["--model=hf"]):
        assert run("run", *own, "--tasks", "gsm8k_cot").exit_code == 0
        assert handed.pop() == ["run", *own, "--tasks", "gsm8k_cot"]
    config = tmp_path / "config.yaml"
    config.write_text("model: hf\ntasks: [gsm8k_cot]\n")
    run("--config", str(config))
    assert handed.pop() == ["run", "--config", str(config)]
    run("ls", "tasks")
    assert handed.pop() == ["ls", "tasks"]
    run("ls", "--help")
    assert handed.pop() == ["ls", "--help"]


def test_options_keep_their_order_and_values(run: Run, handed: list[list[str]]) -> None:
    given = ["-t", "gsm8k", "drop", "-f", "0", "--gen_kwargs", 'until=["Q:"]', "--seed", "1", "-a", "rule=js:p=0.2"]
    assert run(*given).exit_code == 0
    assert handed.pop() == ["run", *given, "--model", "dropmatch"]


def test_files_stand_for_the_tasks_of_a_group(
    run: Run, handed: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        import sys

        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=sys.argv[sys.argv.index("--include_path") + 1])
        seen.update(manager.load(["mmlu_generative", "gsm8k"])["tasks"])

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", look)
    mmlu, gsm8k = write(tmp_path / "mmlu.jsonl", mmlu_rows()), write(tmp_path / "gsm8k.jsonl", gsm8k_rows())
    found = run(
        *("--tasks", "mmlu_generative,gsm8k", "--data", f"mmlu_generative={mmlu}", "--data", f"gsm8k={gsm8k}"),
        *("--num_fewshot", "0", "--model_args", "target=t"),
    )
    assert found.exit_code == 0, found.output
    assert {name: len(task.eval_docs) for name, task in seen.items()} == {
        "mmlu_anatomy_generative": 2,
        "mmlu_astronomy_generative": 1,
        "mmlu_world_religions_generative": 1,
        "gsm8k": 3,
    }
    assert seen["mmlu_anatomy_generative"].doc_to_target(seen["mmlu_anatomy_generative"].eval_docs[1]) == "D"


def test_rows_of_no_task_of_a_group_are_refused(run: Run, tmp_path: Path) -> None:
    rows = mmlu_rows()
    rows[2]["meta"]["subject"] = "astrology"
    mmlu = write(tmp_path / "mmlu.jsonl", rows)
    found = run("--tasks", "mmlu_generative", "--data", str(mmlu), "--num_fewshot", "0", "--model_args", "target=t")
    assert found.exit_code == 2, found.output
    assert f"{mmlu}, line 3: no task here is of the subject 'astrology'" in found.stderr
    assert "there are abstract_algebra, anatomy, astronomy, " in found.stderr


def test_missing_few_shots_are_told_in_options_of_this_command(run: Run, tmp_path: Path) -> None:
    gsm8k = write(tmp_path / "gsm8k.jsonl", gsm8k_rows())
    found = run("--tasks", "gsm8k", "--data", str(gsm8k), "--model_args", "target=t")
    assert found.exit_code == 2, found.output
    assert "--fewshot_data FILE" in found.stderr
    assert "--num_fewshot 0" in found.stderr


USES: dict[str, tuple[list[str], str]] = {
    "no such task": (["--tasks", "gsm8k_cott"], "no task 'gsm8k_cott'; did you mean gsm8k_cot"),
    "no task": (["--model_args", "target=t,draft=d"], "No tasks specified"),
    "which task": (["--tasks", "gsm8k,ifevil", "--data", "x.jsonl"], "say which task it is for"),
    "no file": (["--tasks", "gsm8k_cot", "--data", "none.jsonl"], "cannot read none.jsonl"),
    "twice": (["--tasks", "a", "--data", "a=x", "--data", "a=y"], "given twice for the task a"),
    "two sources": (["--tasks", "a", "--data", "x", "--include_path", "y"], "cannot be had together"),
    "few-shots": (["--tasks", "a", "--fewshot_data", "x"], "--fewshot_data goes with --data"),
    "model argument": (["--tasks", "gsm8k_cot", "--model_args", "target=t,ruel=js"], "unknown model argument 'ruel'"),
}


@pytest.mark.parametrize("case", USES)
def test_misuse_is_one_line(run: Run, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: harness_configs.task_manager())
    arguments, message = USES[case]
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_a_hub_that_does_not_answer_is_one_line(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: harness_configs.task_manager())
    monkeypatch.setattr("dropmatch.evaluation.harness_library.hub_answers", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    found = run("--tasks", "gsm8k_cot", "--model_args", f"target={target},draft_length=0")
    assert found.exit_code == 2
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert "does not answer" in line
    assert "--data TASK=FILE" in line


def test_the_documented_clients_of_a_server_take_what_they_are_given() -> None:
    from lm_eval.api.registry import get_model

    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    commands = re.findall(r"lm_eval --model (\S+) .*?--model_args (\S+)", text, re.DOTALL)
    assert [name for name, _ in commands] == ["local-chat-completions", "local-completions"]
    for name, given in commands:
        known = {each for kind in get_model(name).__mro__ for each in signature(kind.__init__).parameters}
        assert {each.partition("=")[0] for each in given.split(",")} <= known - {"args", "kwargs"}


def test_the_help_has_our_arguments_before_the_options_of_the_harness(run: Run) -> None:
    for arguments in (["--help"], ["-h"], []):
        text = run(*arguments).stdout
        parts = ("Arguments of the model", "  target", "strictness", "  --data [TASK=]FILE", "--check_integrity")
        places = [text.index(part) for part in parts]
        assert places == sorted(places)
