"""Help, rules, models and version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Pair, bare

Run = Callable[..., Any]


def help_of(*command: str) -> str:
    """The help as one line of words, without frames."""
    process = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", *command, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160", "TERMINAL_WIDTH": "160", "_TYPER_FORCE_DISABLE_TERMINAL": "1"},
        check=True,
    )
    return re.sub(r"[\s│╭╮╰╯─]+", " ", bare(process.stdout))


def test_top_help_has_commands_and_examples() -> None:
    text = help_of()
    for command in ("generate", "compare", "models", "rules"):
        assert f" {command} " in text
    assert text.count("dropmatch generate ") >= 3
    assert "dropmatch compare --target ./big --draft ./small" in text


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_help_teaches_the_settings(command: str) -> None:
    text = help_of(command)
    for option, words in {
        "--heads -K": "K, how many heads the rule looks at (1 to 1024). [default: 5]",
        "--dropout -p": "p, the probability that a unit of the hidden state is dropped (0 to below 1).",
        "--draft-length -L": "L, the most tokens proposed per round (0 to 128); 0 is plain decoding. [default: 5]",
        "--token-floor": "0 is the paper. [default: (0.1 for denoised verdicts of heads, else 0)]",
        "--max-tokens": "[default: 256]" if command == "generate" else "[default: 128]",
        "--target": "[default: demo:qwen2.5-coder]",
        "--draft": "prompt-lookup",
        "--mask-seed": "Seed of the heads of a sampled verdict.",
        "--verdict": "denoised: accept where the probability of acceptance over sets of K heads is at least",
        "--strictness": "Larger is stricter. [default: 0.5]",
        "--heads-mode": "gaussian: drawn for the likeliest tokens",
    }.items():
        assert option in text
        assert words in text


def test_every_option_says_what_it_does() -> None:
    import typer

    from dropmatch.cli.app import app

    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    for name in ("generate", "compare"):
        for parameter in group.get_command(context, name).params:
            assert len(getattr(parameter, "help", "") or "") > 20, (name, parameter.name)


def test_defaults_are_those_of_the_settings(run: Run) -> None:
    import typer

    from dropmatch.cli.app import app
    from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig

    group: Any = typer.main.get_command(app)
    generate = group.get_command(typer.Context(group), "generate")
    offered = {parameter.name: parameter.default for parameter in generate.params}
    expected = {
        **vars(AcceptanceConfig()),
        "verdict": AcceptanceConfig.verdict,
        **vars(DraftConfig()),
        **vars(SamplingConfig()),
    }
    shared = set(offered) & set(expected)
    assert len(shared) >= 15
    assert {name: offered[name] for name in shared} == {name: expected[name] for name in shared}


def test_rules_lists_what_is_registered(run: Run) -> None:
    from dropmatch.acceptance import get_rule, rule_names

    result = run("rules", width=200)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for name in rule_names():
        line = next(line for line in lines if line.startswith(name))
        assert get_rule(name).summary in line
        assert ("yes" in line) == get_rule(name).lossless


def test_version(run: Run) -> None:
    from dropmatch import __version__

    assert run("--version").stdout == f"dropmatch {__version__}\n"


def test_models_list(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path))
    result = run("models", "list", width=80)
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    rows = [line for line in result.stdout.splitlines() if line.startswith("demo:")]
    assert [row.split()[:2] for row in rows] == [
        ["demo:qwen2.5-coder", "no"],
        ["demo:qwen2.5-coder-draft", "no"],
        ["demo:smollm2", "no"],
    ]
    assert "1.12 GB" in rows[0]


def test_models_where_and_fetch(run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path))
    assert run("models", "where", pair.target).stdout == f"{pair.target}\n"
    fetched = run("models", "fetch", pair.target, pair.draft)
    assert fetched.stdout == f"{pair.target}\n{pair.draft}\n"
    absent = run("models", "where", "demo:smollm2")
    assert absent.exit_code == 1
    assert absent.stdout == ""
    assert "not on this machine yet: dropmatch models fetch demo:smollm2" in absent.stderr


def test_models_fetch_checks_all_names_first(run: Run, pair: Pair) -> None:
    result = run("models", "fetch", pair.target, "demo:nothing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no demo model is called 'demo:nothing'")
