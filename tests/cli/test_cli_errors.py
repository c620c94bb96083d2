"""Errors: one line, an exit code, and before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Pair

from dropmatch.errors import ModelError, SettingError

Run = Callable[..., Any]

SETTINGS = [
    (["--rule", "foo"], "unknown rule 'foo'; the rules are: ensemble, fly, fuzzy, js, margin, naive, strict"),
    (["-K", "0"], "heads (K) must be an integer from 1 to 1024, got 0"),
    (["-p", "1"], "dropout (p) must be a number in [0, 1), got 1.0"),
    (["-p", "-0.1"], "dropout (p) must be a number in [0, 1), got -0.1"),
    (["--verdict", "mean"], "verdict must be one of: auto, sampled, denoised; got 'mean'"),
    (["--verdict", "sampled", "--strictness", "0.7"], "strictness has a meaning for verdict='denoised' only"),
    (["--verdict", "denoised", "--strictness", "0"], "strictness must be a number in (0, 1], got 0.0"),
    (["--verdict", "denoised", "--mask-seed", "1"], "mask_seed has no meaning for verdict='denoised'"),
    (["--verdict", "denoised", "--support", "full"], "support='full' is for dropout heads"),
    (["--heads-mode", "normal"], "heads_mode must be one of: auto, dropout, gaussian; got 'normal'"),
    (["--token-floor", "2"], "token_floor must be a number in [0, 1]"),
    (["--support", "half"], "support must be one of: auto, shortlist, full; got 'half'"),
    (["--evaluation", "never"], "evaluation must be one of: lazy, eager; got 'never'"),
    (["-L", "-1"], "draft_length (L) must be an integer from 0 to 128, got -1"),
    (["--draft-stop-probability", "1"], "draft_stop_probability must be a number in [0, 1)"),
    (["--temperature", "-1"], "temperature must be a number in [0, inf)"),
    (["--top-k", "-1"], "top_k must be an integer from 0"),
    (["--top-p", "0"], "top_p must be a number in (0, 1], got 0.0"),
    (["--max-tokens", "0"], "max_tokens must be an integer from 1"),
    (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens (9) must not exceed max_tokens (8)"),
    (["--stop", ""], "stop must be non-empty strings"),
    (["--draft-weights", "int2"], "draft_weights must be one of: auto, dense, int4; got 'int2'"),
    (["--dtype", "int4"], "dtype must be one of: auto, bfloat16, float16, float32; got 'int4'"),
    (["--draft", "prompt-lookup", "--rule", "js"], "rule 'js' compares distributions, and prompt-lookup has none"),
    (["--trace", "/no/such/folder/trace"], "cannot write /no/such/folder/trace: No such file or directory"),
]


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a model is loaded."""
    from dropmatch.engines.hf import load

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(load, "load", fail)


def check(result: Any, code: int, message: str) -> None:
    """One error line, nothing else."""
    assert result.exit_code == code, result.stderr or result.exception
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(("args", "message"), SETTINGS, ids=[" ".join(args) for args, _ in SETTINGS])
def test_settings_are_refused_before_loading(
    run: Run, pair: Pair, no_loading: None, args: list[str], message: str
) -> None:
    check(run("generate", "w10", *pair.args(*args)), 2, message)


@pytest.mark.parametrize("args", [["generate", "w10"], ["compare"]])
def test_a_target_without_drafter_is_refused_before_loading(
    run: Run, pair: Pair, no_loading: None, args: list[str]
) -> None:
    message = f"{pair.target} has no drafter: give --draft MODEL or --draft prompt-lookup"
    check(run(*args, "--target", pair.target), 2, message)


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_a_name_of_no_known_form_is_refused_before_loading(run: Run, pair: Pair, no_loading: None, option: str) -> None:
    check(run("generate", "w10", *pair.args(option, "no such model")), 1, "no model is called 'no such model'")


@pytest.mark.parametrize("prompt", ["", "-"])
def test_an_empty_prompt_is_refused_before_loading(run: Run, pair: Pair, no_loading: None, prompt: str) -> None:
    check(run("generate", prompt, *pair.args(), input="\n"), 2, "the prompt is empty")


def test_a_prompt_that_is_no_text(run: Run, pair: Pair, no_loading: None) -> None:
    check(run("generate", "-", *pair.args(), input=b"\xff\xfe\x00"), 2, "the prompt on stdin is no text")


def test_a_device_that_is_not_known(run: Run, pair: Pair) -> None:
    check(run("generate", "w10", *pair.args("--device", "abacus")), 1, "device 'abacus' is not known")


def test_a_context_that_is_too_short(run: Run, pair: Pair) -> None:
    result = run("generate", "w10", *pair.args("--max-tokens", "40000"))
    check(result, 2, "prompt and max_tokens together are 40001 tokens")


def test_a_missing_prompt_and_an_option_of_the_wrong_type(run: Run, no_loading: None) -> None:
    for args in (["generate"], ["generate", "w10", "-K", "many"], ["generate", "w10", "--no-such-option"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Usage: " in result.stderr
        assert "Traceback" not in result.stderr


def test_debug_keeps_the_traceback(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMATCH_DEBUG", "1")
    assert isinstance(run("generate", "w10", *pair.args("--rule", "foo")).exception, SettingError)
    assert isinstance(run("models", "where", "no such model").exception, ModelError)


RULES = [
    (["--rules", "foo"], "unknown rule 'foo'"),
    (["--rules", "strict, foo"], "unknown rule 'foo'"),
    (["--rules", "plain"], "--rules names plain decoding only"),
    (["-L", "0"], "draft_length is 0"),
    (["--draft", "prompt-lookup", "--rules", "naive,js"], "rule 'js' compares distributions"),
    (["--repeats", "0"], "repeats must be an integer of at least 1, got 0"),
    (["--prompt", " "], "--prompt must not be empty"),
    (["--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json: its folder does not exist"),
    (["--json", "/"], "cannot write /: it is a folder"),
]


@pytest.mark.parametrize(("args", "message"), RULES, ids=[" ".join(args) for args, _ in RULES])
def test_compare_refuses_before_loading(run: Run, pair: Pair, no_loading: None, args: list[str], message: str) -> None:
    check(run("compare", *pair.args(*args)), 2, message)


FILES = [
    ("a.jsonl", b'{"prompt": "w1"}\n\n{"prompt": }\n', "line 3: no valid JSON ("),
    ("b.txt", b'{"prompt": "w1"}\nw2\n', "line 2: no valid JSON ("),
    (
        "c.jsonl",
        b'{"prompt": "w1"}\n{"text": "w2"}\n',
        'line 2: expected an object with a non-empty text under "prompt"',
    ),
    ("d.jsonl", b'{"prompt": 3}\n', "line 1: expected an object"),
    ("e.jsonl", b'["w1"]\n', "line 1: expected an object"),
    ("f.jsonl", b"\n \n", "holds no prompts"),
    ("g.txt", b"", "holds no prompts"),
    ("h.txt", b"w1\xff\n", "no UTF-8 text"),
    ("missing.txt", None, "No such file or directory"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[name for name, _, _ in FILES])
def test_prompts_that_cannot_be_read(
    run: Run, pair: Pair, no_loading: None, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = run("compare", *pair.args("--prompts", str(path)))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(path) in result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
