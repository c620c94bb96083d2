"""vLLM as a backend of the evaluation: the texts and counts of the Hugging Face engine, in batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_support as support
import pytest

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import EngineLost
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.backends.vllm import VLLM, longest
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import Runner, flat
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks import Example, following
from dropmatch.rule_text import parse_rule

RULES = (
    "strict",
    "js:p=0.1",
    "naive:p=0.2",
    "typical:threshold=0.05",
    "fly:window=1:threshold=0.05",
    "margin:threshold=0.8",
)
EXAMPLES = [
    Example(str(i), [{"role": "user", "content": question}], stop=(",", "whale"))
    for i, question in enumerate(support.QUESTIONS)
]


@pytest.fixture(scope="module")
def backend(llm: Any) -> VLLM:
    return VLLM(llm, support.L, batch=4)


@pytest.mark.parametrize("rule", RULES)
def test_a_group_is_what_the_engine_says_to_its_requests(backend: VLLM, llm: Any, hf: Any, rule: str) -> None:
    options = flat(f"{rule}:L={support.L}")
    backend.check(options)
    found = backend.generate(EXAMPLES, options, 30)
    extra = {name: value for name, value in parse_rule(rule).items() if name != "rule"}
    params = support.params(options["rule"], extra, max_tokens=30, stop=list(EXAMPLES[0].stop))
    expected = support.ask(llm, [support.encode(hf, question) for question in support.QUESTIONS], params)
    assert {output.finish for output in found.outputs} == {"stop", "length"}
    for ours, theirs in zip(found.outputs, expected, strict=True):
        assert (ours.text, ours.tokens, ours.finish) == (theirs.text, len(theirs.token_ids), theirs.finish_reason)
        # the first token is the prefill's; then each round adds a token of the target's, which a cut may take
        assert 0 <= 1 + ours.accepted + ours.rounds - ours.tokens <= 1
        # a stop string ends some requests here, whose counts vLLM's own metrics do not have
        assert sum(length * rounds for length, rounds in ours.lengths.items()) == ours.accepted > 0
        assert sum(ours.lengths.values()) == ours.rounds
        assert sum(ours.reasons.values()) == ours.accepted
        assert ours.lossy == ours.accepted - ours.reasons.get("exact", 0)
    assert found.seconds > 0
    assert (sum(output.lossy for output in found.outputs) > 0) == (rule != "strict")


def test_strict_texts_are_those_of_the_other_engine(backend: VLLM, hf: Any) -> None:
    options = flat(f"strict:L={support.L}")
    ours, theirs = (each.generate(EXAMPLES, options, 30).outputs for each in (backend, HuggingFace(hf)))
    assert [(o.text, o.tokens, o.finish) for o in ours] == [(o.text, o.tokens, o.finish) for o in theirs]


def test_the_log_likelihood_is_that_of_the_other_engine(backend: VLLM, hf: Any) -> None:
    texts = ["It has 84 eggs.", "", "The sky is a colour."]
    ours = backend.log_likelihoods(EXAMPLES[:3], texts)
    theirs = HuggingFace(hf).log_likelihoods(EXAMPLES[:3], texts)
    assert ours[1] is theirs[1] is None
    assert [ours[0], ours[2]] == pytest.approx([theirs[0], theirs[2]], abs=1e-3)


def test_a_message_of_the_assistants_is_continued(backend: VLLM, hf: Any) -> None:
    messages = [*EXAMPLES[0].prompt, {"role": "assistant", "content": "7 times 12 is"}]  # type: ignore[list-item]
    example = Example("x", messages)  # type: ignore[arg-type]
    options = flat(f"strict:L={support.L}")
    ours, theirs = (each.generate([example], options, 8).outputs[0] for each in (backend, HuggingFace(hf)))
    assert ours.text == theirs.text


LATER = Example(
    "0#2",
    [*EXAMPLES[0].prompt, {"role": "user", "content": "And how many would be left?"}],  # type: ignore[list-item]
    after=("0",),
)


def test_a_later_turn_follows_the_replies_before_it(backend: VLLM, llm: Any, hf: Any) -> None:
    options, reply = flat(f"strict:L={support.L}"), "There are 84 eggs."
    first, last = LATER.prompt
    messages = [first, {"role": "assistant", "content": reply}, last]
    (expected,) = support.ask(llm, [hf.encode(messages).tolist()], support.params("strict", max_tokens=12))
    said = following(LATER, {"0": reply})
    ours, theirs = (each.generate([said], options, 12).outputs[0] for each in (backend, HuggingFace(hf)))
    assert ours.text == theirs.text == expected.text
    likely = [each.log_likelihoods([said], ["84 eggs are left."])[0] for each in (backend, HuggingFace(hf))]
    assert likely[0] == pytest.approx(likely[1], abs=1e-3)


def test_there_must_be_room_for_all_turns(backend: VLLM, llm: Any, hf: Any, target: Path) -> None:
    first, last = LATER.prompt
    size = hf.encode([first, {"role": "assistant", "content": "."}, last]).shape[0]
    assert longest(str(target), [([LATER], 50)]) == size + 2 * 50
    room = llm.llm_engine.vllm_config.model_config.max_model_len
    most = (room - size) // 2
    backend.check_prompts([LATER], most)
    with pytest.raises(SettingError, match=f"example 0#2: .* more than the engine's context of {room}"):
        backend.check_prompts([LATER], most + 1)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("js:L=9", "draft_length=9 cannot be had: with vLLM it is the engine's, 4"),
        (f"js:L={support.L}:draft_stop_probability=0.4", "draft_stop_probability=0.4 cannot be had"),
        (f"fly:window=4:L={support.L}", "window=4 needs at least 5 draft tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_the_first_token(
    backend: VLLM, tmp_path: Path, rule: str, message: str
) -> None:
    plan = Plan(target="t", tasks=({"name": "x"},), rules=(rule,))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=message):
        Runner(plan, [rule], [], backend, Store.__new__(Store))


def test_a_prompt_that_leaves_no_room_is_refused(backend: VLLM, llm: Any, hf: Any) -> None:
    room = llm.llm_engine.vllm_config.model_config.max_model_len
    size = hf.encode(EXAMPLES[1].prompt).shape[0]
    backend.check_prompts(EXAMPLES[1:2], room - size)
    message = (
        f"example 1: {size} tokens of its prompt and max_tokens={room} are more than the engine's context of {room}"
    )
    with pytest.raises(SettingError, match=message):
        backend.check_prompts(EXAMPLES[1:2], room)
    backend.check_prompts([replace(EXAMPLES[1], max_tokens=5)], room)


def test_the_longest_request_decides_about_the_context(target: Path, hf: Any) -> None:
    sizes = [hf.encode(example.prompt).shape[0] for example in EXAMPLES]
    short = [replace(example, max_tokens=3) for example in EXAMPLES]
    assert longest(str(target), [(short, 50), (EXAMPLES[:2], 20)]) == max(max(sizes) + 3, max(sizes[:2]) + 20)


def runner_of(llm: Any) -> Any:
    """What runs the model's steps."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def broken_at(llm: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """The third step from now on fails there, once."""
    steps, inner = iter(range(1000)), getattr(runner_of(llm), name)

    def act(*args: Any, **options: Any) -> Any:
        if next(steps) == 2:
            raise RuntimeError("out of memory")
        return inner(*args, **options)

    patch.setattr(runner_of(llm), name, act)


@pytest.mark.parametrize("where", ["execute_model", "_sample"])
def test_a_step_that_fails_leaves_nothing_for_the_next_cell(
    backend: VLLM, llm: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    options = flat(f"strict:L={support.L}")
    before = backend.generate(EXAMPLES, options, 30)
    with monkeypatch.context() as patch:
        broken_at(llm, where, patch)
        with pytest.raises(RuntimeError, match="out of memory"):
            backend.generate(EXAMPLES, options, 30)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert llm.reset_prefix_cache()  # no block is in use
    after = backend.generate(EXAMPLES[::-1], options, 30)
    assert [output.text for output in after.outputs[::-1]] == [output.text for output in before.outputs]


def test_an_engine_that_does_not_recover_is_lost(backend: VLLM, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = flat(f"strict:L={support.L}")
    try:
        with monkeypatch.context() as patch:
            broken_at(llm, "sample_tokens", patch)  # without which the next step refuses to begin
            with pytest.raises(EngineLost, match="RuntimeError: out of memory"):
                backend.generate(EXAMPLES, options, 30)
            with pytest.raises(EngineLost, match="State error"):
                backend.log_likelihoods(EXAMPLES[:1], ["It has 84 eggs."])
    finally:
        runner_of(llm).execute_model_state = None
        assert backend._recovers()


def test_as_many_outputs_as_prompts_must_come(backend: VLLM, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = llm.generate
    with monkeypatch.context() as patch:
        patch.setattr(llm, "generate", lambda prompts, *rest, **more: inner(prompts, *rest, **more)[:3])
        with pytest.raises(RuntimeError, match="vLLM gave 3 outputs for 4 prompts"):
            backend.generate(EXAMPLES, flat(f"strict:L={support.L}"), 4)
