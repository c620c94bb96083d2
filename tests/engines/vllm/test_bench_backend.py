"""vLLM as a backend of the evaluation: the texts and counts of the Hugging Face engine, in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_support as support
import pytest

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends.hf import HuggingFace
from dropmatch.evaluation.backends.vllm import VLLM
from dropmatch.evaluation.bench.plan import Plan
from dropmatch.evaluation.bench.runner import Runner, flat
from dropmatch.evaluation.bench.store import Store
from dropmatch.evaluation.tasks import Example

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
def test_texts_and_counts_are_those_of_the_other_engine(backend: VLLM, hf: Any, rule: str) -> None:
    options = flat(f"{rule}:L={support.L}")
    backend.check(options)
    found = backend.generate(EXAMPLES, options, 30)
    expected = HuggingFace(hf).generate(EXAMPLES, options, 30)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.text == theirs.text
        assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish)
        # a stop string ends a request here, and its counts are known all the same
        assert (ours.accepted, ours.lossy) == (theirs.accepted, theirs.lossy)
        assert {k: n for k, n in ours.reasons.items() if n} == {k: n for k, n in theirs.reasons.items() if n}
        assert sum(length * rounds for length, rounds in ours.lengths.items()) == ours.accepted
    assert found.seconds > 0


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
