"""Parts of the command line that a whole run does not show."""

from __future__ import annotations

import io
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from rich.style import Style

from dropmatch.cli.comparison import Difference, Method, PromptRecord, Record, Total
from dropmatch.cli.comparison_view import suspicions
from dropmatch.cli.console import paint, printable, to_json
from dropmatch.cli.highlight import legend, style_of
from dropmatch.cli.interrupts import noting_interrupt


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x07") == "a\ufffd[2Jb\tc\nd\ufffd"


def test_paint_styles_each_line_and_keeps_tabs() -> None:
    assert paint("a\tb\nc", Style(color="red")) == "\x1b[31ma\tb\x1b[0m\n\x1b[31mc\x1b[0m"
    assert paint("\n", Style(color="red")) == "\n"


def test_json_suits_the_encoding_of_the_file() -> None:
    for encoding, text in (("utf-8", '"é"'), ("latin-1", '"\\u00e9"'), ("ascii", '"\\u00e9"')):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert to_json("é", file) == text
        assert json.loads(text) == "é"


def test_reasons_of_other_rules_have_a_colour_and_a_place() -> None:
    tokens: Any = [
        SimpleNamespace(reason=reason, lossy=lossy)
        for reason, lossy in (("bonus", False), ("judge", True), ("exact", False), ("js", False))
    ]
    assert legend(tokens).plain == "exact 1   js 1   judge (lossy) 1   bonus 1"
    assert style_of("judge", True).color is not None
    assert not style_of("js", False).underline  # asked eagerly about an exact match: nothing is lost


def test_interrupts_wait_only_once_there_is_something_to_keep() -> None:
    with noting_interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with noting_interrupt() as interrupt:
        interrupt.gentle = True
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noting_interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert not interrupt.pressed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def total(name: str, accepted: int) -> Total:
    method = Method(name, lossless=name in ("plain", "strict"), options={})
    return Total(method, tokens=20, seconds=1.0, rounds=10, accepted=accepted, lossy=0, same_text=0)


def test_a_lossy_rule_that_accepts_less_than_strict_is_reported() -> None:
    sums = [total("plain", 0), total("strict", 8), total("naive", 9), total("js", 7)]
    (line,) = suspicions([], sums)
    assert line.startswith("js accepts fewer draft tokens per round than strict (1.70 and 1.80 tokens per round)")


@pytest.mark.parametrize(("probabilities", "defect"), [((0.40, 0.38), False), ((0.9, 0.01), True), ((0.9, None), True)])
def test_a_lossless_rule_that_changes_the_text_is_reported(
    probabilities: tuple[float | None, float | None], defect: bool
) -> None:
    difference = Difference(3, "a", "b", *probabilities)
    record = Record(Method("strict", lossless=True, options={}), difference=difference)
    lossy = Record(Method("js", lossless=False, options={}), difference=difference)
    lines = suspicions([PromptRecord("w1", [record, lossy])], [total("strict", 8)])
    assert lines == (["strict changed the text of prompt 1, by more than rounding: a defect"] if defect else [])
