"""Settings: frozen, validated when made. Every error names the option and says what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from dropmatch.errors import SettingError

MAX_HEADS = 1024
DEFAULT_STRICTNESS = 0.5
TOKEN_FLOOR = 0.1  # of denoised verdicts of heads
MAX_DRAFT_LENGTH = 128
MIN_TEMPERATURE = 1e-4
RULE_PARAMETERS = ("threshold", "delta", "window", "weight", "candidates")

ConfigT = TypeVar("ConfigT", bound="_Config")


@dataclass(frozen=True)
class _Config:
    @classmethod
    def from_options(cls: type[ConfigT], options: Mapping[str, Any]) -> ConfigT:
        """Build from a flat mapping, refusing names that are no setting and values that are no scalar.

        Raises:
            SettingError: an unknown name, a nested value, or a value out of range.
        """
        cls._check_names(options)
        return cls(**options)

    @classmethod
    def _check_names(cls, options: Mapping[str, Any]) -> None:
        known = {field.name for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise SettingError(f"unknown option {name!r}; the options are: {', '.join(sorted(known))}")
            if isinstance(value, (Mapping, list, tuple, set)):
                raise SettingError(
                    f"{name} must be a single value, got {type(value).__name__}: options are flat, not nested"
                )


@dataclass(frozen=True)
class AcceptanceConfig(_Config):
    """How a draft token is judged.

    Attributes:
        rule: name of an acceptance rule; see `dropmatch.acceptance.rule_names()`.
        heads: K, how many heads the rule looks at.
        dropout: p, probability that a unit of the hidden state is dropped, in [0, 1).
        verdict: "sampled": by one set of K random heads, as in the paper; "denoised": accept where the probability
            of acceptance over sets of K heads is at least `strictness`: no randomness, no seed; "auto": denoised, or
            sampled where `mask_seed`, `support` or heads_mode="dropout" ask for the paper's heads, and where rows of
            the LM head cannot be gathered, which makes many heads dear.
        strictness: that probability, in (0, 1].
        heads_mode: how heads are made. "dropout": by masks on the hidden state, as in the paper; "gaussian": drawn
            for the likeliest tokens from the distribution that dropout gives their logits; "auto": gaussian for a
            denoised verdict, dropout for a sampled one. Where rows of the LM head cannot be gathered, dropout.
        gaussian_tokens: m, for how many of the target's likeliest tokens Gaussian heads are drawn.
        token_floor: a lossy acceptance also needs this probability in the heads' centroid, or under the target for
            rules that look at no heads. None is TOKEN_FLOOR where heads are asked and `verdict` is "denoised" or
            "auto", since a 1.5B target kept its quality with it and not without (docs/results.md); and 0, the
            paper, for "sampled" and for other rules.
        support: tokens that dropout heads are evaluated on. "shortlist": the likeliest tokens and one bucket for
            the rest; "full": the whole vocabulary (the reference); "auto": the shortlist where rows of the
            LM head can be gathered (a plain, unquantised linear layer), else full.
        shortlist_size: M, how many of the target's likeliest tokens the shortlist holds.
        evaluation: "lazy" asks the rule only where the draft differs from the clean token; "eager" about
            every row, as the paper's statistics do.
        mask_seed: seed of the heads of a sampled verdict; None takes the seed of the sequence.
        threshold, delta, window, weight, candidates: numbers of rules that look at no heads, each with its own
            meaning and default there (`get_rule(name).parameters`, or `dropmatch rules`).

    Raises:
        SettingError: a value out of range, or a number that the rule does not take.
    """

    rule: str = "js"
    heads: int = 5
    dropout: float = 0.3
    verdict: str = "auto"
    strictness: float = DEFAULT_STRICTNESS
    heads_mode: str = "auto"
    gaussian_tokens: int = 16
    token_floor: float | None = None
    support: str = "auto"
    shortlist_size: int = 2048
    evaluation: str = "lazy"
    mask_seed: int | None = None
    threshold: float | None = None
    delta: float | None = None
    window: int | None = None
    weight: float | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        _integer("heads (K)", self.heads, 1, MAX_HEADS)
        _number("dropout (p)", self.dropout, 0.0, 1.0, "[0, 1)", include_high=False)
        _choice("verdict", self.verdict, ("auto", "sampled", "denoised"))
        _number("strictness", self.strictness, 0.0, 1.0, "(0, 1]", include_low=False)
        _choice("heads_mode", self.heads_mode, ("auto", "dropout", "gaussian"))
        _integer("gaussian_tokens (m)", self.gaussian_tokens, 8, 4096)
        if self.token_floor is not None:
            _number("token_floor", self.token_floor, 0.0, 1.0, "[0, 1]")
        _choice("support", self.support, ("auto", "shortlist", "full"))
        _integer("shortlist_size (M)", self.shortlist_size, 16, 1 << 20)
        _choice("evaluation", self.evaluation, ("lazy", "eager"))
        if self.mask_seed is not None:
            _integer("mask_seed", self.mask_seed, -(2**63), 2**63 - 1)
        if self.verdict == "auto" and _asks_for_sampling(vars(self)):
            object.__setattr__(self, "verdict", "sampled")
        elif self.verdict == "auto" and self.strictness != DEFAULT_STRICTNESS:
            object.__setattr__(self, "verdict", "denoised")
        if self.verdict == "sampled" and self.strictness != DEFAULT_STRICTNESS:
            raise SettingError(
                "strictness has a meaning for verdict='denoised' only: set that, or leave strictness out"
            )
        if self.verdict == "denoised" and self.mask_seed is not None:
            raise SettingError(
                "mask_seed has no meaning for verdict='denoised', which draws nothing: set verdict='sampled', or leave "
                "mask_seed out"
            )
        if self.wants_gaussian and self.support != "auto":
            raise SettingError(
                f"support={self.support!r} is for dropout heads, and these settings ask for Gaussian ones: set "
                "heads_mode='dropout', or leave support out"
            )
        self._settle_rule_parameters()

    def _settle_rule_parameters(self) -> None:
        """Check the numbers that the rule takes, and fill in its defaults."""
        # last, since the rules import torch; and here, since they need this module
        from dropmatch.acceptance.registry import get_rule, rule_names

        taken = {parameter.name: parameter for parameter in get_rule(self.rule).parameters}
        for name in RULE_PARAMETERS:
            value = getattr(self, name)
            if name not in taken and value is not None:
                others = [r for r in rule_names() if name in {each.name for each in get_rule(r).parameters}]
                raise SettingError(
                    f"{name}={value!r} has no meaning for rule {self.rule!r}: leave it out, or use a rule that takes "
                    f"it ({', '.join(others) or 'there is none'})"
                )
            if name in taken and value is None:
                object.__setattr__(self, name, taken[name].default)
            elif name in taken:
                taken[name].check(value)

    def changed(self, **options: Any) -> AcceptanceConfig:
        """The settings with some changed; what has no meaning under a new verdict or rule goes back to its default.

        Raises:
            SettingError: an unknown name, or a value out of range.
        """
        self._check_names(options)
        if "verdict" not in options and _asks_for_sampling(options):
            options["verdict"] = "sampled"
        forgotten = {"sampled": "strictness", "denoised": "mask_seed"}.get(options.get("verdict", ""))
        if forgotten is not None:
            options = {forgotten: getattr(AcceptanceConfig, forgotten), **options}
        if options.get("rule", self.rule) != self.rule:
            options = {**dict.fromkeys(RULE_PARAMETERS), **options}
        return replace(self, **options)

    @property
    def wants_gaussian(self) -> bool:
        """Whether heads are to be drawn from the Gaussian, if the LM head allows it."""
        return self.heads_mode == "gaussian" or (self.heads_mode == "auto" and self.verdict != "sampled")

    @property
    def floor(self) -> float:
        """The probability that a lossy token needs."""
        from dropmatch.acceptance.registry import get_rule

        if self.token_floor is not None:
            return self.token_floor
        return TOKEN_FLOOR if self.verdict != "sampled" and get_rule(self.rule).needs_heads else 0.0

    def denoises(self, can_gather: bool) -> bool:
        """Whether verdicts are denoised, given whether rows of the LM head can be gathered."""
        return self.verdict == "denoised" or (self.verdict == "auto" and can_gather)

    def clean_floor(self, can_gather: bool) -> float:
        """The clean probability below which heads need not be asked, since the floor refuses the token anyway.

        0 where all are to be asked: without a floor, of a sampled verdict, and where a minority of the heads decides
        (see `dropmatch.acceptance.denoising`).
        """
        from dropmatch.acceptance.registry import get_rule

        asked = get_rule(self.rule).needs_heads and self.denoises(can_gather) and self.strictness >= 0.5
        return self.floor if asked else 0.0


@dataclass(frozen=True)
class DraftConfig(_Config):
    """How draft tokens are proposed.

    Attributes:
        draft_length: L, the most tokens proposed per round; 0 is plain decoding.
        draft_stop_probability: end a draft after a token that the drafter itself gives less than this
            probability; 0 drafts L tokens every round.
        max_ngram: prompt lookup: the longest ending of the text that is looked for earlier in it.
        min_ngram: prompt lookup: the shortest one.

    Raises:
        SettingError: a value out of range.
    """

    draft_length: int = 5
    draft_stop_probability: float = 0.0
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        _integer("draft_length (L)", self.draft_length, 0, MAX_DRAFT_LENGTH)
        _number("draft_stop_probability", self.draft_stop_probability, 0.0, 1.0, "[0, 1)", include_high=False)
        _integer("max_ngram", self.max_ngram, 1, 64)
        _integer("min_ngram", self.min_ngram, 1, 64)
        if self.min_ngram > self.max_ngram:
            raise SettingError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")


@dataclass(frozen=True)
class SamplingConfig(_Config):
    """How tokens are chosen from the target's distribution, and when to stop; the names are vLLM's.

    Attributes:
        temperature: 0 is greedy; else at least 1e-4.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with this much mass; 1 keeps all.
        seed: seed of every random number of the sequence.
        max_tokens: the most tokens to generate.
        min_tokens: end-of-sequence tokens are banned before this many.
        ignore_eos: generate past end-of-sequence tokens.

    Raises:
        SettingError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "[0, inf)", include_high=False)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise SettingError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature!r}: "
                "logits divided by it would overflow"
            )
        _integer("top_k", self.top_k, 0, 1 << 31)
        _number("top_p", self.top_p, 0.0, 1.0, "(0, 1]", include_low=False)
        _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if not isinstance(self.ignore_eos, bool):
            raise SettingError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.min_tokens > self.max_tokens:
            raise SettingError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")


def _asks_for_sampling(options: Mapping[str, Any]) -> bool:
    """Whether one of the options has a meaning for the paper's sampled dropout heads only."""
    return (
        options.get("mask_seed") is not None
        or options.get("support", "auto") != "auto"
        or options.get("heads_mode") == "dropout"
    )


def split_options(options: Mapping[str, Any]) -> tuple[AcceptanceConfig, DraftConfig, SamplingConfig]:
    """Sort flat options into the three kinds of settings.

    Raises:
        SettingError: an unknown name, a nested value, or a value out of range.
    """
    kinds = (AcceptanceConfig, DraftConfig, SamplingConfig)
    names = [{field.name for field in fields(kind)} for kind in kinds]
    unknown = sorted(set(options) - set().union(*names))
    if unknown:
        raise SettingError(f"unknown option {unknown[0]!r}; the options are: {', '.join(sorted(set().union(*names)))}")
    acceptance, draft, sampling = ({k: v for k, v in options.items() if k in known} for known in names)
    return (
        AcceptanceConfig.from_options(acceptance),
        DraftConfig.from_options(draft),
        SamplingConfig.from_options(sampling),
    )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SettingError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _number(
    name: str,
    value: object,
    low: float,
    high: float,
    allowed: str,
    *,
    include_low: bool = True,
    include_high: bool = True,
) -> None:
    inside = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (low <= value if include_low else low < value)
        and (value <= high if include_high else value < high)
    )
    if not inside:
        raise SettingError(f"{name} must be a number in {allowed}, got {value!r}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(f"{name} must be one of: {', '.join(allowed)}; got {value!r}")
