"""The V2 model runner against the Hugging Face engine, on a tiny random pair."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from dropmatch import Engine
from dropmatch.drafting import DraftModel
from dropmatch.engines.vllm.verifier_v2 import VerifierV2

VOCAB, LENGTH, TOKENS = 128, 3, 20
PROMPTS = [[5, 17, 90, 3, 44, 8], [101, 7, 7, 63], [12, 99, 31, 31, 60, 2, 77]]


def tiny(seed: int) -> Any:
    """A Llama without structure, in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A target, and a draft that is nearly it."""
    target, draft = tiny(0), tiny(0)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.12 * weight.std())
    return target, draft


@pytest.fixture(scope="module")
def llm(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The pair in vLLM, with drafts that keep their logits."""
    folder: Path = tmp_path_factory.mktemp("pair")
    for model, name in zip(pair, ("target", "draft"), strict=True):
        model.save_pretrained(folder / name)
    engine = LLM(
        str(folder / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        per_request_spec_decode_metrics="summary",
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": LENGTH,
            "draft_sample_method": "probabilistic",
        },
    )
    yield engine
    del engine
    gc.collect()


class NoText:
    """A tokenizer for tests that look at ids only."""

    eos_token_id = 1

    def decode(self, ids: Any, **_: Any) -> str:
        return "." * len(ids)


def decode(llm: Any, settings: list[dict[str, Any]], **sampling: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Token ids and counts of each prompt, all in one batch."""
    params = [
        SamplingParams(
            **{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False, **sampling},
            extra_args=each,
        )
        for each in settings
    ]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(settings)]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(out.token_ids), out.spec_decode_metrics.to_dict()["dropmatch"]) for out in outputs]


def test_it_is_the_v2_runner_that_was_installed_into(llm: Any) -> None:
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__.startswith("vllm.v1.worker.cpu.model_runner")
    assert isinstance(runner.rejection_sampler.verifier, VerifierV2)


SETTINGS: list[dict[str, Any]] = [
    {"rule": "strict"},
    {"rule": "naive", "heads": 5, "dropout": 0.3},
    {"rule": "naive", "heads": 2, "dropout": 0.1, "mask_seed": 9},
    {"rule": "js", "heads": 5, "dropout": 0.1},
    {"rule": "js", "heads": 3, "dropout": 0.3, "token_floor": 0.05},
    {"rule": "js", "heads": 5, "dropout": 0.0},
    {"rule": "js", "dropout": 0.2, "verdict": "denoised"},
    {"rule": "naive", "dropout": 0.3, "heads_mode": "gaussian"},
]


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a request's keys."""
    return {("dropmatch" if name == "rule" else f"dropmatch_{name}"): value for name, value in settings.items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_decoding_is_that_of_the_hugging_face_engine(
    llm: Any, pair: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    engine = Engine(pair[0], NoText(), DraftModel(pair[1]))
    found = decode(llm, [flat(settings)] * len(PROMPTS))
    for prompt, (ids, counts) in zip(PROMPTS, found, strict=True):
        # vLLM's prefill gives the first token, so its first draft begins one token later; and near the token
        # budget our engine drafts less, so that other positions are bonus positions there
        result = engine.generate(
            torch.tensor([*prompt, ids[0]]),
            max_tokens=TOKENS + LENGTH,
            draft_length=LENGTH,
            ignore_eos=True,
            **settings,
        )
        assert ids[1:] == result.token_ids[: TOKENS - 1]
        accepted, rounds = counts["accepted_tokens"], counts["rounds"]
        assert len(ids) - 1 <= accepted + rounds <= len(ids)
        assert (counts["lossy_tokens"] > 0) <= (result.statistics.lossy > 0)


def test_rules_share_a_batch_and_each_request_gets_what_it_gets_alone_case_10(llm: Any) -> None:
    mixed = [flat(SETTINGS[1]), {"dropmatch": "off"}, flat(SETTINGS[3])]
    together = decode(llm, mixed)
    for number, settings in enumerate(mixed):
        rest = [{"dropmatch": "off"}] * len(PROMPTS)
        rest[number] = settings
        assert decode(llm, rest)[number] == together[number]
    assert sum(counts["lossy_tokens"] for _, counts in together) > 0


def test_seeded_sampling_with_the_rule_off_or_without_dropout_is_vllms_own(llm: Any) -> None:
    sampling = {"temperature": 0.9, "seed": 4}  # top-p is a kernel that the interpreter cannot run
    off = decode(llm, [{"dropmatch": "off"}] * 3, **sampling)
    none = decode(llm, [{"dropmatch": "naive", "dropmatch_dropout": 0.0, "dropmatch_token_floor": 1.0}] * 3, **sampling)
    assert [ids for ids, _ in none] == [ids for ids, _ in off]
    assert all(counts["lossy_tokens"] == 0 for _, counts in none)


@pytest.mark.parametrize("rule", ["naive", "js"])
def test_a_lossy_rule_accepts_more_when_sampling_and_says_so(llm: Any, rule: str) -> None:
    sampling = {"temperature": 0.9, "seed": 4, "max_tokens": 40}
    off = decode(llm, [{"dropmatch": "off"}] * 3, **sampling)
    lossy = decode(llm, [{"dropmatch": rule, "dropmatch_dropout": 0.5, "dropmatch_heads": 16}] * 3, **sampling)
    assert sum(c["rounds"] for _, c in lossy) < sum(c["rounds"] for _, c in off)
    for ids, counts in lossy:
        reasons = counts["accepted_by_reason"]
        assert counts["lossy_tokens"] == sum(n for name, n in reasons.items() if name != "sampled") > 0
        # every token came from a round, or was the first, which the prefill gives
        assert len(ids) - 1 <= counts["accepted_tokens"] + counts["rounds"] <= len(ids)


def test_banned_tokens_are_never_emitted_case_5(llm: Any) -> None:
    free = decode(llm, [flat(SETTINGS[1])] * 3)
    banned = sorted({token for ids, _ in free for token in ids})[:20]
    allowed = [token for token in range(VOCAB) if token not in banned]
    found = decode(llm, [flat(SETTINGS[1]), flat(SETTINGS[3]), flat(SETTINGS[4])], allowed_token_ids=allowed)
    assert not {token for ids, _ in found for token in ids} & set(banned)


def test_eager_evaluation_is_refused_by_name_case_28(llm: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"eager.*VLLM_USE_V2_MODEL_RUNNER=0"):
        decode(llm, [{"dropmatch": "naive", "dropmatch_evaluation": "eager"}])
