"""Table 4: what is timed, in which order, and what the shares are of."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from dropmatch import Engine
from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.terminal import for_terminal
from dropmatch.evaluation.paper import latency
from dropmatch.evaluation.paper.latency import latency_sheet, measure_latency, ways


class Quiet:
    def __init__(self) -> None:
        self.rounds = 0

    def begin(self, what: str) -> None: ...

    def done(self, tokens: int, measured: bool) -> None:
        self.rounds += 1


@pytest.fixture
def engine(tiny: Any) -> Engine:
    return Engine(tiny.build_model("llama", vocab_size=3000), tiny.word_tokenizer(3000))


def test_every_part_is_timed_beside_the_forward(engine: Engine) -> None:
    progress = Quiet()
    found = measure_latency(engine, 3, 0.3, 4, 6, progress)
    assert progress.rounds == 6
    assert list(found["parts"]) == ["blocks", "head", "naive", "js", "js_shortlist", "js_denoised"]
    for name, part in found["parts"].items():
        assert 0 < part["ms"]["low"] <= part["ms"]["median"] <= part["ms"]["high"], name
        if name != "blocks":
            assert 0 < part["share_pct"]["median"] < 100
            assert part["times_the_head"]["median"] >= (1.0 if name == "head" else 1.01)
    assert found["parts"]["head"]["times_the_head"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    sheet = latency_sheet(found, "tiny")
    assert all(len(row) == len(sheet.headings) for row in sheet.rows)
    assert sheet.headings[-4:] == ("paper: ms", "paper: total ms", "paper: share %", "paper: times the head")
    assert sheet.rows[0][-4:] == ("", "", "", "")
    assert sheet.rows[1][-4:] == ("0.05", "107", "0.05", "1.0")
    assert sheet.rows[2][-4:] == ("0.17", "104", "0.17", "3.4")
    assert sheet.rows[3][-4:] == ("1.74", "106", "1.64", "34.8")
    assert {row[-4:] for row in sheet.rows[4:]} == {("", "", "", "")}  # what the paper does not have
    json.dumps(found)


def test_the_paper_s_latency_fits_a_terminal() -> None:
    spread = {"median": 1234.56, "low": 1200.0, "high": 1300.0}
    part = {"ms": spread, "total_ms": spread, "share_pct": spread, "times_the_head": spread}
    parts = {name: {"what": f"the part called {name}", **part} for name in ("blocks", "head", "naive", "js")}
    file = io.StringIO()
    sheet = latency_sheet({"parts": parts, "heads": 5, "dropout": 0.3, "tokens": 5, "rounds": 9}, "tiny")
    Console(file=file, width=80).print(for_terminal([sheet]))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(re.search(r"called js .* 1\.74 .* 106 .* 1\.64 ", line) for line in lines)


def test_shares_are_of_the_same_round() -> None:
    seconds = {"blocks": [8.0, 80.0, 4.0], "head": [2.0, 20.0, 1.0], "js": [10.0, 100.0, 5.0]}
    parts = latency._parts(seconds, {"js": "heads and JS"})
    assert parts["blocks"]["ms"]["median"] == 8000.0
    assert parts["head"]["share_pct"] == pytest.approx({"median": 20, "low": 20, "high": 20})
    assert parts["js"]["ms"]["median"] == 10_000.0
    assert parts["js"]["total_ms"]["median"] == 20_000.0
    assert parts["js"]["share_pct"] == pytest.approx({"median": 60, "low": 60, "high": 60})
    assert parts["js"]["times_the_head"] == pytest.approx({"median": 6, "low": 6, "high": 6})


def test_parts_take_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    judged, forward = latency.judge, latency._forward

    def judge(evidence: Any, config: Any, head: Any) -> Any:
        order.append(f"{config.rule} {config.support} {config.verdict}")
        return judged(evidence, config, head)

    def run(model: Any, ids: Any) -> Any:
        order.append("forward")
        return forward(model, ids)

    monkeypatch.setattr(latency, "judge", judge)
    monkeypatch.setattr(latency, "_forward", run)
    measure_latency(engine, 2, 0.3, 3, 2, Quiet())
    rounds = [order[i : i + 5] for i in range(0, len(order), 5)]
    assert rounds[0] == ["forward", "naive full sampled", "js full sampled", "js shortlist sampled", "js auto auto"]
    assert len(rounds) == latency.WARM_UP + 2
    for number, each in enumerate(rounds):
        turn = number % 5
        assert each == rounds[0][turn:] + rounds[0][:turn]


def test_the_forward_is_cut_where_the_head_begins(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    clock = iter([1.0, 5.0, 7.0])

    def now(device: torch.device) -> float:
        seen.append("now")
        return next(clock)

    monkeypatch.setattr(latency, "_now", now)
    handles = [
        engine.model.model.norm.register_forward_hook(lambda *_: seen.append("blocks done")),
        engine.model.lm_head.register_forward_hook(lambda *_: seen.append("head done")),
    ]
    blocks, head = latency._forward(engine.model, torch.tensor([[5, 6]]))
    for handle in handles:
        handle.remove()
    assert seen == ["now", "blocks done", "now", "head done", "now"]
    assert (blocks, head) == (4.0, 2.0)
    assert not engine.model.lm_head._forward_pre_hooks


def test_a_gpu_s_clock_is_read_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    latency._now(torch.device("cpu"))
    assert waited == []
    latency._now(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


def test_a_head_without_rows_has_the_paper_s_ways_only() -> None:
    assert list(ways(5, 0.3, can_gather=False)) == ["naive", "js"]
    for _, config in ways(5, 0.3, can_gather=False).values():
        assert (config.verdict, config.heads_mode, config.support, config.heads) == ("sampled", "dropout", "full", 5)


def test_counts_out_of_range_are_refused(engine: Engine) -> None:
    for tokens, rounds, message in ((0, 5, "tokens must be"), (5, 0, "rounds must be"), (513, 5, "context of 512")):
        with pytest.raises(SettingError, match=message):
            measure_latency(engine, 5, 0.3, tokens, rounds, Quiet())
