"""The judge against a small server: what it is asked, what its verdicts come to, and what happens when it fails."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judge_support import EXAMPLES, Asked, Server, benchmark, judge, lines, result, texts_of
from typer.testing import CliRunner

from dropmatch.evaluation.judge.prompts import version

pytest.importorskip("openai", reason="the judge's client needs the openai package")
Says = Callable[[Asked], Any]


def grades(asked: Asked) -> str:
    """Strict 8 but on the first 5; naive 1 less on each, js the same but on the second, where it gets 2."""
    (text,) = asked.texts
    number = int(text[1]) if text != "same" else 5
    score = (5 if number == 0 else 8) - (text[0] == "n")
    return f"It is fine. [[1]] would be too low.\nScore: [[{2 if text == 'j1' else score}]]"


def test_scores_are_those_of_the_judge(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js", "naive"))
    with Server(grades) as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0, found.output
    cells = result(folder)["cells"]
    assert cells["strict"]["score"]["value"] == pytest.approx((5 + 5 * 8) / 6)
    assert cells["js"]["score"]["value"] == pytest.approx((5 + 2 + 4 * 8) / 6)
    against = cells["js"]["against"]
    assert against["difference"]["value"] == pytest.approx(-1.0)
    assert (against["n"], against["lost"], against["gained"], against["p_value"]) == (6, 1, 0, 1.0)
    against = cells["naive"]["against"]
    assert (against["lost"], against["gained"], against["p_value"]) == (5, 0, 2 / 2**5)
    assert against["difference"]["low"] <= against["difference"]["value"] == pytest.approx(-5 / 6)
    # one question for each different text, with its prompt, at temperature 0
    assert len(server.asked) == 3 * 5 + 1
    assert {(asked.input, asked.texts) for asked in server.asked} == {
        (f"question {i}", (text,)) for said in texts_of("js", "naive").values() for i, text in enumerate(said)
    }
    assert all(body["temperature"] == 0 and body["model"] == "wise" for body in server.bodies)
    assert re.search(r"js +6 +6\.50 \[.*\] +-1\.00 \[.*\] +1 / 0 +1 +0", found.stdout)
    assert len(lines(folder)) == 18
    assert "Score: [[" in lines(folder)[0]["answers"][0]


def prefers(better: Callable[[str, str], str]) -> Says:
    """A judge that compares two texts by what they say, wherever they stand."""

    def says(asked: Asked) -> str:
        a, _ = asked.texts
        wanted = better(*sorted(asked.texts))
        return f"Hm.\nVerdict: [[{'TIE' if wanted == 'tie' else 'A' if wanted == a else 'B'}]]"

    return says


def test_win_rates_are_those_of_the_judge(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    # js wins on 0, ties on 1, loses on 2, 3 and 4; 5 is the same text
    verdicts = {"0": "j0", "1": "tie", "2": "s2", "3": "s3", "4": "s4"}
    with Server(prefers(lambda j, s: verdicts[j[1]])) as server:
        found = judge(folder, server.url, "--kind", "pairwise")
    assert found.exit_code == 0, found.output
    entry = result(folder)["cells"]["js"]
    assert (entry["wins"], entry["ties"], entry["losses"], entry["same"]) == (1, 2, 3, 1)
    assert entry["win_rate"]["value"] == pytest.approx((1 + 2 / 2) / 6)
    assert entry["win_rate"]["low"] < 1 / 3 < entry["win_rate"]["high"]
    assert entry["p_value"] == pytest.approx(2 * (1 + 4) / 2**4)
    assert (entry["orders_disagree"], entry["compared"], entry["unparsed"]) == (0, 5, 0)
    # both orders, each with its own prompt, and nothing about the same texts
    assert sorted((asked.input, asked.texts) for asked in server.asked) == sorted(
        (f"question {i}", pair) for i in range(5) for pair in ((f"s{i}", f"j{i}"), (f"j{i}", f"s{i}"))
    )
    assert re.search(r"js +6 +33\.3 \[.*\] +1 / 2 / 3 +0\.62 +1 +0 of 5 +0", found.stdout)


@pytest.mark.parametrize(("letter", "name"), [("A", "first_preferred"), ("B", "second_preferred")])
def test_a_judge_that_goes_by_position_finds_ties_only(tmp_path: Path, letter: str, name: str) -> None:
    folder = benchmark(tmp_path, texts_of("js", "naive"))
    with Server(lambda asked: f"[[{letter}]]") as server:
        found = judge(folder, server.url, "--kind", "pairwise")
    for entry in result(folder)["cells"].values():
        assert (entry["wins"], entry["ties"], entry["losses"]) == (0, 6, 0)
        assert entry["win_rate"] == {"value": 0.5, "low": 0.5, "high": 0.5}
        assert entry["p_value"] == 1.0
        assert entry["orders_disagree"] == entry[name] == 5
    assert "orders disagree on 10 of 10 pairs (100 %)" in found.stdout


def test_a_win_in_one_order_and_a_tie_in_the_other_is_a_tie(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[B]]" if asked.texts[1][0] == "j" else "[[C]]") as server:
        judge(folder, server.url, "--kind", "pairwise")
    entry = result(folder)["cells"]["js"]
    assert (entry["wins"], entry["ties"], entry["orders_disagree"]) == (0, 6, 5)
    assert entry["first_preferred"] == entry["second_preferred"] == 0


def test_the_same_texts_are_not_asked_about(tmp_path: Path) -> None:
    same = {cell: [f"s{i}" for i in range(EXAMPLES)] for cell in ("strict", "js", "naive")}
    folder = benchmark(tmp_path, same)
    # there is nothing to ask, so that the endpoint does not matter
    found = judge(folder, "http://127.0.0.1:9/v1", "--kind", "pairwise")
    assert found.exit_code == 0, found.output
    assert "0 questions for wise; 24 judgements are wanted in all" in found.stderr
    assert all(entry["ties"] == entry["same"] == 6 for entry in result(folder)["cells"].values())
    with Server(lambda asked: "[[7]]") as server:
        judge(folder, server.url)
    assert len(server.asked) == 6  # once for all three cells
    assert len(lines(folder)) == 24 + 18


def test_an_answer_without_a_verdict_is_asked_once_more(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))

    def says(asked: Asked) -> str:
        if asked.texts == ("j1",):
            return "no idea"
        return "[[6]]" if asked.again or asked.texts != ("j0",) else "let me think about it"

    with Server(says) as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0
    assert [asked.texts for asked in server.asked if asked.again] in ([("j0",), ("j1",)], [("j1",), ("j0",)])
    entry = result(folder)
    assert (entry["answers"], entry["unparsed"], entry["refused"]) == (12, 1, None)
    assert entry["cells"]["js"]["unparsed"] == 1
    assert entry["cells"]["js"]["score"]["value"] == 6.0
    assert entry["cells"]["js"]["against"]["n"] == 5
    kept = {(*line["shown"], line["id"]): line for line in lines(folder)}
    assert kept["js", "1"]["answers"] == ["let me think about it", "[[6]]"]
    assert (kept["js", "2"]["answers"], kept["js", "2"]["verdict"]) == (["no idea", "no idea"], None)
    assert re.search(r"js +5 +6\.00 .* 1\n", found.stdout)


def test_a_judge_without_verdicts_is_refused(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[9]]" if asked.texts[0] in ("s0", "s1") else "I like it.\x1b[2J") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 1
    assert "10 of 12 answers of wise have no verdict, so that the result is worthless" in found.stderr
    assert "I like it. [2J" in found.stderr
    assert "judged by" not in found.stdout
    assert "score" not in result(folder)["cells"]["js"]
    # better now: what had no verdict is asked again, the rest is not
    with Server(lambda asked: "[[9]]") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0
    assert len(server.asked) == 9  # 10 of which 2 are of the same text
    assert result(folder)["cells"]["js"]["score"]["value"] == 9.0


@pytest.mark.parametrize("content", ["", None])
def test_a_judge_that_says_nothing_is_refused(tmp_path: Path, content: Any) -> None:
    with Server(lambda asked: content) as server:
        found = judge(benchmark(tmp_path, texts_of("js")), server.url)
    assert found.exit_code == 1
    assert "12 of 12 answers of wise have no verdict" in found.stderr


def test_what_is_no_chat_completion_is_named(tmp_path: Path) -> None:
    with Server(lambda asked: [{"type": "text", "text": "[[4]]"}]) as server:
        found = judge(benchmark(tmp_path, texts_of("js")), server.url)
    assert found.exit_code == 2
    assert f"what {server.url} answers is no chat completion" in found.stderr


def test_a_hopeless_judge_is_not_asked_to_the_end(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js", "naive", "typical", "margin", "topk"))
    with Server(lambda asked: (400, "this is no chat model", {})) as server:
        found = judge(folder, server.url, "--kind", "pairwise", "--concurrency", "1")
    assert found.exit_code == 1
    assert "20 of 20 answers have no verdict" in found.stderr
    assert "HTTP 400: this is no chat model" in found.stderr
    assert 20 <= len(server.asked) <= 22


def test_a_text_that_the_endpoint_rejects_is_left_out(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: (400, "too long", {}) if asked.texts == ("j3",) else "[[4]]") as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0
    assert len(server.asked) == 11
    assert result(folder)["cells"]["js"]["unparsed"] == 1


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "0.01"}), (429, {}), (503, {})])
def test_a_busy_endpoint_is_asked_again(tmp_path: Path, status: int, headers: dict[str, str]) -> None:
    folder, seen = benchmark(tmp_path, texts_of("js")), set()

    def says(asked: Asked) -> Any:
        first = asked.texts not in seen
        seen.add(asked.texts)
        return (status, "busy", headers) if first else "[[5]]"

    with Server(says) as server:
        found = judge(folder, server.url)
    assert found.exit_code == 0, found.output
    assert len(server.asked) == 22
    assert result(folder)["cells"]["js"]["score"]["value"] == 5.0


def test_an_endpoint_that_keeps_failing_ends_the_run(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: (500, "out of memory", {}) if asked.texts == ("s2",) else "[[5]]") as server:
        found = judge(folder, server.url, "--concurrency", "1")
    assert found.exit_code == 1
    last = found.stderr.splitlines()[-1]
    assert last == f"error: {server.url} answers 500 (out of memory), after 6 tries"
    assert len([asked for asked in server.asked if asked.texts == ("s2",)]) == 6
    assert len(lines(folder)) == 4
    assert "the answers so far are kept" in found.stderr


def test_an_endpoint_that_is_down_is_named(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    found = judge(folder, url)
    assert found.exit_code == 1
    assert found.stderr.splitlines()[-1].startswith(f"error: cannot reach {url} (")
    assert "is it running" in found.stderr
    assert not (folder / "judgements.jsonl").exists()


def test_a_key_that_is_refused_is_named_but_not_shown(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[5]]", key="right") as server:
        found = judge(folder, server.url)
        assert found.exit_code == 2
        assert f"{server.url} wants a key: set OPENAI_API_KEY" in found.stderr
        found = judge(folder, server.url, env={"OPENAI_API_KEY": "sk-secret"})
        assert found.exit_code == 2
        assert f"{server.url} refuses the key in OPENAI_API_KEY: wrong key Bearer ***" in found.stderr
        found = judge(folder, server.url, "--api-key-env", "JUDGE_KEY")
        assert "the environment variable JUDGE_KEY holds no key" in found.stderr
        found = judge(folder, server.url, "--api-key-env", "JUDGE_KEY", env={"JUDGE_KEY": "right"})
        assert found.exit_code == 0, found.output


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[5]]") as server:
        found = judge(folder, server.url, model="fool")
        assert found.exit_code == 2
        assert f"{server.url} does not know the model 'fool'; it has wise, wiser" in found.stderr
        found = judge(folder, server.url.removesuffix("/v1"))
        assert found.exit_code == 2
        assert "is not the address of an API" in found.stderr


def test_cells_and_tasks_can_be_chosen(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js:p=0.1:K=3", "naive"))
    with Server(grades) as server:
        judge(folder, server.url, "--cells", "js:heads=3:dropout=0.1", "--task", str(tmp_path / "prompts.jsonl"))
    assert list(result(folder)["cells"]) == ["strict", "js:p=0.1:K=3"]
    assert len(server.asked) == 11


def test_another_judge_or_wording_is_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[3]]") as server:
        judge(folder, server.url)
        assert judge(folder, server.url).exit_code == 0
        assert len(server.asked) == 11
    with Server(lambda asked: "[[9]]") as server:
        judge(folder, server.url, model="wiser")
        assert len(server.asked) == 11
        monkeypatch.setattr("dropmatch.evaluation.judge.prompts._REMINDER", " An earlier answer was bad.")
        judge(folder, server.url)
        assert len(server.asked) == 22
    found = [(result(folder, i)["model"], result(folder, i)["cells"]["js"]["score"]["value"]) for i in range(3)]
    assert found == [("wise", 3.0), ("wiser", 9.0), ("wise", 9.0)]
    assert result(folder, 0)["version"] != result(folder, 2)["version"] == version("single")


def test_judgements_of_other_texts_do_not_count(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[3]]") as server:
        judge(folder, server.url)
    records = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(records.replace('"j2"', '"other"'))
    with Server(lambda asked: "[[9]]") as server:
        judge(folder, server.url)
    assert [asked.texts for asked in server.asked] == [("other",)]
    assert result(folder)["cells"]["js"]["score"]["value"] == pytest.approx((5 * 3 + 9) / 6)


@pytest.mark.parametrize(("what", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_that_is_stopped_goes_on(tmp_path: Path, what: signal.Signals, code: int) -> None:
    folder, slow, number = benchmark(tmp_path, texts_of("js")), threading.Event(), itertools.count()

    def says(asked: Asked) -> str:
        if next(number) >= 6:
            slow.wait(60)
        return "[[5]]"

    with Server(says) as server:
        command = [sys.executable, "-m", "dropmatch.cli", "judge", str(folder), "--endpoint", server.url]
        first = subprocess.Popen(
            [*command, "--model", "wise", "--concurrency", "1"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        path, deadline = folder / "judgements.jsonl", time.monotonic() + 60
        while not (path.exists() and path.read_text().count("\n") >= 6):
            assert time.monotonic() < deadline
            assert first.poll() is None, first.stderr.read()  # type: ignore[union-attr]
            time.sleep(0.02)
        stopped = time.monotonic()
        first.send_signal(what)
        output, errors = first.communicate(timeout=30)
        assert time.monotonic() - stopped < 20  # without waiting for the answers on their way
        assert first.returncode == code, errors
        if what == signal.SIGINT:
            assert "interrupted: give the same command again to go on" in errors
            assert "judged on 3 of 6 examples so far" in output
        slow.set()
    assert len(lines(folder)) == 6
    with Server(lambda asked: "[[5]]") as server:
        assert judge(folder, server.url).exit_code == 0
    assert len(server.asked) == 11 - 6
    assert len(lines(folder)) == 12


def test_a_line_that_was_not_written_out_is_asked_again(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js"))
    with Server(lambda asked: "[[5]]") as server:
        judge(folder, server.url, "--concurrency", "1")
        path = folder / "judgements.jsonl"
        path.write_bytes(path.read_bytes()[:-9])
        asked = len(server.asked)
        assert judge(folder, server.url).exit_code == 0
        assert len(server.asked) == asked  # it is that of the other cell's same text
    assert len(lines(folder)) == 12
    path.write_text('{"model": "wise"}\n')
    assert "line 1 is no judgement" in judge(folder, "http://127.0.0.1:9/v1").stderr


def test_the_benchmarks_report_has_the_judges(tmp_path: Path) -> None:
    folder = benchmark(tmp_path, texts_of("js", "naive"))
    with Server(grades) as server:
        judge(folder, server.url)
    with Server(prefers(lambda j, s: j)) as server:
        judge(folder, server.url, "--kind", "pairwise", "--cells", "js")
    with Server(lambda asked: "hm") as server:
        judge(folder, server.url, model="wiser")
    from dropmatch.cli.app import app

    found = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["bench", "--out", str(folder), "--report-only"])
    assert found.exit_code == 0, found.output
    report = (folder / "report.md").read_text()
    heading, _, strict, js, naive = [line for line in report.splitlines() if line.startswith("| ")][:5]
    assert heading.endswith("| wise: score of 10 | wise: wins % |")
    assert re.search(r"\| 7\.50 \[\d\.\d\d, \d\.\d\d\] \|  \|$", strict)
    assert re.search(r"\| 6\.50 \[.*\] \| 91\.7 \[.*\] \|$", js)
    assert naive.endswith("|  |")
    assert "judged by wise, pairwise" in report
    assert "Worthless: 18 of 18 answers of wiser have no verdict" in report
    assert "wise: wins %" in found.stdout
