"""Settings: what is refused, and whether the refusal helps (case 28)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropmatch.config import (
    MAX_DRAFT_LENGTH,
    MAX_HEADS,
    AcceptanceConfig,
    DraftConfig,
    SamplingConfig,
    split_options,
)
from dropmatch.errors import DropMatchError, SettingError

KINDS = (AcceptanceConfig, DraftConfig, SamplingConfig)
NAN, INF = math.nan, math.inf
# option, values at the bounds that are fine, values that are not, what the message says is allowed
OPTIONS: list[tuple[Any, str, list[Any], list[Any], list[str]]] = [
    (AcceptanceConfig, "heads", [1, MAX_HEADS], [0, -1, MAX_HEADS + 1, 2.0, "5", True, None], ["1", str(MAX_HEADS)]),
    (AcceptanceConfig, "dropout", [0, 0.0, 0.3, 0.999], [1, 1.0, -0.1, 2, NAN, INF, "0.3", True, None], ["[0, 1)"]),
    (
        AcceptanceConfig,
        "verdict",
        ["auto", "sampled", "denoised"],
        ["", "mean", None, 1],
        ["auto", "sampled", "denoised"],
    ),
    (AcceptanceConfig, "strictness", [1e-3, 0.5, 1, 1.0], [0, 0.0, 1.01, -1, NAN, "1", True, None], ["(0, 1]"]),
    (
        AcceptanceConfig,
        "heads_mode",
        ["auto", "dropout", "gaussian"],
        ["", "normal", None],
        ["auto", "dropout", "gaussian"],
    ),
    (AcceptanceConfig, "gaussian_tokens", [8, 64, 4096], [7, -1, 4097, 64.0, True], ["8", "4096"]),
    (AcceptanceConfig, "token_floor", [0, 0.5, 1, 1.0], [-0.01, 1.01, NAN, INF, "0", False], ["[0, 1]"]),
    (
        AcceptanceConfig,
        "support",
        ["auto", "shortlist", "full"],
        ["", "FULL", "short", None, 1],
        ["auto", "shortlist", "full"],
    ),
    (AcceptanceConfig, "shortlist_size", [16, 2048, 1 << 20], [15, -1, (1 << 20) + 1, 64.0, True], ["16", "1048576"]),
    # js, the default rule, takes none of these; those that do are tested with their rules
    (AcceptanceConfig, "threshold", [None], [0.5, "x"], ["no meaning for rule 'js'", "typical"]),
    (AcceptanceConfig, "delta", [None], [0.5], ["no meaning for rule 'js'", "topk"]),
    (AcceptanceConfig, "window", [None], [6], ["no meaning for rule 'js'", "fly"]),
    (AcceptanceConfig, "weight", [None], [0.7], ["no meaning for rule 'js'", "ensemble"]),
    (AcceptanceConfig, "candidates", [None], [10], ["no meaning for rule 'js'", "topk"]),
    (AcceptanceConfig, "evaluation", ["lazy", "eager"], ["", "Lazy", "both", None, 0], ["lazy", "eager"]),
    (
        AcceptanceConfig,
        "mask_seed",
        [None, 0, -(2**63), 2**63 - 1],
        [2**63, -(2**63) - 1, 0.0, "0", True],
        [str(-(2**63)), str(2**63 - 1)],
    ),
    (AcceptanceConfig, "rule", ["js", "naive", "strict"], ["nope", "JS", "", None, 0], ["js", "naive", "strict"]),
    (DraftConfig, "draft_length", [0, 1, MAX_DRAFT_LENGTH], [-1, MAX_DRAFT_LENGTH + 1, 5.0, "5", True], ["0", "128"]),
    (DraftConfig, "draft_stop_probability", [0, 0.0, 0.99], [1, 1.0, -0.1, NAN, "0", True], ["[0, 1)"]),
    (DraftConfig, "max_ngram", [1, 64], [0, -1, 65, 2.0, True], ["1", "64"]),
    (DraftConfig, "min_ngram", [1, 3], [0, -1, 65, 1.0, True], ["1", "64"]),
    (SamplingConfig, "temperature", [0, 0.0, 0.7, 100.0], [-0.1, INF, NAN, "1", True, None], ["[0, inf)"]),
    (SamplingConfig, "top_k", [0, 1, 1 << 31], [-1, 1.0, "1", True, None], ["0"]),
    (SamplingConfig, "top_p", [1e-9, 0.9, 1, 1.0], [0, 0.0, -0.5, 1.01, NAN, True, None], ["(0, 1]"]),
    (
        SamplingConfig,
        "seed",
        [0, -(2**63), 2**63 - 1],
        [2**63, -(2**63) - 1, 0.5, "0", True, None],
        [str(-(2**63)), str(2**63 - 1)],
    ),
    (SamplingConfig, "max_tokens", [1, 1 << 31], [0, -1, 1.0, True, None], ["1"]),
    (SamplingConfig, "min_tokens", [0, 256], [-1, 0.0, True, None], ["0"]),
    (SamplingConfig, "ignore_eos", [True, False], ["false", "no", "true", "", 2, 0.5, None], ["true", "false"]),
]


def test_changed_settings_forget_what_the_new_verdict_has_no_use_for() -> None:
    denoised = AcceptanceConfig(verdict="denoised", strictness=0.7, heads=3)
    assert denoised.changed(strictness=0.9) == AcceptanceConfig(verdict="denoised", strictness=0.9, heads=3)
    assert denoised.changed(verdict="sampled", rule="naive") == AcceptanceConfig("naive", verdict="sampled", heads=3)
    sampled = AcceptanceConfig(mask_seed=4, heads=3)
    assert sampled.changed(verdict="denoised", strictness=0.2) == AcceptanceConfig(
        verdict="denoised", strictness=0.2, heads=3
    )
    assert sampled.changed(heads=2).mask_seed == 4
    assert denoised.changed(mask_seed=4) == sampled
    for options in ({"verdict": "sampled", "strictness": 0.7}, {"strictness": 2}, {"nope": 1}, {"heads": [1]}):
        with pytest.raises(SettingError):
            denoised.changed(**options)


@pytest.mark.parametrize("options", [{"mask_seed": 0}, {"support": "full"}, {"heads_mode": "dropout"}], ids=str)
def test_the_verdict_is_denoised_unless_an_option_asks_for_the_papers_heads(options: dict[str, Any]) -> None:
    assert AcceptanceConfig().denoises(can_gather=True)
    assert AcceptanceConfig().wants_gaussian
    assert not AcceptanceConfig().denoises(can_gather=False)
    assert AcceptanceConfig(strictness=0.7).denoises(can_gather=False)
    assert AcceptanceConfig(verdict="denoised").denoises(can_gather=False)
    assert AcceptanceConfig(**options).verdict == "sampled"
    assert not AcceptanceConfig(**options).denoises(can_gather=True)
    assert not AcceptanceConfig(**options).wants_gaussian
    assert AcceptanceConfig(heads_mode="gaussian", verdict="sampled").wants_gaussian


def test_every_option_is_tested_here() -> None:
    named = {(kind, name) for kind, name, *_ in OPTIONS}
    assert named == {(kind, field.name) for kind in KINDS for field in dataclasses.fields(kind)}


def test_no_two_kinds_share_an_option() -> None:
    names = [field.name for kind in KINDS for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("kind", "name", "good"), [(k, n, v) for k, n, good, *_ in OPTIONS for v in good])
def test_bounds_are_accepted(kind: Any, name: str, good: Any) -> None:
    assert getattr(kind(**{name: good}), name) == good
    assert getattr(kind.from_options({name: good}), name) == good
    made = {type(config): config for config in split_options({name: good})}
    assert getattr(made[kind], name) == good


@pytest.mark.parametrize(
    ("kind", "name", "bad", "allowed"), [(k, n, v, allowed) for k, n, _, bad, allowed in OPTIONS for v in bad]
)
def test_what_is_out_of_bounds_is_refused_with_name_value_and_what_is_allowed(
    kind: Any, name: str, bad: Any, allowed: list[str]
) -> None:
    option = {name: bad}
    for make in (lambda: kind(**option), lambda: kind.from_options(option), lambda: split_options(option)):
        with pytest.raises(SettingError) as caught:
            make()
        message = str(caught.value)
        assert name in message
        assert repr(bad) in message
        for text in allowed:
            assert text.lower() in message.lower()


@pytest.mark.parametrize("nested", [{"p": 0.3}, [0.3], (0.3,), {0.3}])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name, *_ in OPTIONS])
def test_nested_values_are_refused(kind: Any, name: str, nested: Any) -> None:
    for make in (lambda: kind.from_options({name: nested}), lambda: split_options({name: nested})):
        with pytest.raises(SettingError, match=f"{name}.*flat, not nested"):
            make()
    with pytest.raises(SettingError, match=name):  # and nothing nested slips in where the constructor is called
        kind(**{name: nested})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["nope", "Heads", "k", "dropmatch", "", "heads (K)", "__class__"])
def test_an_unknown_option_is_refused_with_those_there_are(kind: Any, name: str) -> None:
    with pytest.raises(SettingError) as caught:
        kind.from_options({name: 1})
    assert repr(name) in str(caught.value)
    for field in dataclasses.fields(kind):
        assert field.name in str(caught.value)
    with pytest.raises(SettingError) as caught:
        split_options({"heads": 3, name: 1})
    assert repr(name) in str(caught.value)
    assert all(field.name in str(caught.value) for each in KINDS for field in dataclasses.fields(each))


def test_options_go_where_they_belong() -> None:
    acceptance, draft, sampling = split_options({"rule": "naive", "draft_length": 8, "temperature": 0.5, "heads": 3})
    assert acceptance == AcceptanceConfig(rule="naive", heads=3)
    assert draft == DraftConfig(draft_length=8)
    assert sampling == SamplingConfig(temperature=0.5)
    assert split_options({}) == (AcceptanceConfig(), DraftConfig(), SamplingConfig())


@pytest.mark.parametrize(
    ("options", "floor"),
    [
        ({}, 0.1), ({"rule": "naive"}, 0.1), ({"verdict": "denoised"}, 0.1), ({"token_floor": 0}, 0.0),
        ({"token_floor": 0.3}, 0.3), ({"verdict": "sampled"}, 0.0), ({"mask_seed": 1}, 0.0), ({"rule": "typical"}, 0.0),
        ({"rule": "margin", "token_floor": 0.2}, 0.2), ({"rule": "strict"}, 0.0),
    ],
)  # fmt: skip
def test_the_floor_is_of_denoised_heads_unless_it_is_given(options: dict[str, Any], floor: float) -> None:
    assert AcceptanceConfig(**options).floor == floor
    assert AcceptanceConfig().changed(**options).floor == floor


def test_the_papers_rule_is_the_default() -> None:
    config = AcceptanceConfig()
    assert (config.rule, config.heads, config.dropout) == ("js", 5, 0.3)
    assert config.evaluation == "lazy"
    assert SamplingConfig().temperature == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_frozen_hashable_and_compared_by_value(kind: Any) -> None:
    config = kind()
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert config == kind()
    assert hash(config) == hash(kind())


def test_a_changed_copy_is_validated_too() -> None:
    with pytest.raises(SettingError, match="heads"):
        dataclasses.replace(AcceptanceConfig(), heads=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DraftConfig, {"min_ngram": 4, "max_ngram": 3}),
        (DraftConfig, {"min_ngram": 4}),
        (SamplingConfig, {"min_tokens": 9, "max_tokens": 8}),
        (SamplingConfig, {"min_tokens": 257}),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_both_names(kind: Any, options: dict[str, int]) -> None:
    with pytest.raises(SettingError) as caught:
        kind(**options)
    for word in ("ngram", "ngram") if kind is DraftConfig else ("min_tokens", "max_tokens"):
        assert word in str(caught.value)
    assert str(options[next(iter(options))]) in str(caught.value)


def test_a_refusal_is_an_error_of_this_library_and_a_value_error() -> None:
    assert issubclass(SettingError, DropMatchError)
    assert issubclass(SettingError, ValueError)


@given(
    heads=st.integers(-5, MAX_HEADS + 5),
    dropout=st.floats(-1, 2),
    floor=st.floats(-1, 2),
    size=st.integers(0, 1 << 21),
)
def test_whatever_is_accepted_is_within_bounds(heads: int, dropout: float, floor: float, size: int) -> None:
    fine = 1 <= heads <= MAX_HEADS and 0 <= dropout < 1 and 0 <= floor <= 1 and 16 <= size <= 1 << 20
    options = {"heads": heads, "dropout": dropout, "token_floor": floor, "shortlist_size": size}
    if fine:
        assert dataclasses.asdict(AcceptanceConfig(**options)).items() >= options.items()
    else:
        with pytest.raises(SettingError):
            AcceptanceConfig(**options)
