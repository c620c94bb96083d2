"""`dropmatch paper`: every analysis on a tiny pair, from the command line to the JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_support import Pair, bare

from dropmatch import load
from dropmatch.engines.vllm import environment
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.progress import Bar
from dropmatch.evaluation.bench.runner import Runner
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.paper import batches, encoders, kept_rows
from dropmatch.evaluation.paper import texts as kept_texts
from dropmatch.evaluation.tasks import Example, Prompts, Task, choose

Run = Callable[..., Any]
ANALYSES = ("heads", "majority", "divergence", "latency", "batches", "speculative", "similarity")


class Toy:
    """A text is right if it has a word with a 1."""

    name, metric = "toy", "accuracy"

    def examples(self, limit: int | None) -> list[Example]:
        return [Example(str(i), f"w{20 + i} w7 w9") for i in range(4)][:limit]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        return [float("1" in text) for text in texts]


GO_ON = "interrupted: give the same command again to go on"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files without a name go here."""
    monkeypatch.chdir(tmp_path)


def stopping(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: int) -> None:
    """Ctrl-C after some calls of a function, once."""
    function, calls = getattr(module, name), list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(module, name, counted)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`toy` is a task; files of prompts are tasks as ever."""

    def choose_task(name: str, data: str | None = None, chat: bool = True, **_: Any) -> Task:
        if name == "toy":
            return Toy()
        if name.endswith(".jsonl"):
            return Prompts(Path(name), chat)
        raise SettingError(f"no task is called {name!r}")

    from dropmatch.evaluation.bench import worker

    monkeypatch.setattr(choose, "choose_task", choose_task)
    monkeypatch.setattr(worker, "choose_task", choose_task)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{30 + i} w7 w9"}) + "\n" for i in range(3)))
    return str(path)


def report(path: Path, analysis: str) -> dict[str, Any]:
    """The JSON file of a run."""
    found = json.loads(path.read_text())
    assert found["analysis"] == analysis
    assert found["paper"]["source"] == "arXiv 2603.03333v1"
    assert "torch" in found["machine"]
    return found


def test_heads(run: Run, pair: Pair, tmp_path: Path) -> None:
    file, texts = tmp_path / "heads.json", tmp_path / "texts.jsonl"
    command = ["paper", "heads", "--task", "toy", "--limit", "3", "--max-tokens", "6", "-p", "0.1,0.5", "-K", "3"]
    command += ["--seeds", "0,1", *pair.args(), "--texts", str(texts), "--json", str(file)]
    result = run(*command, width=140)
    assert result.exit_code == 0, result.stderr
    table = bare(result.stdout)
    assert "Table 1: accuracy % of each head, toy" in table
    for label in ("p=0.1", "p=0.5", "no dropout", "draft alone", "paper, p=0.3", "paper, draft alone"):
        assert f"\n{label} " in table
    found = report(file, "heads")
    assert found["settings"]["dropout"] == [0.1, 0.5]
    assert found["settings"]["seeds"] == [0, 1]
    assert [len(row["heads"]) for row in found["result"]["rows"]] == [3, 3]
    assert found["result"]["draft"] is not None
    assert "3 of 3 examples" in result.stderr
    assert "14 of 14 paths scored" in result.stderr
    assert len(texts.read_text().splitlines()) == 1 + 3 * 13
    assert len((tmp_path / "texts.draft.jsonl").read_text().splitlines()) == 1 + 3
    again = run(*command, width=140)
    assert bare(again.stdout) == table
    assert "tokens" not in again.stderr  # nothing was decoded
    other = run(*command[:6], "--max-tokens", "7", *command[8:])
    assert other.exit_code == 2
    assert "holds texts with max_tokens=6, and now it is 7" in other.stderr
    assert len((tmp_path / "texts.scores.jsonl").read_text().splitlines()) <= 3 * 14
    assert "loading" not in again.stderr
    assert "loading" not in other.stderr


@pytest.mark.parametrize(("analysis", "title"), [("majority", "Table 2"), ("divergence", "Table 3")])
def test_draft_rows(run: Run, pair: Pair, prompts: str, tmp_path: Path, analysis: str, title: str) -> None:
    file = tmp_path / "rows.json"
    result = run(
        "paper", analysis, "--task", prompts, "--limit", "2", "--max-tokens", "16", "-L", "3", "--seeds", "0,3",
        "--raw", *pair.args(), "--json", str(file), width=160,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert title in result.stdout
    assert "Mean over 2 mask seeds" in result.stdout
    assert "4 of 4 texts" in result.stderr
    found = report(file, analysis)
    assert found["settings"]["draft_weights"] == "dense"
    assert found["settings"]["support"] == "full"
    everything = found["result"]["all"] if analysis == "majority" else found["result"]
    assert everything["rows"] > 20


def test_both_tables_are_of_the_same_rows(run: Run, pair: Pair, prompts: str, tmp_path: Path) -> None:
    settings = ["--task", prompts, "--max-tokens", "16", "--raw", *pair.args()]
    first = run("paper", "majority", *settings, "--json", "first.json", width=160)
    assert first.exit_code == 0, first.stderr
    kept = (tmp_path / "tables2-3.jsonl").read_bytes()
    assert len(kept.splitlines()) == 1 + 3
    second = run("paper", "divergence", *settings, "--json", "second.json", width=160)
    assert second.exit_code == 0, second.stderr
    assert "3 of 3 texts" in second.stderr
    assert "loading" not in second.stderr  # nothing was decoded
    assert (tmp_path / "tables2-3.jsonl").read_bytes() == kept
    both = report(Path("first.json"), "majority"), report(Path("second.json"), "divergence")
    assert both[0]["result"]["all"]["rows"] == both[1]["result"]["rows"]
    assert both[0]["machine"] == both[1]["machine"]
    assert both[0]["complete"] is True
    other = run("paper", "divergence", *settings, "-K", "4", width=160)
    assert other.exit_code == 2
    assert "tables2-3.jsonl holds draft rows with heads=5, and now it is 4: give another --rows" in other.stderr
    apart = run("paper", "divergence", *settings, "-K", "4", "--limit", "1", "--rows", "other.jsonl", width=160)
    assert apart.exit_code == 0, apart.stderr
    assert "loading" in apart.stderr


def test_ctrl_c_leaves_the_rows_before_it(
    run: Run, pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["paper", "majority", "--task", prompts, "--max-tokens", "16", "--seeds", "0,1", "--raw", *pair.args()]
    whole = run(*command, "--rows", "whole.jsonl", width=160)
    with monkeypatch.context() as patch:
        stopping(patch, kept_rows, "draft_rows", 3)
        stopped = run(*command, "--json", "part.json", width=160)
    assert stopped.exit_code == 130
    assert GO_ON in stopped.stderr
    assert "3 of 6 texts" in stopped.stderr
    assert "Table 2" in stopped.stdout
    part = report(Path("part.json"), "majority")
    assert part["complete"] is False
    again = run(*command, "--json", "all.json", width=160)
    assert again.exit_code == 0, again.stderr
    assert again.stdout == whole.stdout
    assert part["result"]["all"]["rows"] < report(Path("all.json"), "majority")["result"]["all"]["rows"]
    with monkeypatch.context() as patch:
        stopping(patch, kept_rows, "draft_rows", 0)
        nothing = run(*command, "--rows", "nothing.jsonl")
    assert (nothing.exit_code, nothing.stdout) == (130, "")
    assert not Path("nothing.jsonl").exists()


def test_ctrl_c_leaves_the_texts_before_it(
    run: Run, pair: Pair, encoder: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = ["paper", "heads", "--task", "toy", "-p", "0.3", "-K", "2"]
    similarity = ["paper", "similarity", "--task", prompts, "--raw", "-p", "0.3", "-K", "2", "--encoder", encoder]
    for analysis, command, examples, title, file in (
        ("heads", heads, 4, "Table 1", "table1.jsonl"),
        ("similarity", similarity, 3, "Figure 3", "figure3.jsonl"),
    ):
        command += ["--max-tokens", "6", "--target", pair.target]
        whole = run(*command, "--texts", f"whole.{file}", width=140)
        assert whole.exit_code == 0, whole.stderr
        with monkeypatch.context() as patch:
            stopping(patch, kept_texts, "decode_paths", 2)
            stopped = run(*command, "--json", "part.json", width=140)
        assert stopped.exit_code == 130
        assert GO_ON in stopped.stderr
        assert title in stopped.stdout
        part = report(Path("part.json"), analysis)
        assert (part["complete"], part["result"]["examples"]) == (False, 2)
        assert len(Path(file).read_text().splitlines()) == 1 + 2 * 3
        again = run(*command, width=140)
        assert again.exit_code == 0, again.stderr
        assert again.stdout == whole.stdout
        assert f"{examples} of {examples} examples" in again.stderr
    with monkeypatch.context() as patch:
        stopping(patch, Toy, "score", 1)
        stopped = run(*heads, "--texts", "table1.jsonl", "--limit", "3", "--seeds", "7", width=140)
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    assert GO_ON in stopped.stderr


def test_batches_go_on_where_they_were(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(plan: Plan, folder: Path, tasks: Sequence[Task]) -> None:
        """Stands in for vLLM in a process of its own."""
        store = Store(folder, plan)
        store.keep_plan()
        (folder / "machine.json").write_text('{"torch": "?"}')
        if plan.batch == 2 and stop:
            raise KeyboardInterrupt
        engine = load(pair.target, pair.draft)
        runner = Runner(plan, plan.rules, tasks, HuggingFace(engine), store)
        runner.run(Bar(runner.workload()))

    monkeypatch.setattr(batches, "require_vllm", lambda: None)
    monkeypatch.setattr(environment, "require_vllm", lambda: None)
    monkeypatch.setattr(batches, "run", run_here)
    stop = True
    command = ["paper", "batches", "--task", "toy", "--raw", "--max-tokens", "6", "-L", "3", *pair.args()]
    command += ["--batches", "1,2,4"]
    stopped = run(*command, "--json", "part.json", width=140)
    assert stopped.exit_code == 130
    assert GO_ON in stopped.stderr
    assert "Table 5" in stopped.stdout
    assert list(report(Path("part.json"), "batches")["result"]["batches"]) == ["1", "2"]

    def refused() -> None:
        raise AssertionError("vLLM is asked for")

    with monkeypatch.context() as patch:
        for module in (batches, environment):
            patch.setattr(module, "require_vllm", refused)
        shown = run(*command, "--report-only", width=140)
        assert shown.exit_code == 0, shown.stderr
        assert shown.stdout == stopped.stdout
        nothing = run(*command, "--report-only", "--out", "none")
    assert nothing.exit_code == 2
    assert "none holds no benchmark of these batch sizes" in nothing.stderr
    stop = False
    again = run(*command, "--json", "all.json", width=140)
    assert again.exit_code == 0, again.stderr
    assert list(report(Path("all.json"), "batches")["result"]["batches"]) == ["1", "2", "4"]


def test_latency(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    result = run("paper", "latency", "--target", pair.target, "--rounds", "2", "--json", str(file), width=140)
    assert result.exit_code == 0, result.stderr
    assert "Table 4" in result.stdout
    assert "2 of 2 rounds" in result.stderr
    found = report(file, "latency")
    assert found["result"]["tokens"] == 5
    assert found["paper"]["js"] == {"total_ms": 106.0, "ms": 1.74, "share_pct": 1.64}


def test_speculative_goes_on_where_it_was(run: Run, pair: Pair, prompts: str, tmp_path: Path) -> None:
    file, out = tmp_path / "table6.json", tmp_path / "out"
    command = ["paper", "speculative", "--task", "toy", "--max-tokens", "12", "-L", "2,4", "--raw", *pair.args()]
    command += ["--out", str(out), "--json", str(file)]
    result = run(*command, "--limit", "2", width=140)
    assert result.exit_code == 0, result.stderr
    assert "8 of 8 groups of cells" in result.stderr
    more = run(*command, "--limit", "3", "--task", prompts, width=140)
    assert more.exit_code == 0, more.stderr
    assert "Table 6: toy" in more.stdout
    assert "24 of 24 groups of cells" in more.stderr
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 24 == len({(line["task"], line["cell"], line["id"]) for line in lines})
    found = report(file, "speculative")
    rows = found["result"]["tasks"]["toy"]["rows"]
    assert [(row["method"], row["draft_length"], row["examples"]) for row in rows] == [
        ("SD", 2, 3), ("SD+DM", 2, 3), ("SD", 4, 3), ("SD+DM", 4, 3),
    ]  # fmt: skip
    shown = run(*command, "--limit", "3", "--task", prompts, "--report-only", width=140)
    assert shown.stdout == more.stdout
    nothing = run("paper", "speculative", "--task", "toy", "--out", str(tmp_path / "none"), "--report-only")
    assert nothing.exit_code == 2
    assert "holds no benchmark" in nothing.stderr
    refused = run(*command, "--batch", "2")
    assert refused.exit_code == 2
    assert "batch=2 has no meaning with engine='hf'" in refused.stderr


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """The folder of a tiny encoder."""
    from transformers import BertConfig, BertModel

    from cli.cli_support import build_tokenizer

    folder = tmp_path / "encoder"
    config = BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = build_tokenizer(None)
    tokenizer.pad_token = "<|end|>"
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_similarity(run: Run, pair: Pair, encoder: str, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "similarity.json"
    result = run(
        "paper", "similarity", "--task", prompts, "--raw", "--limit", "2", "--max-tokens", "8", "-p", "0.3", "-K", "3",
        "--target", pair.target, "--encoder", encoder, "--json", str(file), width=140,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "Figure 3: texts of different heads" in result.stdout
    assert "Entailment was left out" in result.stdout
    found = report(file, "similarity")
    assert len(found["result"]["rows"][0]["cosine"]) == 3
    assert found["result"]["rows"][0]["entailment"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads", "--task", "nothing"], "no task is called 'nothing'"),
        (["heads", "--task", "toy", "-p", "0.1,0.1"], "dropout (p) must be different numbers, got 0.1, 0.1"),
        (["heads", "--task", "toy", "-p", "0.1;0.2"], "--dropout must be numbers with commas between them"),
        (["heads", "--task", "toy", "-p", "1.0"], "dropout (p) must be a number in [0, 1)"),
        (["heads", "--task", "toy", "--seeds", "1,1"], "seeds must be different integers, got 1, 1"),
        (["heads", "--task", "toy", "--limit", "0"], "limit must be at least 1, got 0"),
        (["heads", "--task", "toy", "-K", "0"], "heads (K) must be an integer from 1 to 1024, got 0"),
        (["heads", "--task", "toy", "--texts", "no/where.jsonl"], "cannot write no/where.jsonl"),
        (["majority", "--task", "toy", "--draft", "prompt-lookup"], "'js' compares distributions"),
        (["majority", "--task", "toy", "-L", "0"], "draft_length must be at least 1, got 0"),
        (["divergence", "--task", "toy", "--support", "half"], "support must be one of"),
        (["latency", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (["speculative", "--task", "toy", "-L", "5,five"], "--draft-length must be integers with commas"),
        (["similarity", "--task", "toy", "-K", "1"], "heads (K) must be at least 2"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(run: Run, arguments: list[str], message: str) -> None:
    result = run("paper", *arguments, "--target", "demo:qwen2.5-coder", width=200)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "loading" not in result.stderr


def test_open_ended_prompts_cannot_score_heads(run: Run, prompts: str) -> None:
    result = run("paper", "heads", "--task", prompts, width=200)
    assert result.exit_code == 2
    assert "has no right answers" in result.stderr


def test_batches_need_vllm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.engines.vllm import environment

    monkeypatch.setattr(environment, "_installed", lambda name: False)
    result = run("paper", "batches", "--task", "toy", width=200)
    assert result.exit_code == 2
    assert "vLLM is not installed: pip install 'dropmatch[vllm]'" in result.stderr


def test_every_option_says_what_it_does() -> None:
    import typer

    from dropmatch.cli.paper import app

    group: Any = typer.main.get_command(app)
    assert tuple(group.list_commands(typer.Context(group))) == ANALYSES
    for name in ANALYSES:
        command = group.get_command(typer.Context(group), name)
        assert "Example: dropmatch paper " + name in command.help
        for parameter in command.params:
            assert len(getattr(parameter, "help", "") or "") > 20, (name, parameter.name)


def test_help_lists_the_analyses(run: Run) -> None:
    result = run("paper", "--help", width=120)
    for name in ANALYSES:
        assert f" {name} " in bare(result.stdout)
    assert encoders.ENCODER in run("paper", "similarity", "--help", width=160).stdout
