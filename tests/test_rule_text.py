"""Rules with their settings as one word."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropmatch.acceptance import rule_names
from dropmatch.errors import SettingError
from dropmatch.rule_text import parse_rule, rule_text


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("js", {"rule": "js"}),
        ("js:p=0.2", {"rule": "js", "dropout": 0.2}),
        (" js : p = 0.2 : K=3 ", {"rule": "js", "dropout": 0.2, "heads": 3}),
        ("js:denoised", {"rule": "js", "verdict": "denoised"}),
        ("js:sampled:mask_seed=-4", {"rule": "js", "verdict": "sampled", "mask_seed": -4}),
        ("naive:L=10:m=64:M=128", {"rule": "naive", "draft_length": 10, "gaussian_tokens": 64, "shortlist_size": 128}),
        ("typical:threshold=1e-2:delta=1", {"rule": "typical", "threshold": 0.01, "delta": 1}),
        ("js:heads_mode=dropout:support=full", {"rule": "js", "heads_mode": "dropout", "support": "full"}),
    ],
)
def test_texts_and_what_they_mean(text: str, options: dict[str, Any]) -> None:
    assert parse_rule(text) == options
    assert parse_rule(rule_text(options)) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no rule"),
        (":p=0.2", "names no rule"),
        ("js:", "'' is no setting"),
        ("js:p", "'p' is no setting"),
        ("js:p=", "'p=' is no setting"),
        ("js:0.3", "'0.3' is no setting.*js:p=0.2"),
        ("js:q=1", "unknown setting 'q'.*p for dropout"),
        ("js:rule=naive", "unknown setting 'rule'"),
        ("js:p=0.2:dropout=0.3", "sets dropout twice"),
        ("js:denoised:sampled", "sets verdict twice"),
        ("js:temperature=1", "unknown setting 'temperature'"),
    ],
)
def test_what_is_not_of_this_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_rule(text)


@given(
    st.fixed_dictionaries(
        {"rule": st.sampled_from(rule_names())},
        optional={
            "dropout": st.floats(0, 0.99),
            "heads": st.integers(1, 1024),
            "strictness": st.floats(0.01, 1),
            "threshold": st.floats(0, 1),
            "verdict": st.sampled_from(["sampled", "denoised", "auto"]),
            "draft_length": st.integers(0, 128),
            "mask_seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        },
    )
)
def test_a_text_keeps_what_is_put_into_it(options: dict[str, Any]) -> None:
    kept = {name: value for name, value in options.items() if value is not None}
    assert parse_rule(rule_text(options)) == kept
