"""The plugin in vLLM beside scheduling, refusals and metrics, and in engines that draft otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_support as support
import pytest
import torch
from engine_support import L, ask, counts, ids, params, stream

from dropmatch.acceptance import judge
from dropmatch.engines.vllm import hooks, rows

vllm = pytest.importorskip("vllm")
VLLMValidationError = pytest.importorskip("vllm.exceptions").VLLMValidationError

pytestmark = pytest.mark.real_models
REPEATS = "Repeat this list three times: red apple, green pear, blue plum, red apple, green pear, blue plum."
JS = ("js", {"dropout": 0.1})


def test_chunked_prefill_and_prefix_caching_change_nothing(llm: Any, hf: Any, prompts: list[list[int]]) -> None:
    """A prompt of several chunks, alone, from the cache, and beside requests that are decoding."""
    question = "Summarise: " + " ".join(f"On day {i} the ship met {i + 2} whales in the cold sea." for i in range(30))
    long = support.encode(hf, question)
    assert support.CHUNK < len(long) < 700
    llm.reset_prefix_cache()
    request = params(*JS, seed=4, max_tokens=24)
    runs = [llm.generate({"prompt_token_ids": long}, request, use_tqdm=False)[0] for _ in range(2)]
    assert [bool(run.num_cached_tokens) for run in runs] == [False, True]
    llm.reset_prefix_cache()
    beside = ask(llm, [prompts[0], long, prompts[2]], [params(), request, params(*JS, seed=5)])[1]
    first = runs[0].outputs[0]
    for other in (runs[1].outputs[0], beside):
        assert ids(other) == ids(first)
        assert counts(other) == counts(first)
    assert counts(first)["lossy_tokens"] > 0
    tokens, reasons, _ = support.from_hf(hf, long, first, rule="js", seed=4, dropout=0.1)
    if support.check_same(hf, long, tokens, ids(first)):
        assert counts(first)["accepted_by_reason"] == reasons


def test_seeded_sampling_survives_a_chunked_prompt(llm: Any, hf: Any, prompts: list[list[int]]) -> None:
    """vLLM 0.32.0 rewinds the generator of a request that is not yet through its prompt, which a CPU's cannot."""
    long = support.encode(hf, "Summarise: " + " ".join(f"Ship {i} met {i + 3} whales at sea." for i in range(45)))
    assert support.CHUNK < len(long) < 700
    request = params(*JS, seed=4, temperature=0.8, max_tokens=16)
    llm.reset_prefix_cache()
    alone = ask(llm, [long], request)[0]
    llm.reset_prefix_cache()
    beside = ask(llm, [prompts[0], long], [params(), request])[1]
    assert ids(beside) == ids(alone)


def test_aborts_leave_other_requests_alone(llm: Any, prompts: list[list[int]]) -> None:
    """Some leave in mid-generation; the others say what they say alone, and only what was delivered is counted."""
    requests = {
        "stays": (prompts[2], params(*JS, seed=1)),
        "goes": (prompts[3], params("naive", seed=2)),
        "goes early": (prompts[0], params(*JS, seed=3)),
        "samples": (prompts[1], params(*JS, seed=4, temperature=0.8)),
    }
    stay = ("stays", "samples")
    alone = {name: stream(llm, {name: requests[name]})[name] for name in stay}
    before = support.prometheus()
    found = stream(llm, requests, abort={"goes": 12, "goes early": 1})
    after = support.prometheus()
    for name in stay:
        assert found[name].ids == alone[name].ids
        assert counts(found[name].last) == counts(alone[name].last)
    assert 12 <= len(found["goes"].ids) < 12 + L + 1
    drafts = sum(value - before[key] for key, value in after.items() if key[0] == "dropmatch:drafts_total")
    assert drafts == sum(len(one.blocks) - 1 for one in found.values())


def test_prometheus_counts_what_was_delivered(llm: Any, prompts: list[list[int]]) -> None:
    before = support.prometheus()
    requests = [params(*JS, seed=1, max_tokens=23), params("naive", max_tokens=9), params(max_tokens=17)]
    outputs = ask(llm, prompts[1:4], requests)
    grown = support.prometheus()
    grown.subtract(before)
    for output in outputs:
        found = counts(output)
        rule = found["rule"]
        assert grown["dropmatch:drafts_total", rule, "", ""] == found["rounds"]
        assert grown["dropmatch:draft_tokens_total", rule, "", ""] == found["draft_tokens"]
        accepted = {key: n for key, n in grown.items() if key[0] == "dropmatch:accepted_tokens_total" and n}
        assert {key[2]: n for key, n in accepted.items() if key[1] == rule} == found["accepted_by_reason"]
        lossy = sum(n for key, n in accepted.items() if key[1] == rule and key[3] == "true")
        assert lossy == found["lossy_tokens"]


BAD = [
    ({"dropmatch": "foo"}, "unknown rule 'foo'"),
    ({"dropmatch": 1}, "unknown rule 1"),
    ({"dropmatch": "js", "dropmatch_heads": 0}, "heads"),
    ({"dropmatch": "js", "dropmatch_heads": 2.5}, "heads"),
    ({"dropmatch": "js", "dropmatch_dropout": 1}, r"dropout .*\[0, 1\)"),
    ({"dropmatch": "naive", "dropmatch_dropout": -0.1}, r"dropout .*\[0, 1\)"),
    ({"dropmatch": {"rule": "js"}}, "rule"),
    ({"dropmatch": "js", "dropmatch_dropout": {"p": 0.1}}, "dropout must be a single value"),
    ({"dropmatch": "js", "dropmatch_hedas": 3}, "unknown key 'dropmatch_hedas'"),
    ({"dropmatchrule": "js"}, "unknown key 'dropmatchrule'"),
    ({"dropmatch_heads": 3}, "dropmatch_heads has no effect while dropmatch is off"),
    ({"dropmatch": "off", "dropmatch_heads": 3}, "dropmatch_heads has no effect while dropmatch is off"),
]


def test_bad_settings_are_refused_by_name_and_others_go_on(llm: Any, prompts: list[list[int]]) -> None:
    """Case 28: each while another request is under way, which says what it says alone."""
    from vllm.sampling_params import RequestOutputKind

    good = params(*JS, seed=1, max_tokens=20)
    alone = ask(llm, [prompts[2]], good)[0]
    core = llm.llm_engine
    under_way = good.clone()
    under_way.output_kind = RequestOutputKind.FINAL_ONLY
    core.add_request("good", {"prompt_token_ids": prompts[2]}, under_way)
    core.step()
    for extra_args, message in BAD:
        with pytest.raises(VLLMValidationError, match=message):
            core.add_request("bad", {"prompt_token_ids": prompts[0]}, params().__class__(extra_args=extra_args))
    finished: list[Any] = []
    while core.has_unfinished_requests():
        finished += core.step()
    assert [one.request_id for one in finished] == ["good"]
    assert ids(finished[0].outputs[0]) == ids(alone)


@pytest.mark.parametrize(
    ("additional", "draft_method", "message"),
    [
        ({"rule": "foo"}, "model", "additional-config: dropmatch: unknown rule 'foo'"),
        ({"rule": "js", "heads": 0}, "model", "additional-config: dropmatch: heads"),
        ({"rule": "js", "dropout": 1.0}, "model", "additional-config: dropmatch: dropout"),
        ({"rule": "js", "hedas": 3}, "model", "unknown option 'hedas'"),
        ({"heads": 3}, "model", "sets heads but no rule"),
        ("js", "model", "must hold settings"),
        ({"rule": "js"}, "ngram", "rule 'js' compares distributions, and the draft method 'ngram'"),
        ({"rule": "naive"}, None, "this engine drafts nothing"),
    ],
)
def test_bad_defaults_keep_an_engine_from_starting(
    target: Path, draft: Path, additional: Any, draft_method: str | None, message: str
) -> None:
    """Case 28, for --additional-config."""
    chosen = draft if draft_method == "model" else draft_method
    with pytest.raises(ValueError, match=message):
        support.start(target, chosen, additional_config={"dropmatch": additional})


@pytest.fixture(scope="module")
def off(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers with the rule off."""
    return [ids(o) for o in ask(llm, prompts, params(max_tokens=48, ignore_eos=True))]


class TestScarceBlocksAndProbabilisticDrafts:
    """One engine with few KV blocks, probabilistic drafts, and js by default."""

    @pytest.fixture(scope="class")
    def tight(self, target: Path, draft: Path) -> Iterator[Any]:
        with support.engine(
            target,
            draft,
            speculative={"draft_sample_method": "probabilistic"},
            additional_config={"dropmatch": {"rule": "js", "dropout": 0.1}},
            max_model_len=256,
            block_size=32,
            num_gpu_blocks_override=11,
        ) as made:
            yield made

    def test_default_rule_works_and_a_request_overrides_it(
        self, tight: Any, llm: Any, prompts: list[list[int]], off: list[list[int]]
    ) -> None:
        chosen = [params(max_tokens=32, seed=3), params("off", max_tokens=32), params("naive", max_tokens=32)]
        default, none, naive = (ask(tight, [prompts[2]], [one])[0] for one in chosen)
        assert [counts(o)["rule"] for o in (default, none, naive)] == ["js", "off", "naive"]
        explicit = ask(llm, [prompts[2]], params(*JS, max_tokens=32, seed=3))[0]
        assert (ids(default), counts(default)) == (ids(explicit), counts(explicit))
        assert counts(default)["lossy_tokens"] > 0
        assert ids(none) == off[2][:32]
        assert counts(none)["lossy_tokens"] == 0
        only_option = params().__class__(temperature=0, max_tokens=32, extra_args={"dropmatch_dropout": 0.0})
        assert ids(ask(tight, [prompts[2]], only_option)[0]) == off[2][:32]

    def test_preempted_requests_say_what_they_would_have_said(
        self, tight: Any, hf: Any, prompts: list[list[int]], off: list[list[int]]
    ) -> None:
        """Off and p=0: the same text. A lossy rule: after a resumption rounds begin elsewhere, so each block is
        compared with the round that transformers comes to from the same prefix."""
        options = {"max_tokens": 48, "ignore_eos": True}
        requests = {
            "off": (prompts[0], params("off", **options)),
            "p=0": (prompts[1], params("js", {"dropout": 0.0}, **options)),
            "lossy": (prompts[2], params(*JS, seed=6, **options)),
            "last": (prompts[3], params(*JS, seed=7, **options)),
        }
        before = preemptions(tight)
        found = stream(tight, requests)
        assert preemptions(tight) > before
        assert found["off"].ids == off[0]
        assert found["p=0"].ids == off[1]
        assert all(len(one.ids) == 48 for one in found.values())
        resumed = check_rounds(hf, prompts[3], found["last"].blocks, seed=7)
        assert resumed, "it was not preempted between its rounds: nothing was tested"

    def test_sampling_from_probabilistic_drafts(
        self, tight: Any, hf: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """js at temperature 0.5 is shown the logits of both models before temperature, although vLLM divides the
        draft's in place. (vLLM does not seed probabilistic drafts, so no text is reproducible.)"""
        seen: list[Any] = []

        def watched(evidence: Any, *more: Any) -> Any:
            seen.append(evidence)
            return judge(evidence, *more)

        monkeypatch.setattr(rows, "judge", watched)
        requests = [params(*JS, seed=s, temperature=0.5, max_tokens=24, ignore_eos=True) for s in (11, 12)]
        outputs = ask(tight, prompts[1:3], requests)
        assert seen
        models = (hf.model, hf.drafter.model)
        with torch.inference_mode():
            wanted = {
                request.seed: [model(input_ids=torch.tensor([prompt + ids(o)])).logits[0] for model in models]
                for request, prompt, o in zip(requests, prompts[1:3], outputs, strict=True)
            }
        lengths = {r.seed: len(p) + 24 for r, p in zip(requests, prompts[1:3], strict=True)}
        compared = 0
        for evidence in seen:
            asked: set[int] = set()
            for i, (seed, position) in enumerate(zip(evidence.seeds.tolist(), evidence.positions.tolist())):
                first = seed not in asked  # what is behind it in its draft may have another prefix than the text
                asked.add(seed)
                if first and position < lengths[seed]:  # else its prefix was cut off by the budget
                    clean, draft = (logits[position - 1] for logits in wanted[seed])
                    torch.testing.assert_close(evidence.clean_logits[i].float(), clean, atol=5e-3, rtol=1e-4)
                    torch.testing.assert_close(evidence.draft_logits[i].float(), draft, atol=5e-3, rtol=1e-4)
                    compared += 1
        assert compared > 3
        reasons = [counts(o)["accepted_by_reason"] for o in outputs]
        assert all(set(found) <= {"js", "majority", "sampled"} for found in reasons)
        assert all(any("js" in found for found in reasons) and found["sampled"] for found in reasons)

    def test_a_greedy_request_beside_sampling_ones_is_as_alone(self, tight: Any, prompts: list[list[int]]) -> None:
        """Case 10, with probabilistic drafts: the batch is no longer all greedy, its drafts still are."""
        greedy = params(*JS, seed=3, max_tokens=32)
        alone = ask(tight, [prompts[2]], greedy)[0]
        heat = params(seed=1, temperature=0.7, max_tokens=32)
        beside = ask(tight, [prompts[0], prompts[2], prompts[1]], [heat, greedy, heat])[1]
        assert ids(beside) == ids(alone)
        assert counts(beside) == counts(alone)
        assert set(counts(alone)["accepted_by_reason"]) >= {"exact", "js"}


def preemptions(llm: Any) -> int:
    """So far."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def check_rounds(hf: Any, prompt: list[int], blocks: list[list[int]], seed: int) -> int:
    """Each block is a round of transformers from the same prefix, or one clean token after a resumption; how many
    of those there were."""
    resumed = 0
    prefix = prompt + blocks[0]
    for block in blocks[1:-1]:
        rounds = hf.stream(prefix, rule="js", dropout=0.1, seed=seed, draft_length=L, max_tokens=32, ignore_eos=True)
        wanted = [token.id for token in next(rounds)]
        rounds.close()
        if block != wanted:
            plain = hf.generate(prefix, draft_length=0, max_tokens=1, ignore_eos=True).token_ids
            assert (
                block == plain
                or min(support.margin(model, prefix + common(block, wanted)) for model in (hf.model, hf.drafter.model))
                < support.TINY_MARGIN
            ), f"{block} after {len(prefix)} tokens; transformers: {wanted}"
            resumed += block == plain
        prefix = prefix + block
    return resumed


def common(left: list[int], right: list[int]) -> list[int]:
    """The beginning that two lists share."""
    n = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:n]


def test_eagle3_drafts_naive_works_and_js_is_refused(
    target: Path, tmp_path: Path, prompts: list[list[int]], off: list[list[int]]
) -> None:
    """Case 7: a random EAGLE-3 head whose small vocabulary is mapped to the target's."""
    write_eagle3(target, tmp_path, sorted(set(off[0] + off[1])))
    with support.engine(target, tmp_path, speculative={"method": "eagle3"}) as eagle:
        plain = params(max_tokens=48, ignore_eos=True)
        naive = params(
            "naive", {"dropout": 0.9, "heads": 64, "token_floor": 0.0}, seed=1, max_tokens=48, ignore_eos=True
        )
        nothing = params("naive", {"dropout": 0.0}, max_tokens=48, ignore_eos=True)
        outputs = ask(eagle, [prompts[0], prompts[1], prompts[1]], [plain, naive, nothing])
        assert ids(outputs[0]) == off[0]
        assert ids(outputs[2]) == off[1]
        assert counts(outputs[1])["lossy_tokens"] > 0
        with pytest.raises(
            VLLMValidationError, match="rule 'js' compares distributions, and the draft method 'eagle3'"
        ):
            ask(eagle, [prompts[0]], params("js"))


def write_eagle3(target: Path, folder: Path, vocabulary: list[int]) -> None:
    """A random EAGLE-3 checkpoint for a target; its draft vocabulary is these ids of the target's."""
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    d, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width, inner, n = d // heads, 2 * d, len(vocabulary)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "draft_vocab_size": n,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "midlayer.self_attn.q_proj": (heads * width, 2 * d),
        "midlayer.self_attn.k_proj": (kv * width, 2 * d),
        "midlayer.self_attn.v_proj": (kv * width, 2 * d),
        "midlayer.self_attn.o_proj": (d, heads * width),
        "midlayer.mlp.gate_proj": (inner, d),
        "midlayer.mlp.up_proj": (inner, d),
        "midlayer.mlp.down_proj": (d, inner),
        "fc": (d, 3 * d),
        "lm_head": (n, d),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {f"{k}.weight": torch.randn(s, generator=generator) / s[1] ** 0.5 for k, s in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(d) for name in norms}
    weights["d2t"] = torch.tensor(vocabulary) - torch.arange(n)
    save_file(weights, folder / "model.safetensors")


def test_ngram_drafts_naive_works_and_js_is_refused(
    target: Path, hf: Any, prompts: list[list[int]], off: list[list[int]]
) -> None:
    """Naive as the default; rounds without drafts among those with (case 27); off is as with a draft model.

    vLLM needs numba for ngram, and once that is loaded vLLM 0.32.0 starts no other engine in the process: looking
    for kernels it takes whatever calls itself `__dict__` for a dictionary, and llvmlite has an object with every
    attribute there is.
    """
    ffi = pytest.importorskip("llvmlite.binding.ffi")
    ffi._lib_fn_wrapper.get = lambda self, name: None
    prompt = support.encode(hf, REPEATS)
    with support.engine(target, "ngram", additional_config={"dropmatch": {"rule": "naive", "dropout": 0.5}}) as ngram:
        requests = [params(seed=1), params("off", max_tokens=48, ignore_eos=True), params(seed=1, temperature=1.0)]
        outputs = ask(ngram, [prompt, prompts[0], prompt], requests)
        assert [counts(o)["rule"] for o in outputs] == ["naive", "off", "naive"]
        assert ids(outputs[1]) == off[0]
        assert sum(counts(o)["lossy_tokens"] for o in outputs) > 0
        assert ids(ask(ngram, [prompt], requests[:1])[0]) == ids(outputs[0])
        with pytest.raises(VLLMValidationError, match="rule 'js' compares distributions, and the draft method 'ngram'"):
            ask(ngram, [prompt], params("js"))
        assert ids(ask(ngram, [prompts[0]], [requests[1]])[0]) == off[0]


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.check_version()
    monkeypatch.setattr(hooks, "SUPPORTED", "0.99")
    with pytest.raises(hooks.UnsupportedVLLM, match=r"another version.*works with vLLM 0\.99\.x.*VLLM_PLUGINS"):
        hooks.check_version()


def test_a_changed_vllm_is_refused_before_anything_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature, a field or a call that the plugin relies on is no longer there."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker import gpu_model_runner

    hooks.check_front_end()
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "update_from_output", lambda self, output: None)
        with pytest.raises(hooks.UnsupportedVLLM, match="takes self, output, not self, scheduler_output, model_runner"):
            hooks.check_front_end()
    hooks.check_worker()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_model_runner, "ExecuteModelState", SimpleNamespace(_fields=("scheduler_output", "logits")))
        with pytest.raises(hooks.UnsupportedVLLM, match="ExecuteModelState has no field spec_decode_metadata"):
            hooks.check_worker()
    with monkeypatch.context() as patch:
        patch.setattr(RejectionSampler, "forward", lambda self, metadata, draft_probs, logits, sampling_metadata: None)
        with pytest.raises(hooks.UnsupportedVLLM, match="no longer calls rejection_sample"):
            hooks.check_worker()
