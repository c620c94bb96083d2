"""`dropmatch generate`: text, JSON, trace, colours, and options that reach the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Pair, bare

Run = Callable[..., Any]
PROMPT = "w10 w11"


def as_json(run: Run, *args: str, **options: Any) -> dict[str, Any]:
    result = run("generate", "--json", *args, **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_goes_to_stdout_and_the_summary_to_stderr(run: Run, pair: Pair) -> None:
    result = run("generate", PROMPT, *pair.args("--max-tokens", "20"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert len(result.stdout.split()) == 20
    assert result.stderr.count("\n") == 1
    for part in ("20 tokens in", "tokens/s", "acceptance length", "lossy", "finish: length"):
        assert part in result.stderr


def test_text_is_that_of_the_engine(run: Run, pair: Pair) -> None:
    from dropmatch import load

    engine = load(pair.target, pair.draft)
    expected = engine.generate(PROMPT, rule="js", max_tokens=30)
    found = as_json(run, PROMPT, *pair.args("--max-tokens", "30"))
    assert found["token_ids"] == expected.token_ids
    assert run("generate", PROMPT, *pair.args("--max-tokens", "30")).stdout == found["text"] + "\n"


def test_json_has_result_settings_and_versions(run: Run, pair: Pair) -> None:
    import torch
    import transformers

    found = as_json(run, PROMPT, *pair.args("--max-tokens", "20", "--rule", "naive", "-K", "3", "-p", "0.2"))
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == len(found["tokens"]) == found["statistics"]["generated"] == 20
    assert found["trace"] is None
    settings = found["settings"]
    assert (settings["prompt"], settings["target"], settings["draft"]) == (PROMPT, pair.target, pair.draft)
    assert (settings["rule"], settings["heads"], settings["dropout"], settings["max_tokens"]) == ("naive", 3, 0.2, 20)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert set(found["versions"]) == {"dropmatch", "python", "torch", "transformers"}


OPTIONS = [
    (["--rule", "naive"], "rule", "naive"),
    (["--heads", "7"], "heads", 7),
    (["-K", "7"], "heads", 7),
    (["--dropout", "0.25"], "dropout", 0.25),
    (["-p", "0.25"], "dropout", 0.25),
    (["--verdict", "sampled"], "verdict", "sampled"),
    (["--verdict", "denoised", "--strictness", "0.7"], "strictness", 0.7),
    (["--heads-mode", "gaussian"], "heads_mode", "gaussian"),
    (["--token-floor", "0.05"], "token_floor", 0.05),
    (["--support", "full"], "support", "full"),
    (["--evaluation", "eager"], "evaluation", "eager"),
    (["--mask-seed", "9"], "mask_seed", 9),
    (["--draft-length", "3"], "draft_length", 3),
    (["-L", "0"], "draft_length", 0),
    (["--draft-stop-probability", "0.4"], "draft_stop_probability", 0.4),
    (["--temperature", "0.7"], "temperature", 0.7),
    (["--top-k", "5"], "top_k", 5),
    (["--top-p", "0.9"], "top_p", 0.9),
    (["--seed", "3"], "seed", 3),
    (["--max-tokens", "4"], "max_tokens", 4),
    (["--min-tokens", "2"], "min_tokens", 2),
    (["--stop", "w1", "--stop", "w2"], "stop", ("w1", "w2")),
    (["--logprobs"], "logprobs", True),
]


@pytest.mark.parametrize(("args", "name", "value"), OPTIONS, ids=[a[0] for a, _, _ in OPTIONS])
def test_options_reach_the_engine(
    run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, args: list[str], name: str, value: Any
) -> None:
    from dropmatch.engines.hf.engine import Engine

    seen: dict[str, Any] = {}
    original = Engine.stream

    def stream(self: Engine, prompt: Any, **options: Any) -> Any:
        seen.update(options)
        return original(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", stream)
    before = run("generate", PROMPT, *pair.args("--max-tokens", "3"))
    assert before.exit_code == 0, before.stderr
    assert seen[name] != value  # it is not the default
    result = run("generate", PROMPT, *pair.args("--max-tokens", "3", *args))
    assert result.exit_code == 0, result.stderr
    assert seen[name] == value


def test_dtype_and_device_reach_the_loader(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.engines.hf import load as module

    seen: dict[str, Any] = {}
    original = module.load

    def load(target: str, draft: str | None, **options: Any) -> Any:
        seen.update(options, target=target, draft=draft)
        return original(target, draft, **options)

    monkeypatch.setattr(module, "load", load)
    options = ("--dtype", "float16", "--device", "cpu", "--draft-weights", "dense", "--max-tokens", "2")
    assert run("generate", PROMPT, *pair.args(*options)).exit_code == 0
    assert seen == {
        "target": pair.target,
        "draft": pair.draft,
        "dtype": "float16",
        "device": "cpu",
        "draft_weights": "dense",
    }


def test_plain_decoding_needs_no_drafter(run: Run, pair: Pair) -> None:
    found = as_json(run, PROMPT, "--target", pair.target, "-L", "0", "--max-tokens", "15")
    strict = as_json(run, PROMPT, *pair.args("--rule", "strict", "--max-tokens", "15"))
    assert found["token_ids"] == strict["token_ids"]
    assert found["statistics"]["rounds"] == 15


def test_prompt_lookup_drafts_without_a_model(run: Run, pair: Pair) -> None:
    args = ("--target", pair.target, "--draft", "prompt-lookup", "--rule", "strict", "--max-tokens", "40")
    found = as_json(run, "w10 w11 w12 w10", *args)
    assert found["settings"]["draft"] == "prompt-lookup"
    assert found["statistics"]["proposed"] > 0


def test_stop_ends_the_text(run: Run, pair: Pair) -> None:
    args = pair.args("--rule", "strict", "--max-tokens", "30")
    words = as_json(run, PROMPT, *args)["text"].split()
    stop = next(word for word in words[3:] if words.index(word) > 2)
    found = as_json(run, PROMPT, *args, "--stop", f"{stop} ", "--stop", stop)
    assert found["text"].split() == words[: words.index(stop) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_sampling_is_seeded(run: Run, pair: Pair) -> None:
    args = pair.args("--temperature", "1.5", "--max-tokens", "12", "--seed")
    one, again, other = (as_json(run, PROMPT, *args, seed)["token_ids"] for seed in ("1", "1", "2"))
    assert one == again
    assert one != other


def test_prompt_from_stdin_loses_one_newline(run: Run, pair: Pair) -> None:
    args = pair.args("--max-tokens", "8")
    piped = as_json(run, "-", *args, input=f"{PROMPT}\n\n")
    assert piped["settings"]["prompt"] == f"{PROMPT}\n"
    assert piped["token_ids"] == as_json(run, PROMPT, *args)["token_ids"]


def test_chat_template_is_used_unless_raw(run: Run, pair: Pair) -> None:
    args = ("--target", pair.chat, "--draft", "prompt-lookup", "--rule", "naive", "--max-tokens", "4")
    lengths = [as_json(run, PROMPT, *args, *more)["prompt_tokens"] for more in ((), ("--raw",), ("--system", "w20"))]
    assert lengths == [4, 2, 6]  # user, two words, assistant; the words; system and its word besides


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--system", "w20"), "--system needs a chat template"),
        (("--system", "w20", "--raw"), "leave one of them out"),
    ],
)
def test_system_needs_a_template(run: Run, pair: Pair, args: tuple[str, ...], message: str) -> None:
    result = run("generate", PROMPT, *pair.args(*args))
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_template_that_refuses_is_an_error_line(run: Run, pair: Pair) -> None:
    args = ("--target", pair.chat, "--draft", "prompt-lookup", "--rule", "naive")
    result = run("generate", "w13", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the model's chat template refuses")
    assert "(unlucky): pass prompts as text, on the command line with --raw" in result.stderr


def test_logprobs_are_negative_and_in_the_summary(run: Run, pair: Pair) -> None:
    result = run("generate", PROMPT, *pair.args("--logprobs", "--json", "--max-tokens", "10"))
    values = [token["logprob"] for token in json.loads(result.stdout)["tokens"]]
    assert len(values) == 10
    assert all(value < 0 for value in values)
    assert f"mean log-probability {sum(values) / 10:.3f}" in result.stderr
    silent = run("generate", PROMPT, *pair.args("--json", "--max-tokens", "10"))
    assert all(token["logprob"] is None for token in json.loads(silent.stdout)["tokens"])
    assert "log-probability" not in silent.stderr


@pytest.mark.parametrize("verdict", ["sampled", "denoised"])
def test_trace_explains_every_draft_token(run: Run, pair: Pair, tmp_path: Path, verdict: str) -> None:
    path = tmp_path / "rounds.jsonl"
    more = ("--trace", str(path), "--max-tokens", "40", "--logprobs", "--verdict", verdict)
    found = as_json(run, PROMPT, *pair.args(*more))
    rounds = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [r["round"] for r in rounds] == list(range(found["statistics"]["rounds"]))
    committed = [token for r in rounds for token in r["committed"]]
    assert [token["id"] for token in committed] == found["token_ids"]
    assert all(token["logprob"] < 0 for token in committed)

    entries = [entry for r in rounds for entry in r["draft"]]
    keys = {"id", "text", "verdict", "reason", "exact", "clean_id", "clean_text"}
    numbers = {"js", "radius", "votes", "probability", "uniform_passes", "frequency"}
    assert all(set(entry) == keys | numbers for entry in entries)
    assert {entry["verdict"] for entry in entries} >= {"accepted", "rejected", "not reached"}
    assert all(entry["text"] == f"w{entry['id']}" for entry in entries if entry["id"] >= 5)
    by_js = [entry for entry in entries if entry["reason"] == "js"]
    assert by_js
    for entry in by_js:
        if verdict == "sampled":
            assert entry["js"] <= entry["radius"]
            assert entry["frequency"] is None
        else:
            assert 0.5 <= entry["frequency"] <= 1
        assert 0 <= entry["votes"] <= 5
        assert 0 < entry["probability"] < 1
        assert entry["id"] != entry["clean_id"]
    assert sum(entry["verdict"] == "accepted" for entry in entries) == found["statistics"]["accepted"]


def test_trace_marks_what_lies_behind_the_end(run: Run, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    args = pair.args("--trace", str(path), "--max-tokens", "60")

    def rounds(*more: str) -> tuple[list[dict[str, Any]], list[int]]:
        ids = as_json(run, PROMPT, *args, *more)["token_ids"]
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], ids

    found, ids = rounds()
    text = ""
    for block in found:  # a round of which the first token is new, and ends the text
        stop = block["committed"][0]["text"]
        accepted = [entry["verdict"] for entry in block["draft"]].count("accepted")
        if accepted > 2 and stop not in text:
            break
        text += " ".join(token["text"] for token in block["committed"]) + " "
    else:
        pytest.fail("no such round")
    stopped, left = rounds("--stop", stop)
    assert stopped[:-1] == found[: block["round"]]
    assert left == ids[: len(left)]
    assert len(stopped[-1]["committed"]) == 1
    verdicts = [entry["verdict"] for entry in stopped[-1]["draft"]]
    assert verdicts[:accepted] == ["accepted"] + ["cut"] * (accepted - 1)


def test_color_marks_the_same_text_by_reason(run: Run, pair: Pair) -> None:
    args = pair.args("--max-tokens", "40")
    plain = run("generate", PROMPT, *args, "--no-color")
    colored = run("generate", PROMPT, *args, "--color")
    assert "\x1b" not in plain.stdout + plain.stderr
    assert bare(colored.stdout) == plain.stdout
    reasons = as_json(run, PROMPT, *args)["statistics"]["reasons"]
    legend = bare(colored.stderr).splitlines()[0]
    assert f"exact {reasons['exact']}" in legend
    assert f"js (lossy) {reasons['js']}" in legend
    assert colored.stdout.count("\x1b[1;4;33m") == reasons["js"]  # bold, underlined, yellow
    assert colored.stdout.count("\x1b[32m") == reasons["exact"]
    assert "exact" not in plain.stderr


def test_plain_decoding_has_no_legend(run: Run, pair: Pair) -> None:
    result = run("generate", PROMPT, *pair.args("--color", "-L", "0", "--max-tokens", "5"))
    assert bare(result.stderr).count("\n") == 1


def test_a_warning_is_one_line(run: Run, pair: Pair) -> None:
    result = run("generate", PROMPT, *pair.args("-p", "0.9", "--token-floor", "0", "--max-tokens", "80"))
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "even a uniform draft would have passed" in lines[0]
    assert "NoisyHeadsWarning" not in result.stderr
    assert result.stderr.count("\n") == 2  # with the summary


def interrupted(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_the_first_token(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    import dropmatch.cli.generate as module

    monkeypatch.setattr(module, "follow", interrupted)
    result = run("generate", PROMPT, *pair.args("--json"))
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("", [], "abort")


def test_ctrl_c_while_loading(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.engines.hf import load

    monkeypatch.setattr(load, "load", interrupted)
    result = run("generate", PROMPT, *pair.args("--json"))
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_prompt_that_begins_with_a_dash(run: Run, pair: Pair) -> None:
    found = as_json(run, *pair.args("--max-tokens", "3", "--", "-w10"))
    assert found["settings"]["prompt"] == "-w10"


def test_a_draft_that_is_not_used_is_not_loaded(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch import models

    loaded: list[str] = []
    original = models.load

    def load(name: str, **options: Any) -> Any:
        loaded.append(name)
        return original(name, **options)

    monkeypatch.setattr(models, "load", load)
    as_json(run, PROMPT, *pair.args("--max-tokens", "2", "-L", "0"))
    assert loaded == [pair.target]
    as_json(run, PROMPT, *pair.args("--max-tokens", "2"))
    assert loaded == [pair.target, pair.target, pair.draft]
