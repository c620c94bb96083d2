"""`dropmatch compare`: what it measures and how it shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from cli_support import Pair, bare

Run = Callable[..., Any]
PROMPTS = ("--prompt", "w10 w11", "--prompt", "w20")


def compared(run: Run, path: Path, *args: str) -> tuple[dict[str, Any], Any]:
    result = run("compare", *args, "--json", str(path))
    assert result.exit_code == 0, result.stderr
    return json.loads(path.read_text(encoding="utf-8")), result


@pytest.fixture(scope="module")
def found(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """One comparison that several tests look at."""
    from typer.testing import CliRunner

    from dropmatch.cli.app import app

    path = tmp_path_factory.mktemp("compare") / "out.json"
    args = pair.args(*PROMPTS, "--max-tokens", "30", "--repeats", "3", "--json", str(path))
    result = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["compare", *args])
    assert result.exit_code == 0, result.stderr
    return json.loads(path.read_text(encoding="utf-8")), result


def test_json_has_everything(found: tuple[dict[str, Any], Any], pair: Pair) -> None:
    data, _ = found
    assert data["complete"] is True
    assert data["settings"]["target"] == pair.target
    assert (data["settings"]["heads"], data["settings"]["max_tokens"], data["settings"]["repeats"]) == (5, 30, 3)
    assert "rule" not in data["settings"]
    assert set(data["versions"]) == {"dropmatch", "python", "torch", "transformers"}
    assert data["machine"]["cpu"]
    assert data["machine"]["threads"] >= 1
    assert [method["name"] for method in data["methods"]] == ["plain", "strict", "naive", "js"]
    assert [prompt["prompt"] for prompt in data["prompts"]] == ["w10 w11", "w20"]
    for prompt in data["prompts"]:
        assert list(prompt["methods"]) == ["plain", "strict", "naive", "js"]
        for record in prompt["methods"].values():
            assert len(record["token_ids"]) == len(record["tokens"]) == 30
            assert len(record["runs"]) == 3
            assert {run["generated"] for run in record["runs"]} == {30}
            assert record["finish_reason"] == "length"


def test_medians_and_speedups(found: tuple[dict[str, Any], Any]) -> None:
    for prompt in found[0]["prompts"]:
        methods = prompt["methods"]
        for record in methods.values():
            seconds = median(run["seconds"] for run in record["runs"])
            assert record["tokens_per_second"] == pytest.approx(30 / seconds)
            for other in ("plain", "strict"):
                expected = record["tokens_per_second"] / methods[other]["tokens_per_second"]
                assert record[f"speedup_over_{other}"] == pytest.approx(expected)


def test_overall_sums_over_prompts(found: tuple[dict[str, Any], Any]) -> None:
    data, _ = found
    for name, total in data["overall"].items():
        runs = [prompt["methods"][name]["runs"] for prompt in data["prompts"]]
        assert total["tokens"] == 60
        assert total["seconds"] == pytest.approx(sum(median(r["seconds"] for r in three) for three in runs))
        rounds, accepted = (sum(three[0][key] for three in runs) for key in ("rounds", "accepted"))
        assert total["acceptance_length"] == pytest.approx(1 + accepted / rounds)
        assert total["lossy_share"] == pytest.approx(sum(three[0]["lossy"] for three in runs) / 60)
    assert data["overall"]["strict"]["same_text_as_plain"] == 2
    assert data["overall"]["js"]["lossy_share"] > 0


def test_methods_are_what_they_say(found: tuple[dict[str, Any], Any], pair: Pair) -> None:
    from dropmatch import load

    engine = load(pair.target, pair.draft)
    options = {"plain": {"draft_length": 0}, **{name: {"rule": name} for name in ("strict", "naive", "js")}}
    for prompt in found[0]["prompts"]:
        for name, record in prompt["methods"].items():
            expected = engine.generate(prompt["prompt"], max_tokens=30, **options[name])
            assert record["token_ids"] == expected.token_ids
            assert record["runs"][0]["reasons"] == dict(expected.statistics.reasons)


def test_first_difference(found: tuple[dict[str, Any], Any], pair: Pair) -> None:
    import torch

    from dropmatch import load

    engine = load(pair.target, pair.draft)
    for prompt in found[0]["prompts"]:
        plain = prompt["methods"]["plain"]["token_ids"]
        assert prompt["methods"]["plain"]["first_difference"] is None
        assert prompt["methods"]["strict"]["first_difference"] is None
        difference = prompt["methods"]["js"]["first_difference"]
        other = prompt["methods"]["js"]["token_ids"]
        index = difference["index"]
        assert other[:index] == plain[:index]
        assert other[index] != plain[index]
        assert difference["plain"] == engine.tokenizer.decode([plain[index]])
        assert difference["other"] == engine.tokenizer.decode([other[index]])
        ids = [*engine.encode(prompt["prompt"]).tolist(), *plain[:index]]
        with torch.no_grad():
            chances = engine.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(dim=-1)
        assert difference["plain_probability"] == pytest.approx(float(chances[plain[index]]), rel=1e-3)
        assert difference["other_probability"] == pytest.approx(float(chances[other[index]]), rel=1e-3)
        assert difference["plain_probability"] == pytest.approx(float(chances.max()), rel=1e-3)


def test_tables(found: tuple[dict[str, Any], Any]) -> None:
    data, result = found
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if re.match(r"(plain|strict|naive|js) .*\dx ", line)]
    assert len(rows) == 12  # four methods in three tables
    for name, row in zip(("plain", "strict", "naive", "js"), rows[:4], strict=True):
        record = data["prompts"][0]["methods"][name]
        assert row[0] == name
        assert row[1] == f"{record['tokens_per_second']:.1f}"
        assert row[2] == f"{record['speedup_over_plain']:.2f}x"
        assert row[3] == f"{record['speedup_over_strict']:.2f}x"
        assert row[4] == f"{record['runs'][0]['acceptance_length']:.2f}"
        assert row[5] == f"{100 * record['runs'][0]['lossy_share']:.1f}"
        assert row[-1] == "length"
    assert rows[1][7] == "none"
    difference = data["prompts"][0]["methods"]["js"]["first_difference"]
    plain, other = (f"'{difference[n]}' {difference[f'{n}_probability']:.2f}" for n in ("plain", "other"))
    assert f"{difference['index'] + 1}: {plain} → {other}" in result.stdout
    overall = data["overall"]["js"]
    assert rows[11][:4] == ["js", "60", f"{overall['seconds']:.1f}", f"{overall['tokens_per_second']:.1f}"]
    assert rows[9][-3:] == ["2", "of", "2"]
    for words in ("they may change the text", "medians of 3 runs", "whatever else ran on it", data["machine"]["cpu"]):
        assert words in " ".join(result.stdout.split())


def test_progress_goes_to_stderr_a_line_per_run(found: tuple[dict[str, Any], Any]) -> None:
    lines = found[1].stderr.splitlines()
    assert sum(line.startswith("warming up: ") for line in lines) == 4
    runs = [line for line in lines if line.startswith("prompt ")]
    assert len(runs) == 2 * 4 * 3
    # repetitions take turns
    assert [line.split(":")[0] for line in runs[:5]] == [
        "prompt 1 of 2, plain, run 1 of 3",
        "prompt 1 of 2, strict, run 1 of 3",
        "prompt 1 of 2, naive, run 1 of 3",
        "prompt 1 of 2, js, run 1 of 3",
        "prompt 1 of 2, plain, run 2 of 3",
    ]


@pytest.mark.parametrize(("width", "columns"), [(80, 1), (120, 2), (200, 4)])
def test_texts_fit_the_width(run: Run, pair: Pair, width: int, columns: int) -> None:
    result = run("compare", *pair.args("--prompt", "w10", "--max-tokens", "30"), width=width)
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= width
    first = next(line for line in lines if line.startswith("╭"))
    assert first.count("╭") == columns
    assert first.startswith("╭─ plain, ")
    one_line = any(re.match(r"js .*: '\w+' 0\.\d\d → '\w+' 0\.\d\d ", line) for line in lines)
    assert one_line == (width > 80)  # else the second token goes below the first


def test_color_marks_lossy_tokens(run: Run, pair: Pair) -> None:
    args = pair.args("--prompt", "w10", "--max-tokens", "30", "--rules", "js")
    colored = run("compare", *args, "--color")
    assert "\x1b[1;4;33m" in colored.stdout
    text = bare(colored.stdout)
    assert "accepted by the heads' spread (lossy)" in text
    assert "the target's token where a draft token was rejected" in text
    plain = run("compare", *args, "--no-color")
    assert "\x1b" not in plain.stdout
    assert "heads' spread" not in plain.stdout


def test_rules_choose_and_plain_comes_first(run: Run, pair: Pair, tmp_path: Path) -> None:
    args = pair.args("--prompt", "w10", "--max-tokens", "10")
    data, result = compared(run, tmp_path / "a.json", *args, "--rules", "js,plain", "--rules", "naive")
    assert list(data["overall"]) == ["plain", "js", "naive"]
    assert data["overall"]["js"]["speedup_over_strict"] is None
    assert "strict" not in result.stdout


def test_lossless_only_does_not_warn_of_changed_texts(run: Run, pair: Pair) -> None:
    result = run("compare", *pair.args("--prompt", "w10", "--max-tokens", "10", "--rules", "strict"))
    assert result.exit_code == 0
    assert "may change the text" not in result.stdout


def test_prompt_lookup_leaves_js_out(run: Run, pair: Pair, tmp_path: Path) -> None:
    args = ("--target", pair.target, "--draft", "prompt-lookup", "--prompt", "w10 w11 w10", "--max-tokens", "20")
    data, _ = compared(run, tmp_path / "a.json", *args)
    assert list(data["overall"]) == ["plain", "strict", "naive"]


def test_options_reach_every_method(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.engines.hf.engine import Engine

    seen: list[dict[str, Any]] = []
    original = Engine.stream

    def stream(self: Engine, prompt: Any, **options: Any) -> Any:
        seen.append(options)
        return original(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", stream)
    options = ("-K", "3", "-p", "0.2", "-L", "4", "--token-floor", "0.1", "--support", "full", "--mask-seed", "8")
    assert run("compare", *pair.args("--prompt", "w10", "--max-tokens", "12", *options)).exit_code == 0
    timed = [options for options in seen if options["max_tokens"] == 12][-4:]
    assert [options["draft_length"] for options in timed] == [0, 4, 4, 4]
    assert [options["rule"] for options in timed] == ["strict", "strict", "naive", "js"]
    for options in timed:
        assert (options["heads"], options["dropout"], options["token_floor"]) == (3, 0.2, 0.1)
        assert (options["support"], options["mask_seed"], options["temperature"]) == ("full", 8, 0.0)


def test_one_rule_by_both_verdicts(run: Run, pair: Pair, tmp_path: Path) -> None:
    more = ("--prompt", "w10 w11", "--max-tokens", "30", "--verdict", "denoised", "--strictness", "0.9", "-p", "0.5")
    data, _ = compared(run, tmp_path / "a.json", *pair.args(*more, "--rules", "strict,naive,naive:sampled,js:denoised"))
    assert list(data["overall"]) == ["plain", "strict", "naive", "naive:sampled", "js:denoised"]
    assert data["settings"]["strictness"] == 0.9


@pytest.mark.parametrize("name", ["js:mean", "nope:sampled", "js:"])
def test_a_verdict_or_rule_that_does_not_exist(run: Run, pair: Pair, name: str) -> None:
    result = run("compare", *pair.args("--prompt", "w10", "--rules", name))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "denoised" in result.stderr or "unknown rule" in result.stderr


def test_prompts_from_files(run: Run, pair: Pair, tmp_path: Path) -> None:
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('\n{"prompt": "w10", "id": 1}\n{"prompt": "w11\\nw12"}\n', encoding="utf-8")
    plain.write_text("\ufeffw20 w21\r\n\r\nw22\n", encoding="utf-8")
    args = pair.args("--max-tokens", "4", "--rules", "strict", "--prompt", "w30")
    data, _ = compared(run, tmp_path / "out.json", *args, "--prompts", str(lines))
    assert [prompt["prompt"] for prompt in data["prompts"]] == ["w30", "w10", "w11\nw12"]
    data, _ = compared(run, tmp_path / "out.json", *args, "--prompts", str(plain))
    assert [prompt["prompt"] for prompt in data["prompts"]] == ["w30", "w20 w21", "w22"]


def test_three_prompts_are_built_in(run: Run, pair: Pair, tmp_path: Path) -> None:
    data, _ = compared(run, tmp_path / "out.json", *pair.args("--max-tokens", "2", "--rules", "strict"))
    texts = [prompt["prompt"] for prompt in data["prompts"]]
    assert len(texts) == 3
    assert "Python function" in texts[1]


def test_every_prompt_is_checked_before_the_first_is_decoded(run: Run, pair: Pair) -> None:
    long = " ".join(["w10"] * 33000)
    result = run("compare", *pair.args("--prompt", "w10", "--prompt", long))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: prompt and max_tokens together are 33128 tokens" in result.stderr
    assert "warming up" not in result.stderr


def test_noisy_heads_are_warned_of_once(run: Run, pair: Pair) -> None:
    result = run(
        "compare", *pair.args(*PROMPTS, "--max-tokens", "80", "-p", "0.9", "--token-floor", "0", "--rules", "js")
    )
    warned = [line for line in result.stderr.splitlines() if "uniform draft" in line]
    assert len(warned) == 1
    assert warned[0].startswith("warning: js, 2 of 2 prompts: ")
