"""The engine as a model of lm-evaluation-harness, against transformers and the harness's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_support import chat_tokenizer, gsm8k_rows, harness_run, templated, write

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra: eval)")

from lm_eval.api.instance import Instance

from dropmatch import Engine
from dropmatch.drafting import DraftModel, PromptLookup
from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_model import DropMatchLM, decoding_options

TEXTS = ["the sea is wide", "ab", "the other theory, then"]
TASK = """
task: short
dataset_path: json
test_split: test
output_type: generate_until
doc_to_text: "{question}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 9, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def build(tiny: Any, family: str = "llama", drafter: str | None = "model", **overrides: Any) -> Engine:
    """A tiny engine on bytes."""
    tokenizer = chat_tokenizer(tiny)
    model = tiny.build_model(family, vocab_size=len(tokenizer), **overrides)
    drafters = {"model": lambda: DraftModel(tiny.perturb(model, 0.05)), "lookup": PromptLookup, None: lambda: None}
    return Engine(model, tokenizer, drafters[drafter]())


def asks(contexts: list[str], **arguments: Any) -> list[Instance]:
    """Requests for texts."""
    return [Instance("generate_until", {}, (context, dict(arguments)), i) for i, context in enumerate(contexts)]


def pairs(*texts: tuple[str, str]) -> list[Instance]:
    """Requests for likelihoods."""
    return [Instance("loglikelihood", {}, each, i) for i, each in enumerate(texts)]


def own_model(engine: Engine, **options: Any) -> Any:
    """The harness's model on the same weights."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, backend="causal", device="cpu", **options)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_strict_texts_are_those_of_plain_greedy_decoding(tiny: Any, drafter: str) -> None:
    engine = build(tiny, drafter=drafter)
    model = DropMatchLM(engine, rule="strict")
    requests = asks(TEXTS, until=["zz"], max_gen_toks=30, do_sample=False)
    found = model.generate_until(requests, disable_tqdm=True)
    for text, continuation in zip(TEXTS, found, strict=True):
        ids = torch.tensor(engine.tokenizer.encode(text))
        plain = engine.tokenizer.decode(tiny.plain_generate(engine.model, ids, 30), skip_special_tokens=True)
        assert continuation == plain.split("zz")[0]
    assert model.statistics.generated > 30
    assert model.statistics.rounds


def test_texts_are_those_of_the_harness_own_model(tiny: Any) -> None:
    engine = build(tiny)
    expected = own_model(engine).generate_until(asks(TEXTS, until=["k"], max_gen_toks=20), disable_tqdm=True)
    found = DropMatchLM(engine, rule="strict").generate_until(asks(TEXTS, until=["k"], max_gen_toks=20))
    assert found == expected
    assert all("k" not in text for text in found)


def test_each_request_has_its_own_arguments(tiny: Any) -> None:
    engine = build(tiny)
    model = DropMatchLM(engine, rule="strict", max_gen_toks=6)
    (long,) = model.generate_until(asks(TEXTS[:1], max_new_tokens=24))
    stop = next(c for c in long if c.isascii() and c.isprintable())
    requests = [*asks(TEXTS[:1]), *asks(TEXTS[:1], max_gen_toks=12), *asks(TEXTS[:1], until=stop, max_gen_toks=24)]
    by_default, twelve, stopped = model.generate_until(requests)
    assert stopped == long.split(stop)[0]
    ids = torch.tensor(engine.tokenizer.encode(TEXTS[0]))
    plain = tiny.plain_generate(engine.model, ids, 12)
    assert (by_default, twelve) == tuple(engine.tokenizer.decode(plain[:n], skip_special_tokens=True) for n in (6, 12))


def test_long_prompts_lose_their_beginning_as_with_the_harness_own_model(tiny: Any) -> None:
    engine = build(tiny, max_position_embeddings=64)
    requests = asks(["the sea " * 20], until=[], max_gen_toks=16)
    expected = own_model(engine).generate_until(requests, disable_tqdm=True)
    assert DropMatchLM(engine, rule="strict").generate_until(requests) == expected
    with pytest.raises(SettingError, match="max_gen_toks=64 leaves no room"):
        DropMatchLM(engine, rule="strict").generate_until(asks(["a"], max_gen_toks=64))


def test_sampled_repeats_differ_and_can_be_had_again(tiny: Any) -> None:
    model = DropMatchLM(build(tiny), rule="strict", seed=3)
    requests = asks(TEXTS[:1] * 3, max_gen_toks=20, do_sample=True, temperature=1.0, top_p=0.9)
    found = model.generate_until(requests)
    assert len(set(found)) > 1
    assert model.generate_until(requests) == found
    greedy = model.generate_until(asks(TEXTS[:1], max_gen_toks=20, do_sample=False, temperature=0.7))
    assert greedy == model.generate_until(asks(TEXTS[:1], max_gen_toks=20))


@pytest.mark.parametrize("arguments", [{"num_beams": 4}, {"penalty_alpha": 0.6}, {"repetition_penalty": 1.2}])
def test_arguments_that_cannot_be_honoured_are_refused_before_decoding(tiny: Any, arguments: dict[str, Any]) -> None:
    model = DropMatchLM(build(tiny), rule="strict")
    with pytest.raises(SettingError, match=f"{next(iter(arguments))}=.*none of this engine's"):
        model.generate_until([*asks(TEXTS[:1]), *asks(TEXTS[:1], **arguments)])
    assert model.statistics.generated == 0
    assert model.generate_until(asks(TEXTS[:1], max_gen_toks=2, num_beams=1, use_cache=True))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
def test_likelihoods_are_those_of_the_harness_own_model(tiny: Any, family: str) -> None:
    engine = build(tiny, family)
    requests = pairs(
        ("the sea", " is"),
        ("the sea", " is wide and the"),
        ("the sea", "x"),
        ("the ", "theory"),  # the space goes to the continuation
        ("", "then the sea"),
        ("the sea " * 3, "is wide"),
    )
    expected = own_model(engine).loglikelihood(requests, disable_tqdm=True)
    found = DropMatchLM(engine, rule="strict").loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-4, abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_likeliest_tokens_are_told(tiny: Any) -> None:
    engine = build(tiny)
    context = engine.tokenizer.encode("the sea")
    greedy = tiny.plain_generate(engine.model, torch.tensor(context), 5)
    other = [*greedy[:4], (greedy[4] + 1) % 100 + 3]
    requests = [(None, context, greedy), (None, context, other), (None, context, greedy[:1]), (None, context, [])]
    expected = own_model(engine)._loglikelihood_tokens(requests[:3], disable_tqdm=True)
    found = DropMatchLM(engine, rule="strict")._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False, True, True]
    assert [total for total, _ in found[:3]] == pytest.approx([total for total, _ in expected], rel=1e-4)
    assert found[3][0] == 0.0


def test_likelihoods_beyond_the_context_are_those_of_the_harness_own_model(tiny: Any) -> None:
    engine = build(tiny, max_position_embeddings=32)
    requests = pairs(("the sea " * 9, " is wide"), ("ab" * 40, "c"))
    expected = own_model(engine).loglikelihood(requests, disable_tqdm=True)
    found = DropMatchLM(engine, rule="strict").loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-4)


def test_rolling_likelihoods_are_those_of_the_harness_own_model(tiny: Any) -> None:
    engine = build(tiny, max_position_embeddings=16)
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("the sea is wide " * 5, "ab", "the")]
    expected = own_model(engine).loglikelihood_rolling(requests, disable_tqdm=True)
    found = DropMatchLM(engine, rule="strict").loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-4)


def test_chat_templates(tiny: Any) -> None:
    engine = build(tiny)
    model = DropMatchLM(engine, rule="strict")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(messages) == templated(engine.tokenizer, messages)
    assert model.apply_chat_template(messages).endswith("<assistant>")
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    assert model.apply_chat_template(messages) == "Hi"
    engine.tokenizer.chat_template = None
    with pytest.raises(SettingError, match="no chat template: leave out --apply_chat_template"):
        model.apply_chat_template(messages)


def test_a_written_out_beginning_of_text_is_not_added_again(tiny: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer(tiny)
    tokenizer.bos_token = "<unk>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", bos)])
    engine = Engine(tiny.build_model("llama", vocab_size=len(tokenizer)), tokenizer)
    model = DropMatchLM(engine, rule="strict", draft_length=0)
    assert model.tok_encode("ab")[0] == bos
    assert model.tok_encode("<unk>ab") == model.tok_encode("ab")


def test_a_rule_text_may_have_settings() -> None:
    assert decoding_options({"rule": "js:p=0.2:K=3", "draft_length": 4.0, "mask_seed": -1.0}) == {
        "rule": "js",
        "dropout": 0.2,
        "heads": 3,
        "draft_length": 4,
        "mask_seed": -1,
    }
    assert decoding_options({"rule": "js:p=0.2", "dropout": 0.2})["dropout"] == 0.2
    with pytest.raises(SettingError, match="dropout is given twice"):
        decoding_options({"rule": "js:p=0.2", "dropout": 0.3})
    with pytest.raises(SettingError, match="unknown option 'temperature'"):
        decoding_options({"temperature": 1.0})


ARGUMENTS = {
    "misspelt": (
        {"target": "t", "ruel": "js"},
        r"unknown model argument 'ruel' \(did you mean rule\?\); there are targ",
    ),
    "no target": ({"rule": "js"}, "name a model.*target="),
    "range": ({"target": "t", "draft": "d", "dropout": 1.5}, "dropout"),
    "no drafter": ({"target": "t"}, "no drafter.*draft=MODEL"),
    "needs a distribution": ({"target": "t", "draft": "prompt-lookup", "rule": "js"}, "js.*prompt-lookup"),
    "length": ({"target": "t", "draft_length": 0, "max_gen_toks": "many"}, "max_gen_toks must be an integer"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_model_arguments_are_refused_before_anything_is_loaded(case: str) -> None:
    arguments, message = ARGUMENTS[case]
    with pytest.raises(SettingError, match=message):
        DropMatchLM.create_from_arg_obj(dict(arguments), {"device": "cuda:0", "batch_size": 1})


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer on disk."""
    root = tmp_path_factory.mktemp("models")
    engine = build(tiny)
    engine.model.save_pretrained(root / "target")
    engine.tokenizer.save_pretrained(root / "target")
    return root / "target"


def test_the_harness_runs_it_by_name(tiny: Any, tmp_path: Path, folder: Path) -> None:
    data = write(tmp_path / "data.jsonl", [{"question": r["prompt"], "answer": r["answer"]} for r in gsm8k_rows()])
    own = tmp_path / "short.yaml"
    own.write_text(
        TASK.replace("{question}", "{{question}}")
        + f"dataset_kwargs: {{data_files: {{test: '{data}'}}, cache_dir: '{tmp_path}'}}\n"
    )
    arguments = f"target={folder},draft={folder},rule=naive:p=0.1:L=3,dtype=float32"
    found = harness_run("dropmatch", [str(own)], model_args=arguments, apply_chat_template=True, limit=2)
    assert len(found["samples"]["short"]) == 2
    about = found["config"]["dropmatch"]
    assert about["options"] == {"rule": "naive", "dropout": 0.1, "draft_length": 3}
    counts = about["statistics"]
    assert 0 < counts["generated"] <= 18
    assert counts["acceptance_length"] > 2  # the draft is the target
    assert counts["lossy_share"] == 0
    json.dumps(about)


def test_the_device_of_the_harness_is_a_wish(folder: Path) -> None:
    arguments = {"pretrained": str(folder), "draft_length": 0}
    model = DropMatchLM.create_from_arg_obj(arguments, {"device": "cuda:0", "batch_size": 1})
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert model.engine.drafter is None
    assert model.get_model_info()["dropmatch"]["target"] == str(folder)
    model = DropMatchLM.create_from_arg_obj(
        {"target": str(folder), "draft_length": 0, "device": "cpu"}, {"device": "x"}
    )
    assert model.device.type == "cpu"
