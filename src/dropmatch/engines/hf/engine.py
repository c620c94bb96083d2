"""Generate text with a target and a drafter."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dropmatch.acceptance import get_rule
from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig, split_options
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.loop import Request, decode
from dropmatch.decoding.sampling import Processor, TokenChooser
from dropmatch.decoding.statistics import Statistics
from dropmatch.decoding.stopping import Criterion, StopRules
from dropmatch.decoding.text import Detokenizer, prompt_ids
from dropmatch.decoding.verify import DraftTokenTrace, Observer
from dropmatch.drafting import Drafter
from dropmatch.engines.hf.head import ModelHead
from dropmatch.engines.hf.result import GenerationResult, Token
from dropmatch.errors import SettingError
from dropmatch.heads import check_heads

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int] | Tensor

# share of judged rows where a uniform draft would pass, from which on the radius says nothing
NOISY_SHARE = 0.1
NOISY_ROWS = 16


class NoisyHeadsWarning(UserWarning):
    """The heads are so dispersed that eq. 6 accepts nearly anything."""


class HeadsModeWarning(UserWarning):
    """Heads are made in another way than was asked for, since this LM head allows no other."""


class Engine:
    """A target with its drafter. Each generation has its own caches, so streams may be interleaved (not threads).

    Args:
        model: decoder-only causal LM of transformers, in eval mode.
        tokenizer: its tokenizer.
        drafter: proposes tokens; None decodes plainly.

    Raises:
        ModelError: the model cannot be rolled back, or its LM head is of a kind that is not known.
    """

    def __init__(self, model: Any, tokenizer: Any, drafter: Drafter | None = None) -> None:
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        CachedModel(model)  # refuses what cannot be rolled back, now and not at the first prompt
        self.head = ModelHead.of(model)

    def generate(
        self,
        prompt: Prompt,
        *,
        stop: str | Sequence[str] | None = None,
        logits_processors: Sequence[Processor] = (),
        stopping_criteria: Sequence[Criterion] = (),
        logprobs: bool = False,
        trace: bool = False,
        **options: Any,
    ) -> GenerationResult:
        """Generate a continuation.

        Args:
            prompt: text (taken as it is), chat messages (through the chat template; a last one of the assistant's
                is continued), or token ids [T].
            stop: texts that end the generation; the token that completes one is kept.
            logits_processors: called with (ids [1, T], logits [1, V]) before temperature and top-k/p; what
                they ban (-inf) no rule ever accepts.
            stopping_criteria: called with (ids [1, T], None) after each token.
            logprobs: keep the log-probability of each token under the clean target.
            trace: keep the verdict on every draft token of every round.
            **options: fields of `AcceptanceConfig` (rule, heads, dropout, ...), `DraftConfig`
                (draft_length, ...) and `SamplingConfig` (temperature, seed, max_tokens, ...).

        Raises:
            SettingError: an option is unknown, out of range, or cannot be honoured; nothing was generated.
        """
        stream = self.stream(
            prompt,
            stop=stop,
            logits_processors=logits_processors,
            stopping_criteria=stopping_criteria,
            logprobs=logprobs,
            trace=trace,
            **options,
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        stop: str | Sequence[str] | None = None,
        logits_processors: Sequence[Processor] = (),
        stopping_criteria: Sequence[Criterion] = (),
        logprobs: bool = False,
        trace: bool = False,
        observer: Observer | None = None,
        **options: Any,
    ) -> GenerationStream:
        """Like `generate`, a round at a time: iterate over lists of tokens; `result` is what came so far.

        The request is checked here, not at the first iteration. `observer` is told of each draft before it is judged.
        """
        acceptance, draft, sampling = split_options(options)
        ids = self.encode(prompt)
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if any(not isinstance(text, str) or not text for text in stops):
            raise SettingError("stop must be non-empty strings")
        request = Request(
            prompt=ids,
            chooser=self._chooser(ids, sampling, logits_processors),
            stop=StopRules(
                max_tokens=sampling.max_tokens,
                eos_token_ids=frozenset() if sampling.ignore_eos else self.eos_token_ids(),
                stop_strings=stops,
                decode=lambda tokens: self.tokenizer.decode(
                    tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
                criteria=tuple(stopping_criteria),
            ),
            acceptance=acceptance,
            draft=draft,
            logprobs=logprobs,
            observer=observer,
        )
        return self.run(request, trace=trace)

    def run(self, request: Request, *, trace: bool = False) -> GenerationStream:
        """Check a prepared request and start it.

        Raises:
            SettingError: it cannot be honoured.
        """
        target = CachedModel(self.model)
        tokens, budget = request.prompt.shape[0], request.stop.max_tokens
        target.check_room(tokens + budget, "target")
        check_acceptance(request.acceptance, request.draft, self.drafter, self.head)
        drafter = self.drafter.begin() if self.drafter is not None and request.draft.draft_length else None
        if drafter is not None:
            drafter.check(tokens, budget, self.head.vocab_size)
        return GenerationStream(target, self.head, drafter, request, self.tokenizer, keep_trace=trace)

    def encode(self, prompt: Prompt) -> Tensor:
        """Prompt text, messages or ids to [T] int64 on the target's device.

        Raises:
            SettingError: the prompt is empty, or messages are given, and there is no chat template or it refuses them.
        """
        if isinstance(prompt, str):
            ids = prompt_ids(self.tokenizer, prompt)
        elif isinstance(prompt, Tensor) or hasattr(prompt, "__array__"):
            prompt = torch.as_tensor(prompt)
            if prompt.dim() == 2 and prompt.shape[0] > 1:
                raise SettingError(f"one prompt at a time: got a batch of {prompt.shape[0]}")
            ids = prompt.reshape(-1).tolist()
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = prompt_ids(self.tokenizer, cast(Messages, prompt))
        elif len(prompt) and _is_prompt(prompt[0]):
            raise SettingError(f"one prompt at a time: got a list of {len(prompt)}")
        else:
            ids = list(cast(Sequence[int], prompt))
        if not ids:
            raise SettingError("the prompt is empty: give at least one token")
        if not all(isinstance(i, int) and 0 <= i < self.head.vocab_size for i in ids):
            raise SettingError(f"prompt token ids must be integers from 0 to {self.head.vocab_size - 1}")
        return torch.tensor(ids, dtype=torch.int64, device=self.model.device)

    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, by the model's generation config and its tokenizer."""
        config = getattr(self.model, "generation_config", None)
        listed = getattr(config, "eos_token_id", None)
        ids = set(listed) if isinstance(listed, (list, tuple)) else {listed}
        ids.add(getattr(self.tokenizer, "eos_token_id", None))
        return frozenset(int(i) for i in ids if i is not None)

    def _chooser(self, ids: Tensor, sampling: SamplingConfig, processors: Sequence[Processor]) -> TokenChooser:
        """ids: [T] the prompt."""
        from transformers import (
            MinNewTokensLengthLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        constraints = list(processors)
        eos = sorted(self.eos_token_ids())
        if sampling.min_tokens and eos and not sampling.ignore_eos:
            constraints.append(
                MinNewTokensLengthLogitsProcessor(ids.shape[0], sampling.min_tokens, eos, device=str(ids.device))
            )
        warpers: list[Processor] = []
        if sampling.temperature:
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                warpers.append(TopPLogitsWarper(float(sampling.top_p)))
        return TokenChooser(tuple(constraints), tuple(warpers), bool(sampling.temperature), sampling.seed)


def check_acceptance(
    acceptance: AcceptanceConfig, draft: DraftConfig, drafter: Drafter | None, head: ModelHead
) -> None:
    """Refuse a rule that cannot be honoured with this drafter and head.

    Raises:
        SettingError: there is no drafter, the rule needs its distribution or a longer draft, or the head offers no
            rows.
    """
    rule = get_rule(acceptance.rule)
    if draft.draft_length == 0:
        return
    if drafter is None:
        raise SettingError(
            "there is no drafter: load one (draft='<model>' or draft='prompt-lookup'), or set draft_length=0 "
            "for plain decoding"
        )
    rule.check_drafter(drafter.has_distribution, type(drafter).__name__)
    rule.check_window(acceptance.window, draft.draft_length)
    if rule.needs_heads:
        told = check_heads(acceptance, head)
        if told is not None:
            warnings.warn(told, HeadsModeWarning, stacklevel=_callers_level())


def warn_if_noisy(statistics: Statistics, acceptance: AcceptanceConfig) -> None:
    """Warn the caller outside this package where eq. 6 accepted nearly anything."""
    compared, passes = statistics.compared, statistics.uniform_passes
    if compared >= NOISY_ROWS and passes >= NOISY_SHARE * compared:
        floor = acceptance.floor
        what = f"only token_floor={floor} holds tokens back there" if floor else "set token_floor (for example 0.1)"
        warnings.warn(
            f"at {passes} of {compared} judged positions even a uniform draft would have passed: the heads of this "
            f"model are too dispersed for dropout p={acceptance.dropout}. Lower dropout, or use rule 'naive'; {what}",
            NoisyHeadsWarning,
            stacklevel=_callers_level(),
        )


def _is_prompt(item: object) -> bool:
    """Whether an item of a prompt is a prompt of its own: text or ids, no single id."""
    return isinstance(item, (str, list, tuple)) or (isinstance(item, Tensor) and item.dim() > 0)


def _callers_level() -> int:
    """Stack level, for a warning of the calling function, of the first frame outside this package."""
    package, level, frame = str(Path(__file__).parents[2]), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


class GenerationStream:
    """An iterator over the tokens of each round; `result` is what came so far."""

    def __init__(
        self,
        target: CachedModel,
        head: ModelHead,
        drafter: Drafter | None,
        request: Request,
        tokenizer: Any,
        *,
        keep_trace: bool,
    ) -> None:
        self.statistics = Statistics()
        self._request, self._tokenizer = request, tokenizer
        self._text = Detokenizer(tokenizer)
        self._tokens: list[Token] = []
        self._trace: list[list[DraftTokenTrace]] | None = [] if keep_trace else None
        self._finish: tuple[str, str | int | None] | None = None
        self._blocks = decode(target, head, drafter, request, self.statistics)

    def __iter__(self) -> Iterator[list[Token]]:
        return self

    def __next__(self) -> list[Token]:
        block = next(self._blocks)
        tokens = []
        for i, token in enumerate(block.tokens):
            text = self._text.add(token)
            if block.finish is not None and i == len(block.tokens) - 1:
                text += self._text.rest()
            logprob = block.logprobs[i] if block.logprobs else None
            tokens.append(Token(token, text, block.reasons[i], not block.exact[i], logprob))
        self._tokens += tokens
        if self._trace is not None:
            self._trace.append(block.trace)
        if block.finish is not None:
            self._finish = block.finish
            warn_if_noisy(self.statistics, self._request.acceptance)
        return tokens

    def close(self) -> None:
        """Leave the stream before its end; `result` keeps what came."""
        self._blocks.close()  # type: ignore[attr-defined]

    @property
    def trace(self) -> list[list[DraftTokenTrace]]:
        """The verdicts on the draft tokens of each round so far; empty unless asked for."""
        return self._trace or []

    @property
    def result(self) -> GenerationResult:
        """What was generated so far; its finish reason is "abort" until the sequence has ended."""
        ids = [token.id for token in self._tokens]
        reason, stopped_by = self._finish or ("abort", None)
        return GenerationResult(
            text=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            token_ids=ids,
            finish_reason=reason,
            stop_reason=stopped_by,
            prompt_tokens=self._request.prompt.shape[0],
            tokens=list(self._tokens),
            statistics=self.statistics,
            trace=self._trace,
        )
