"""What `dropmatch compare` measures: every prompt decoded by every method."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from dropmatch.cli.session import encode, start
from dropmatch.cli.settings import Settings
from dropmatch.config import DraftConfig
from dropmatch.errors import SettingError
from dropmatch.models.names import PROMPT_LOOKUP
from dropmatch.rule_text import parse_rule

if TYPE_CHECKING:
    from torch import Tensor

    from dropmatch.cli.progress import Display
    from dropmatch.engines.hf.engine import Engine
    from dropmatch.engines.hf.result import GenerationResult

PLAIN, STRICT = "plain", "strict"
DEFAULT_RULES = (STRICT, "naive", "js")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: "plain", or the text of a rule with its settings (js, js:denoised, js:p=0.2).
        lossless: whether it should give the text of plain decoding.
        options: what it changes in the settings.
    """

    name: str
    lossless: bool
    options: dict[str, Any]


def choose_methods(names: Sequence[str], settings: Settings) -> list[Method]:
    """Plain decoding, then the rules in the given order; without names, all built-in ones that can be had.

    Raises:
        SettingError: a rule does not exist, or the drafter cannot serve it.
    """
    from dropmatch.acceptance import get_rule

    if settings.drafting.draft_length == 0:
        raise SettingError("draft_length is 0, so that all methods would be plain decoding: give at least 1")
    chosen = list(dict.fromkeys(name for name in names if name != PLAIN))
    if not chosen:
        if names:
            raise SettingError("--rules names plain decoding only: give a rule to compare it with")
        lookup = settings.drafter == PROMPT_LOOKUP
        chosen = [n for n in DEFAULT_RULES if not (lookup and get_rule(n).needs_draft_distribution)]
    plain = Method(PLAIN, lossless=True, options={"rule": STRICT, "draft_length": 0})
    return [plain, *(_method(name, settings) for name in chosen)]


def _method(name: str, settings: Settings) -> Method:
    """A method from a rule's text, as `parse_rule` reads it; what it does not say is as in the settings.

    Raises:
        SettingError: there is no such rule or setting, or the drafter cannot serve the rule.
    """
    from dropmatch.acceptance import get_rule

    options = parse_rule(name)
    own = {field.name: options.pop(field.name) for field in fields(DraftConfig) if field.name in options}
    acceptance, drafting = settings.acceptance.changed(**options), replace(settings.drafting, **own)
    settings.check_rule(acceptance, drafting)
    return Method(name, get_rule(acceptance.rule).lossless, {**asdict(acceptance), **own})


@dataclass(frozen=True)
class Difference:
    """The first token that is not plain decoding's.

    Attributes:
        index: which generated token, from 0.
        plain: text of plain decoding's token; None if its text had ended.
        other: text of this method's token, likewise.
        plain_probability: what the target without dropout gives plain decoding's token there, after the same
            prefix; None if its text had ended.
        other_probability: what it gives this method's token, likewise.
    """

    index: int
    plain: str | None
    other: str | None
    plain_probability: float | None
    other_probability: float | None


@dataclass
class Record:
    """One prompt decoded by one method, once or several times.

    Attributes:
        method: how.
        results: one per repetition; all have the same tokens, since everything is seeded.
        difference: where the text leaves that of plain decoding; None if it does not.
        warnings: what the engine warned of.
    """

    method: Method
    results: list[GenerationResult] = field(default_factory=list)
    difference: Difference | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def result(self) -> GenerationResult:
        """The first result: text, tokens and counts."""
        return self.results[0]

    @property
    def seconds(self) -> float:
        """Median wall time of the repetitions, prefill included."""
        return median(result.statistics.seconds for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the median wall time."""
        return self.result.statistics.generated / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PromptRecord:
    """One prompt and how each method decoded it, plain first."""

    prompt: str
    records: list[Record]

    def of(self, name: str) -> Record | None:
        """The record of a method; None if it was not compared."""
        return next((record for record in self.records if record.method.name == name), None)


@dataclass(frozen=True)
class Total:
    """One method over all prompts; seconds are sums of medians."""

    method: Method
    tokens: int
    seconds: float
    rounds: int
    accepted: int
    lossy: int
    same_text: int

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per round: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def lossy_share(self) -> float:
        """Lossy acceptances over generated tokens."""
        return self.lossy / self.tokens if self.tokens else 0.0


def totals(prompts: Sequence[PromptRecord]) -> list[Total]:
    """Sums over prompts, one per method."""
    found = []
    for column in zip(*(prompt.records for prompt in prompts), strict=True):
        counts = [record.result.statistics for record in column]
        found.append(
            Total(
                method=column[0].method,
                tokens=sum(s.generated for s in counts),
                seconds=sum(record.seconds for record in column),
                rounds=sum(s.rounds for s in counts),
                accepted=sum(s.accepted for s in counts),
                lossy=sum(s.lossy for s in counts),
                same_text=sum(record.difference is None for record in column),
            )
        )
    return found


def measure(
    engine: Engine,
    prompts: Sequence[str],
    methods: Sequence[Method],
    settings: Settings,
    repeats: int,
    display: Display,
) -> Iterator[PromptRecord]:
    """Decode every prompt by every method, alternating, after a short warm-up; yield prompt by prompt.

    Raises:
        SettingError: a prompt does not fit; all are encoded before the first is decoded.
    """
    encoded = [encode(engine, prompt, settings) for prompt in prompts]
    for ids in encoded:
        for method in methods:
            start(engine, ids, settings, method.options)  # only checked: nothing runs before it is iterated
    for method in methods:
        display.warm_up(method.name)
        budget = {"max_tokens": min(WARM_UP_TOKENS, settings.sampling.max_tokens)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in start(engine, encoded[0], settings, {**method.options, **budget}):
                pass
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True), start=1):
        records = [Record(method) for method in methods]
        for repeat in range(repeats):
            for record in records:
                display.begin(number, record.method.name, repeat)
                _decode(engine, ids, settings, record, display)
        for record in records:
            record.difference = find_difference(engine, ids, records[0].result, record.result)
        yield PromptRecord(prompt, records)


def _decode(engine: Engine, ids: Tensor, settings: Settings, record: Record, display: Display) -> None:
    """One timed run. ids: [T] the prompt."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream = start(engine, ids, settings, record.method.options)
        for tokens in stream:
            display.add(len(tokens))
    record.results.append(stream.result)
    display.end(stream.result)
    if len(record.results) == 1:
        own = (w for w in caught if w.category.__module__.partition(".")[0] == "dropmatch")
        record.warnings += [str(w.message) for w in own]


def find_difference(
    engine: Engine, prompt: Tensor, plain: GenerationResult, other: GenerationResult
) -> Difference | None:
    """Where two texts part, and how likely the target finds either token there. prompt: [T]."""
    ours, theirs = plain.token_ids, other.token_ids
    if ours == theirs:
        return None
    shared = zip(ours, theirs, strict=False)  # one may be longer
    index = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(ours), len(theirs)))
    pair = [ids[index] if index < len(ids) else None for ids in (ours, theirs)]
    texts = [None if token is None else engine.tokenizer.decode([token]) for token in pair]
    chances = _probabilities(engine, prompt, ours[:index])
    known = [None if token is None else float(chances[token]) for token in pair]
    return Difference(index, texts[0], texts[1], known[0], known[1])


def _probabilities(engine: Engine, prompt: Tensor, prefix: list[int]) -> Tensor:
    """The clean target's distribution after a prompt [T] and a prefix: [V]."""
    import torch

    from dropmatch.decoding.cached_model import CachedModel

    ids = torch.cat([prompt, prompt.new_tensor(prefix)])
    with torch.inference_mode():
        return CachedModel(engine.model).extend(ids, keep=1)[0].float().softmax(dim=-1)
