"""The Hugging Face engine as a model of lm-evaluation-harness: `--model dropmatch`."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dropmatch.acceptance import get_rule
from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig, split_options
from dropmatch.decoding.cached_model import CachedModel
from dropmatch.decoding.statistics import Statistics
from dropmatch.engines.hf.engine import Engine, check_acceptance
from dropmatch.environment import versions
from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_library import require
from dropmatch.evaluation.tasks.harness_configs import BUDGETS, budget_of, samples, stops_of
from dropmatch.models.names import NO_DRAFT, PROMPT_LOOKUP
from dropmatch.rule_text import parse_rule

require()

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402

LOADING = ("target", "draft", "dtype", "device", "draft_weights", "trust_remote_code")
LENGTHS = ("max_gen_toks", "max_length")
DECODING = tuple(field.name for kind in (AcceptanceConfig, DraftConfig) for field in fields(kind))
TARGET_TOO = "pretrained"  # what the harness calls it, and names the folder of results by
_IGNORED = ("batch_size", "max_batch_size", "parallelize")
_GREEDY = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "use_cache": True}
_SAMPLING = ("temperature", "top_k", "top_p")
DEFAULT_LENGTH, DEFAULT_BUDGET = 2048, 256  # as the harness has them
CHUNK = 64  # rows of logits that are normalised at once


@register_model("dropmatch")
class DropMatchLM(TemplateLM):
    """A target with its drafter, one request at a time.

    Args:
        engine: the models.
        max_gen_toks: the most tokens of requests that do not say.
        max_length: the most tokens of prompt and text together; None takes the model's. Longer prompts lose their
            beginning, as with the harness's own models.
        seed: of requests that sample; each takes the next one, so that repeated ones differ.
        name: the target's, for reports.
        **options: fields of `AcceptanceConfig` and `DraftConfig`; `rule` may be a rule's text (js:p=0.2).

    Attributes:
        statistics: counts over all generated texts.

    Raises:
        SettingError: an option is unknown, out of range, or cannot be honoured with these models.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_gen_toks: int = DEFAULT_BUDGET,
        max_length: int | None = None,
        seed: int = 0,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.options = decoding_options(options)
        acceptance, drafting, _ = split_options(self.options)
        check_acceptance(acceptance, drafting, engine.drafter, engine.head)
        self.statistics = Statistics()
        self._acceptance, self._name = acceptance, name
        self._budget, self._seed = max_gen_toks, seed
        model = CachedModel(engine.model)
        self._length = max_length or model.context_length or DEFAULT_LENGTH
        draft = getattr(engine.drafter, "model", None) if drafting.draft_length else None
        draft_length = None if draft is None else CachedModel(draft).context_length
        self._room = min(self._length, draft_length or self._length)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> DropMatchLM:
        """Load the models that --model_args names; see `MODEL_ARGS`.

        Raises:
            SettingError: an argument is unknown or out of range.
            ModelError: a model cannot be found, fetched or used.
        """
        from dropmatch.engines.hf.load import load
        from dropmatch.models import default_draft

        values = {name: value for name, value in arg_dict.items() if name not in _IGNORED}
        target = values.pop(TARGET_TOO, None)
        values = {**({} if target is None else {"target": target}), **values}
        _check_names(values)
        if "target" not in values:
            raise SettingError("name a model: --model_args target=MODEL, as in target=demo:qwen2.5-coder")
        arg_dict.setdefault(TARGET_TOO, values["target"])
        decoding = {name: value for name, value in values.items() if name in DECODING}
        acceptance, drafting, _ = split_options(decoding_options(decoding))
        if drafting.draft_length:
            _check_drafter(values.get("draft") or default_draft(values["target"]), acceptance, drafting)
        else:
            values["draft"] = NO_DRAFT
        values.setdefault("device", _device((additional_config or {}).get("device")))
        rest = {name: _whole(name, value) for name, value in values.items() if name in (*LENGTHS, "seed")}
        loading = {name: value for name, value in values.items() if name in LOADING and name != "target"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries say while they load
            engine = load(values["target"], **loading)
        return cls(engine, name=values["target"], **rest, **decoding)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> DropMatchLM:
        """Likewise, from one text."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self.engine.model.device

    @property
    def max_length(self) -> int:
        """The most tokens that the target reads."""
        return self._length

    @property
    def max_gen_toks(self) -> int:
        """The most tokens of requests that do not say."""
        return self._budget

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text follows."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Tells apart prompts that the harness keeps."""
        return str(self.tokenizer.name_or_path or self._name).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages to text; without a generation prompt the last one is continued. As the harness's own models do it,
        a template that knows no system message gets none.

        Raises:
            SettingError: the model has no chat template.
        """
        import jinja2

        if not getattr(self.tokenizer, "chat_template", None):
            raise SettingError("this model's tokenizer has no chat template: leave out --apply_chat_template")
        how = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.apply_chat_template(chat_history, **how)
        except jinja2.TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(rest, **how)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Text to ids; a beginning-of-text token that is written out is not added again."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Decode each request by the rule; the text ends before the first of its stop strings.

        Raises:
            SettingError: a request has arguments that cannot be honoured.
        """
        from tqdm import tqdm

        plans = [self._plan(request.args[1], number) for number, request in enumerate(requests)]
        texts = []
        with tqdm(total=len(plans), disable=disable_tqdm, desc="Decoding") as bar:
            for request, (stops, options) in zip(requests, plans, strict=True):
                context, arguments = request.args[:2]
                room = self._room - options["max_tokens"]
                result = self.engine.generate(
                    self.tok_encode(context)[-room:], stop=stops or None, **options, **self.options
                )
                text = self.tokenizer.decode(result.token_ids, skip_special_tokens=True)
                for stop in stops:
                    text = text.split(stop)[0]
                texts.append(text)
                _add(self.statistics, result.statistics)
                self.cache_hook.add_partial("generate_until", (context, arguments), text)
                bar.set_postfix_str(self._so_far(), refresh=False)
                bar.update()
        if texts:
            print(f"dropmatch: {self._summary()}", file=sys.stderr, flush=True)
        return texts

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """For each (texts, context ids, continuation ids): log-probability under the target without dropout, and
        whether all are its likeliest tokens. Requests in a row with one context share its forward."""
        from tqdm import tqdm

        found = []
        model, cached = CachedModel(self.engine.model), list[int]()
        logits: Tensor | None = None
        for texts, context, continuation in tqdm(requests, disable=disable_tqdm, desc="Scoring"):
            ids = (context + continuation)[-(self._length + 1) :]
            start = len(ids) - len(continuation)
            if start < 1:
                raise SettingError(f"a continuation of {len(continuation)} tokens is longer than the model reads")
            if logits is None or ids[:start] != cached:
                cached, model = ids[:start], CachedModel(self.engine.model)
                logits = model.extend(self._tensor(cached), keep=1)  # [1, V]
                model.rollback(start)
            rows, tokens = logits, self._tensor(continuation)
            if len(continuation) > 1:
                more = model.extend(tokens[:-1], keep=len(continuation) - 1)
                model.rollback(start)
                rows = torch.cat([logits, more])  # [n, V]
            total, greedy = _score(rows, tokens)
            found.append((total, greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        from tqdm import tqdm

        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Scoring"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(total for total, _ in self._loglikelihood_tokens(parts, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def get_model_info(self) -> dict[str, Any]:
        """For the results' JSON: settings, versions, and what decoding came to."""
        model = self.engine.model
        return {
            "model_dtype": str(getattr(model, "dtype", "")),
            "model_num_parameters": sum(each.numel() for each in model.parameters()),
            "dropmatch": {
                "target": self._name,
                "drafter": None if self.engine.drafter is None else type(self.engine.drafter).__name__,
                "options": self.options,
                "statistics": self.statistics.as_dict(),
                "versions": versions(),
            },
        }

    def _plan(self, arguments: Mapping[str, Any], number: int) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Stop strings and sampling options of a request.

        Raises:
            SettingError: an argument cannot be honoured.
        """
        known = {"until", "do_sample", "seed", "min_new_tokens", *BUDGETS, *_SAMPLING, *_GREEDY}
        for name, value in arguments.items():
            if name not in known or (name in _GREEDY and value not in (None, _GREEDY[name])):
                raise SettingError(
                    f"generation argument {name}={value!r} is none of this engine's: leave it out of --gen_kwargs, or "
                    "use a task without it; there are until, do_sample, seed, min_new_tokens, max_gen_toks, "
                    + ", ".join(_SAMPLING)
                )
        budget = budget_of(arguments) or self._budget
        if budget >= self._room:
            raise SettingError(
                f"max_gen_toks={budget} leaves no room for a prompt: the models read {self._room} tokens"
            )
        options: dict[str, Any] = {"max_tokens": budget, "min_tokens": int(arguments.get("min_new_tokens") or 0)}
        if samples(arguments):
            given = {name: arguments[name] for name in _SAMPLING if arguments.get(name) is not None}
            seed = int(arguments.get("seed", self._seed)) + number
            options |= {"temperature": 1.0, **given, "seed": seed}
        options = _typed(options, SamplingConfig)
        SamplingConfig.from_options(options)  # refused now, not when its turn comes
        return stops_of(arguments), options

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _so_far(self) -> str:
        s = self.statistics
        return f"acceptance length {s.acceptance_length:.2f}, {s.tokens_per_second:.1f} tokens/s"

    def _summary(self) -> str:
        s = self.statistics
        reasons = ", ".join(f"{reason} {count}" for reason, count in s.reasons.most_common())
        lossy = f"lossy {s.lossy} of {s.generated} ({100 * s.lossy_share:.1f} %)"
        return f"{s.generated} tokens in {s.seconds:.1f} s, {self._so_far()}, {lossy}, accepted: {reasons or 'none'}"


def decoding_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with what a rule's text says in its place.

    Raises:
        SettingError: a name is unknown, or a setting is given both ways.
    """
    unknown = sorted(set(values) - set(DECODING))
    if unknown:
        raise SettingError(f"unknown option {unknown[0]!r}; the options are: {', '.join(DECODING)}")
    found = dict(values)
    if "rule" in found:
        for name, value in parse_rule(str(found["rule"])).items():
            if name != "rule" and found.get(name, value) != value:
                raise SettingError(f"{name} is given twice: {found[name]!r}, and {value!r} in rule={found['rule']}")
            found[name] = value
    for kind in (AcceptanceConfig, DraftConfig):
        found = _typed(found, kind)
    return found


def _typed(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Whole numbers as such where they are wanted: the harness reads -1 as -1.0."""
    whole = {field.name for field in fields(kind) if str(field.type).startswith("int")}
    return {
        name: int(value) if name in whole and isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }


def _check_names(values: Mapping[str, Any]) -> None:
    known = (*LOADING, *LENGTHS, "seed", *DECODING)
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise SettingError(f"unknown model argument {name!r}{meant}; there are {', '.join(known)}")


def _check_drafter(draft: str | None, acceptance: AcceptanceConfig, drafting: DraftConfig) -> None:
    """Refuse a rule that the drafter cannot serve before models are loaded."""
    if draft in (None, NO_DRAFT):
        raise SettingError(
            f"there is no drafter: add draft=MODEL or draft={PROMPT_LOOKUP} to --model_args, or draft_length=0 for "
            "plain decoding"
        )
    rule = get_rule(acceptance.rule)
    rule.check_drafter(draft != PROMPT_LOOKUP, PROMPT_LOOKUP)
    rule.check_window(acceptance.window, drafting.draft_length)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise SettingError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _device(asked: str | None) -> str | None:
    """The harness asks for cuda:0 unless it was told otherwise."""
    return None if asked == "cuda:0" and not torch.cuda.is_available() else asked


def _score(rows: Tensor, tokens: Tensor) -> tuple[float, bool]:
    """Sum of the log-probabilities of tokens [n] in rows of logits [n, V], and whether all are the likeliest."""
    total, greedy = 0.0, True
    for some, ids in zip(rows.split(CHUNK), tokens.split(CHUNK), strict=True):
        total += float(some.float().log_softmax(dim=1).gather(1, ids[:, None]).sum())
        greedy = greedy and bool((some.argmax(dim=1) == ids).all())
    return total, greedy


def _add(total: Statistics, more: Statistics) -> None:
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)
