"""vLLM's rejection sampler without a model: requests with scripted logits through its own sampler and CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler as vllm_sampler
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from acceptance.support import LinearHead, random_head
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm.cpu_fixes import expand
from dropmatch.engines.vllm.drafts import DraftLogits
from dropmatch.engines.vllm.install import JudgedSampler
from dropmatch.engines.vllm.reporting import Reasons
from dropmatch.engines.vllm.requests import RequestSettings
from dropmatch.engines.vllm.verifier import Verifier, judged_rejection_sample, known_uniform_probs

current_platform.import_kernels()  # what a CPU worker does when it starts
current_platform.register_triton_kernel_overrides()

VOCAB, UNITS = 40, 24
CPU = torch.device("cpu")
INF = float("inf")
HEAD = random_head(VOCAB, UNITS, 0.45)


@dataclass
class Ask:
    """A request in one step: L draft tokens, d units, V tokens."""

    name: str
    drafts: list[int]
    hidden: Tensor  # [L + 1, d]
    raw: Tensor  # [L + 1, V] raw logits, after the grammar's mask
    draft_logits: Tensor | None  # [L, V]; None was never proposed by the draft model
    start: int = 7  # index in its sequence of the last committed token
    options: dict[str, Any] = field(default_factory=dict)  # SamplingParams.extra_args
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    allowed: set[int] | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    stop: list[int] = field(default_factory=list)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)  # repetition, frequency, presence
    prompt: list[int] = field(default_factory=lambda: [3, 5])
    output: list[int] = field(default_factory=lambda: [4])
    chunk: int = 0  # rows of its prompt before those that are sampled

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed,
            min_tokens=self.min_tokens, stop_token_ids=self.stop or None, extra_args=dict(self.options) or None,
            max_tokens=100,
        )  # fmt: skip


def make_ask(name: str, ranks: Sequence[int], salt: int = 0, /, *, noise: float = 1.0, **changes: Any) -> Ask:
    """A request whose draft tokens are the target's likeliest (0), runner-up (1), ...; -1 is none."""
    generator = torch.Generator().manual_seed(salt + 77)
    head = changes.pop("head", HEAD)
    rows = len(ranks) + 1
    hidden = torch.randn(rows, head.weight.shape[1], generator=generator)
    raw = head.full(hidden)
    order = raw.argsort(dim=1, descending=True)
    drafts = [int(order[place, rank]) if rank >= 0 else -1 for place, rank in enumerate(ranks)]
    draft_logits = raw[:-1] + noise * torch.randn(rows - 1, head.vocab_size, generator=generator)
    ask = Ask(name, drafts, hidden, raw, draft_logits, start=7 + 13 * (salt % 5))
    for key, value in changes.items():
        assert hasattr(ask, key)
        setattr(ask, key, value)
    return ask


def engine(**changes: Any) -> Any:
    """What `settings` looks at of a `VllmConfig`."""
    speculative = SimpleNamespace(
        method="draft_model", use_heterogeneous_vocab=False, parallel_drafting=False,
        use_local_argmax_reduction=False, rejection_sample_method="standard", num_speculative_tokens=5,
    )  # fmt: skip
    values = {"speculative_config": speculative, "use_v2_model_runner": False, "lora_config": None}
    return SimpleNamespace(**(values | changes))


class Drafter:
    """vLLM's proposer as far as it samples; its model's logits are handed to it instead of hidden states."""

    use_local_argmax_reduction = use_heterogeneous_vocab = use_fp64_gumbel = False
    _greedy_sample = SpecDecodeBaseProposer._greedy_sample
    _sample_from_logits = SpecDecodeBaseProposer._sample_from_logits
    _sample_draft_tokens = SpecDecodeBaseProposer._sample_draft_tokens

    def __init__(self, probabilistic: bool) -> None:
        self._enable_probabilistic_draft_probs = probabilistic
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden.clone())


class Runner:
    """What the plugin sees of a V1 model runner."""

    def __init__(self, asks: Sequence[Ask], probabilistic: bool = False) -> None:
        self.requests = {ask.name: SimpleNamespace(sampling_params=ask.params()) for ask in asks}
        self.input_batch = SimpleNamespace(req_ids=[ask.name for ask in asks])
        self.positions = torch.empty(0, dtype=torch.int64)
        self.drafter = Drafter(probabilistic)
        self.asks = {ask.name: ask for ask in asks}
        self.seen: list[Tensor] = []  # logits that each step's kernels left behind

    def propose_draft_token_ids(self, *args: Any) -> str:
        """L steps of the draft model over the batch; rows behind a request's own draft are fillers."""
        batch = [self.asks[name] for name in self.input_batch.req_ids]
        sampling = make_sampling(batch)
        for place in range(max((len(ask.drafts) for ask in batch), default=0)):
            rows = [
                ask.draft_logits[place]
                if ask.draft_logits is not None and place < len(ask.drafts)
                else torch.full((VOCAB,), 9.0)
                for ask in batch
            ]
            self.drafter._sample_draft_tokens(torch.stack(rows), sampling)
        return "proposed"

    def propose(self, names: Sequence[str]) -> None:
        """As after a step with these requests in the batch."""
        batch = self.input_batch.req_ids
        self.input_batch.req_ids = list(names)
        assert self.propose_draft_token_ids("scheduler output") == "proposed"
        self.input_batch.req_ids = batch


def make_sampling(
    asks: Sequence[Ask], logprobs: int | None = None, generators: dict[int, torch.Generator] | None = None
) -> SamplingMetadata:
    """vLLM's metadata as its `InputBatch` makes it."""
    heat = torch.tensor([ask.temperature for ask in asks])
    vocab = asks[0].raw.shape[1] if asks else VOCAB
    top_k = torch.tensor([ask.top_k or vocab for ask in asks], dtype=torch.int32)
    top_p = torch.tensor([ask.top_p for ask in asks])
    repetition, frequency, presence = (torch.tensor([ask.penalties[i] for ask in asks]) for i in range(3))
    plain = all(ask.penalties == (1.0, 0.0, 0.0) for ask in asks)
    prompts = torch.full((len(asks), max(len(ask.prompt) for ask in asks)), vocab)
    for i, ask in enumerate(asks):
        prompts[i, : len(ask.prompt)] = torch.tensor(ask.prompt)
    mask = torch.zeros(len(asks), vocab, dtype=torch.bool)
    for i, ask in enumerate(asks):
        if ask.allowed is not None:
            mask[i] = True
            mask[i, list(ask.allowed)] = False
    minimum = MinTokensLogitsProcessor(None, CPU, False)  # type: ignore[arg-type]
    minimum.update_state(
        BatchUpdate(len(asks), [], [(i, ask.params(), ask.prompt, ask.output) for i, ask in enumerate(asks)], [])
    )
    return SamplingMetadata(
        temperature=None if not heat.any() else heat,
        all_greedy=not heat.any(),
        all_random=bool((heat > 0).all()),
        top_p=top_p if (top_p < 1).any() else None,
        top_k=top_k if any(ask.top_k for ask in asks) else None,
        generators=generators or {},
        max_num_logprobs=logprobs,
        no_penalties=plain,
        prompt_token_ids=None if plain else prompts,
        frequency_penalties=frequency,
        presence_penalties=presence,
        repetition_penalties=repetition,
        output_token_ids=[list(ask.output) for ask in asks],
        allowed_token_ids_mask=mask if any(ask.allowed is not None for ask in asks) else None,
        bad_words_token_ids={i: ask.bad_words for i, ask in enumerate(asks) if ask.bad_words},
        logitsprocs=LogitsProcessors([minimum]),
        spec_token_ids=[list(ask.drafts) for ask in asks],
    )


def make_metadata(asks: Sequence[Ask]) -> tuple[SpecDecodeMetadata, Tensor]:
    """vLLM's metadata of a batch, and the positions of all its rows: T tokens in the step, of N + B logits."""
    positions: list[int] = []
    wanted: list[int] = []  # rows of the step that get logits
    targets: list[int] = []
    bonus: list[int] = []
    for ask in asks:
        positions += range(ask.start - ask.chunk, ask.start)
        wanted += range(len(positions), len(positions) + len(ask.drafts) + 1)
        positions += range(ask.start, ask.start + len(ask.drafts) + 1)
        targets += range(len(wanted) - len(ask.drafts) - 1, len(wanted) - 1)
        bonus.append(len(wanted) - 1)
    counts = torch.tensor([len(ask.drafts) for ask in asks], dtype=torch.int32)
    metadata = SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for ask in asks for token in ask.drafts], dtype=torch.int32),
        num_draft_tokens=counts.tolist(),
        cu_num_draft_tokens=counts.cumsum(0).int(),
        cu_num_sampled_tokens=(counts + 1).cumsum(0).int(),
        target_logits_indices=torch.tensor(targets, dtype=torch.int32),
        bonus_logits_indices=torch.tensor(bonus, dtype=torch.int32),
        logits_indices=torch.tensor(wanted, dtype=torch.int32),
    )
    return metadata, torch.tensor(positions, dtype=torch.int64)


class WatchedSampler(Sampler):
    """vLLM's sampler of bonus tokens, which remembers them and the random numbers' state after them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        sampling = kwargs["sampling_metadata"]
        self.bonus = output.sampled_token_ids.squeeze(1).tolist()
        self.state = torch.get_rng_state()
        self.states = {i: generator.get_state() for i, generator in sampling.generators.items()}
        return output


@dataclass
class Outcome:
    """What one step came to, by request."""

    tokens: dict[str, list[int]]
    report: dict[str, Reasons]
    logprobs: dict[str, list[tuple[int, float, int]]]  # of each token: its id, log-probability and rank
    bonus: list[int]
    state: Tensor  # of the global random numbers after the bonus tokens
    states: dict[int, Tensor]  # of the requests' own
    left: tuple[Tensor, dict[int, Tensor]]  # both, after the step
    target_logits: tuple[Tensor, Tensor]  # [N, V] before and after `rejection_sample`
    verifier: Verifier | None


@contextmanager
def plugged(judged: bool) -> Iterator[None]:
    """vLLM's module as `install` leaves it; without the rules, only its sampling on a CPU mended."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(vllm_sampler, "expand_batch_to_tokens", expand))
        if judged:
            stack.enter_context(patch.object(vllm_sampler, "rejection_sample", judged_rejection_sample))
            stack.enter_context(patch.object(vllm_sampler, "generate_uniform_probs", known_uniform_probs))
        yield


def make_verifier(runner: Any, head: LinearHead = HEAD, default: AcceptanceConfig | None = None) -> Verifier:
    """As `install` makes it."""
    settings = RequestSettings(runner, default, engine())
    drafts = DraftLogits(settings.any_compares)
    drafts.attach(runner)
    return Verifier(runner, head, settings, drafts)


def draft_probs_of(asks: Sequence[Ask]) -> Tensor:
    """[N, V] what a probabilistic drafter hands over."""
    rows = [
        (logits / (ask.temperature or 1.0)).softmax(dim=0)
        for ask in asks
        if ask.draft_logits is not None
        for logits in ask.draft_logits
    ]
    return torch.stack(rows) if rows else torch.empty(0, asks[0].raw.shape[1])


def run(
    asks: Sequence[Ask],
    *,
    judged: bool = True,
    probabilistic: bool = False,
    mode: str = "raw_logprobs",
    logprobs: int | None = None,
    proposed: Sequence[str] | None = None,
    rng: int = 5,
    head: LinearHead = HEAD,
    default: AcceptanceConfig | None = None,
    hidden: bool = True,
) -> Outcome:
    """One step of a batch through vLLM's rejection sampler.

    Args:
        asks: the requests, in the order of the batch.
        judged: with the rules; else vLLM's own class.
        probabilistic: the drafter hands its probabilities over.
        mode: vLLM's `logprobs_mode`.
        logprobs: how many log-probabilities are asked for.
        proposed: the requests in the order in which they were drafted; None leaves out those without draft logits.
        rng: seed of the global random numbers.
        head: the target's.
        default: the engine's settings.
        hidden: whether the runner showed hidden states; a warm-up does not.
    """
    runner = Runner(asks, probabilistic)
    generators = {i: torch.Generator().manual_seed(ask.seed) for i, ask in enumerate(asks) if ask.seed is not None}
    metadata, runner.positions = make_metadata(asks)
    logits = torch.cat([ask.raw for ask in asks])
    before = logits.clone()
    verifier = None
    with plugged(judged), torch.inference_mode():
        sampler = WatchedSampler(mode)  # type: ignore[arg-type]
        if judged:
            verifier = make_verifier(runner, head, default)
            if proposed is None:
                proposed = [ask.name for ask in reversed(asks) if ask.draft_logits is not None]
            if proposed:
                runner.propose(proposed)
            verifier.hidden = torch.cat([ask.hidden for ask in asks]) if hidden else None
            verifier.grammar = bool(logits.isneginf().any())
            rejection: RejectionSampler = JudgedSampler(verifier, sampler, None, CPU)
        else:
            rejection = RejectionSampler(sampler, None, CPU)
        inner, seen = vllm_sampler.rejection_sample, []

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            first = args[5].clone()
            drafted = args[0].clone()
            tokens = inner(*args, **kwargs)
            assert torch.equal(drafted, args[0]), "the draft tokens were overwritten"
            seen.append((first, args[5].clone()))
            return tokens

        torch.manual_seed(rng)
        with patch.object(vllm_sampler, "rejection_sample", watched):
            output = rejection(
                metadata,
                draft_probs_of(asks) if probabilistic else None,
                logits,
                make_sampling(asks, logprobs, generators),
            )
    assert torch.equal(before, logits), "the target's logits were overwritten"
    assert Verifier.active is None
    assert Verifier.uniforms is None
    tokens, lists = RejectionSampler.parse_output(
        output.sampled_token_ids, asks[0].raw.shape[1], logprobs_tensors=output.logprobs_tensors
    )
    found: dict[str, list[tuple[int, float, int]]] = {}
    if lists is not None:
        flat = list(zip(lists.logprob_token_ids[:, 0], lists.logprobs[:, 0], lists.sampled_token_ranks, strict=True))
        for ask, own in zip(asks, tokens, strict=True):
            found[ask.name] = [(int(a), float(b), int(c)) for a, b, c in flat[: len(own)]]
            flat = flat[len(own) :]
    return Outcome(
        tokens={ask.name: own for ask, own in zip(asks, tokens, strict=True)},
        report={} if verifier is None else verifier.report,
        logprobs=found,
        bonus=sampler.bonus,
        state=sampler.state,
        states=sampler.states,
        left=(torch.get_rng_state(), {i: generator.get_state() for i, generator in generators.items()}),
        target_logits=seen[0] if seen else (torch.empty(0), torch.empty(0)),
        verifier=verifier,
    )


# what should come out, row by row
