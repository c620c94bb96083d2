"""Records of real rounds: rules asked again say what they said, and what is counted is what happened."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from dropmatch import Engine
from dropmatch.config import AcceptanceConfig
from dropmatch.drafting import DraftModel, PromptLookup
from dropmatch.errors import SettingError
from dropmatch.evaluation.lab import Record, Recorder, compare, replay, settings_of
from dropmatch.evaluation.lab import recorder as recorder_module
from dropmatch.evaluation.lab.replay import probabilities
from dropmatch.rule_text import parse_rule

VOCAB = 1500  # larger than what a record keeps
RULES = (
    "js:token_floor=0",
    "naive:token_floor=0",
    "js:strictness=0.7:p=0.2:K=3:token_floor=0",
    "js:sampled:heads_mode=gaussian",
    "js:sampled:M=128",
    "naive:sampled:M=128:mask_seed=5",
    "js:denoised:token_floor=0.01",
    "typical:threshold=0.05",
    "margin:threshold=0.8",
    "fuzzy:threshold=0.2",
    "fly:window=1:threshold=0.05",
    "ensemble:weight=0.5",
    "topk",
    "threshold:threshold=0.002",
)


@pytest.fixture(scope="module")
def engine(tiny: Any) -> Engine:
    target = tiny.build_model("gemma2", vocab_size=VOCAB)  # it has a soft-cap
    return Engine(target, tiny.word_tokenizer(VOCAB), DraftModel(tiny.perturb(target, 0.08)))


def run(engine: Engine, recorder: Recorder, prompts: list[torch.Tensor], **options: Any) -> list[list[Any]]:
    """Decode and record: the trace of every round, as far as it is part of the text."""
    rounds: list[list[Any]] = []
    for seed, prompt in enumerate(prompts):
        recorder.begin(prompt)
        stream = engine.stream(prompt, trace=True, observer=recorder, seed=seed, **{"max_tokens": 50, **options})
        for tokens in stream:
            recorder.add([token.id for token in tokens])
        recorder.end()
        *before, last = stream.trace
        rounds += [entries for entries in [*before, last[: len(tokens)]] if entries]
    return rounds


@pytest.fixture(scope="module")
def recorded(tiny: Any, engine: Engine) -> tuple[Record, list[list[Any]]]:
    recorder = Recorder(engine, tokens=128, dropout_heads=True)
    rounds = run(engine, recorder, [tiny.prompt(i, 12, VOCAB) for i in range(4)], rule="strict")
    return recorder.record(target="tiny", draft="tinier"), rounds


@pytest.mark.parametrize("text", RULES)
def test_a_replayed_verdict_is_the_live_one(tiny: Any, engine: Engine, text: str, tmp_path: Path) -> None:
    recorder = Recorder(engine, tokens=128, dropout_heads=True)
    rounds = run(engine, recorder, [tiny.prompt(20 + i, 12, VOCAB) for i in range(2)], **parse_rule(text))
    recorder.record().save(tmp_path / "rounds.safetensors")
    record = Record.load(tmp_path / "rounds.safetensors")
    config = AcceptanceConfig.from_options(parse_rule(text))
    verdict = replay(record, config).verdict

    live = [entry for entries in rounds for entry in entries if not entry.exact]
    assert len(live) == len(record) > 20
    judged = 0
    for row, entry in enumerate(live):
        if entry.reason == "not reached":
            continue
        judged += 1
        assert bool(verdict.accept[row]) == entry.accepted, (row, entry)
        for ours, theirs in (
            (verdict.probability, entry.probability),
            (verdict.distance, entry.js),
            (verdict.radius, entry.radius),
            (verdict.frequency, entry.frequency),
        ):
            if theirs is not None:
                assert float(ours[row]) == pytest.approx(theirs, rel=2e-3, abs=1e-4)
    assert judged > 10
    assert int(verdict.accept.sum()) > 0


def as_of_old(record: Record) -> Record:
    """As an earlier version would have made it."""
    tensors = {name: value for name, value in record.tensors.items() if name not in ("clean_entropy", "draft_distance")}
    return Record(tensors, record.about)


def test_a_divergence_over_the_whole_vocabulary_is_the_live_one(tiny: Any, engine: Engine) -> None:
    text = "fuzzy:threshold=0.2"
    recorder = Recorder(engine, tokens=128)
    rounds = run(engine, recorder, [tiny.prompt(20 + i, 12, VOCAB) for i in range(2)], **parse_rule(text))
    record, config = recorder.record(), AcceptanceConfig.from_options(parse_rule(text))
    distance = replay(record, config).verdict.distance.tolist()
    live = [entry.js for entries in rounds for entry in entries if not entry.exact]
    assert [js for js in live if js is not None] == [distance[row] for row, js in enumerate(live) if js is not None]
    close = replay(as_of_old(record), config).verdict.distance
    gaps = [js - float(close[row]) for row, js in enumerate(live) if js is not None]
    assert min(gaps) > -1e-4
    assert max(gaps) > 1e-6  # the tokens that were not kept are taken to be alike
    assert as_of_old(record).approximates(config)
    assert not record.approximates(config)


def test_an_entropy_over_the_whole_vocabulary_is_the_live_one(tiny: Any, engine: Engine) -> None:
    recorder = Recorder(engine, tokens=64)
    prompt = tiny.prompt(51, 10, VOCAB)
    rounds = run(engine, recorder, [prompt], rule="strict")
    record = recorder.record()
    said = engine.generate(prompt, rule="strict", max_tokens=50).token_ids
    entropies, committed = [], 0
    for entries in rounds:
        for place, entry in enumerate(entries):
            if not entry.exact:
                ids = prompt.tolist() + said[:committed] + [e.token for e in entries[:place]]
                p = tiny.full_logits(engine.model, ids)[-1].double().softmax(dim=0)
                entropies.append(-float((p * p.log()).sum()))
        committed += sum(e.accepted for e in entries) + 1
    assert record.tensors["clean_entropy"].tolist() == pytest.approx(entropies, rel=1e-4)
    # a bound between the entropy of a row and what an evenly spread rest has for it tells the two apart; of a token
    # so unlikely that the bound is in range
    unlikely = record.tensors["clean"].argmin(dim=1, keepdim=True)
    record.tensors["draft_tokens"] = record.tensors["ids"].gather(1, unlikely).squeeze(1).long()
    old = as_of_old(record)
    p, _ = probabilities(record)
    log_p = old.evidence(slice(None)).clean_logits.log_softmax(dim=1)
    spread = -(log_p.exp() * log_p).sum(dim=1)  # [N]
    deltas = p * ((spread + record.tensors["clean_entropy"]) / 2).exp()
    gaps = (spread - record.tensors["clean_entropy"]).masked_fill(deltas >= 1, 0.0)
    row, delta = int(gaps.argmax()), float(deltas[gaps.argmax()])
    assert float(gaps[row]) > 1e-4
    config = AcceptanceConfig("typical", threshold=1.0, delta=delta)
    assert not bool(replay(record, config).verdict.accept[row])
    assert bool(replay(old, config).verdict.accept[row])
    assert old.approximates(config)
    assert not record.approximates(config)
    assert not old.approximates(AcceptanceConfig())


def test_what_becomes_of_the_drafts_is_what_happened(recorded: tuple[Record, list[list[Any]]]) -> None:
    record, rounds = recorded
    assert record.blocks == len(rounds)
    for text in ("js", "margin", "threshold:threshold=1.0", "threshold:threshold=0.0"):
        found = replay(record, AcceptanceConfig.from_options(parse_rule(text)))
        row, lengths, reached = 0, [], []
        for entries in rounds:
            alive, length = True, 0
            for entry in entries:
                if not entry.exact:
                    reached.append(alive)
                    alive &= bool(found.verdict.accept[row])
                    row += 1
                length += alive
            lengths.append(length)
        assert found.lengths.tolist() == lengths
        assert found.reached.tolist() == reached


@pytest.mark.parametrize("text", ["strict", "js", "naive"])
def test_what_stands_behind_the_end_of_a_text_does_not_count(
    tiny: Any, engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, config = tiny.prompt(20, 12, VOCAB), AcceptanceConfig.from_options(parse_rule(text))
    free = engine.stream(prompt, trace=True, max_tokens=60, rule=text, ignore_eos=True)
    before = list[int]()
    for tokens in free:  # up to a round that begins with a new token, and goes on with accepted and refused ones
        end, entries = tokens[0].id, free.trace[-1]
        if len(before) > 10 and end not in before and len(tokens) > 2 and not entries[-1].exact:
            break
        before += [token.id for token in tokens]
    else:
        pytest.fail("no such round")
    monkeypatch.setattr(engine, "eos_token_ids", lambda: frozenset({end}))

    recorder = Recorder(engine, tokens=64)
    recorder.begin(prompt)
    stream = engine.stream(prompt, trace=True, max_tokens=60, rule=text, observer=recorder)
    for tokens in stream:
        recorder.add([token.id for token in tokens])
    recorder.end()
    counts, record = stream.statistics, recorder.record()
    assert stream.result.stop_reason == end
    assert (record.blocks, len(record.tensors["exact"])) == (counts.rounds, counts.proposed)
    assert counts.proposed < sum(map(len, stream.trace))
    assert len(record) == len(record.about["contexts"]) == int((~record.tensors["exact"]).sum())
    found = replay(record, config)
    assert Counter(found.lengths.tolist()) == counts.lengths
    assert int((found.reached & found.verdict.accept).sum()) == counts.lossy
    if text != "strict":
        assert int(found.reached.sum()) == counts.judged
    assert compare(record, {text: config})["rules"][text]["acceptance_length"] == counts.acceptance_length


def test_strict_decoding_accepts_what_a_record_of_it_says(recorded: tuple[Record, list[list[Any]]]) -> None:
    record, rounds = recorded
    accepted = sum(entry.accepted for entries in rounds for entry in entries)
    found = compare(record, {"js": AcceptanceConfig()})
    assert found["exact_acceptance_length"] == pytest.approx(1 + accepted / len(rounds))
    assert found["rounds"] == len(rounds)
    assert found["draft_tokens"] == sum(map(len, rounds))


def test_a_comparison_says_who_accepts_what(recorded: tuple[Record, list[list[Any]]]) -> None:
    record, _ = recorded
    configs = settings_of(["js", "naive", "threshold:threshold=0.0"])
    found = compare(record, configs)
    accepts = {name: replay(record, config).verdict.accept for name, config in configs.items()}
    rules = found["rules"]
    everything = "threshold:threshold=0.0"
    assert rules[everything]["accepted_pct"] == 100.0
    alone = int((~accepts["js"] & ~accepts["naive"]).sum())
    assert rules[everything]["alone"] == alone == len(found["alone"][everything])
    assert rules["js"]["alone"] == rules["naive"]["alone"] == 0
    same = (accepts["js"] == accepts["naive"]).double().mean()
    assert rules["js"]["agreement_pct"]["naive"] == pytest.approx(100 * float(same))
    for name, accept in accepts.items():
        alike = 0  # an exact match is accepted by both; of the other draft tokens those that the rule refuses
        for exact, place in zip(record.tensors["exact"].tolist(), record.tensors["row"].tolist(), strict=True):
            alike += exact or not bool(accept[place])
        assert rules[name]["exact_agreement_pct"] == pytest.approx(100 * alike / found["draft_tokens"])
    likely = [row["draft_probability"] for row in found["alone"][everything]]
    assert likely == sorted(likely)
    json.dumps(found)


def test_intervals_are_bootstraps_over_drafts(recorded: tuple[Record, list[list[Any]]]) -> None:
    record, _ = recorded
    config = AcceptanceConfig("threshold", threshold=0.002)
    found = compare(record, {"it": config})["rules"]["it"]
    each = replay(record, config)
    p, _ = probabilities(record)
    of_draft = record.tensors["block"][record.tensors["row"] >= 0]
    values = np.zeros((record.blocks, 4))  # length, reached, accepted, sum of probabilities
    values[:, 0] = 1 + each.lengths.numpy()
    for row, draft in enumerate(of_draft.tolist()):
        taken = bool(each.reached[row] & each.verdict.accept[row])
        values[draft, 1:] += bool(each.reached[row]), taken, taken * float(p[row])

    def ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(above.sum(axis=axis) / below.sum(axis=axis))

    for name, above, below, slack in (
        ("acceptance_length", values[:, 0], np.ones(record.blocks), 0.03),
        ("accepted_pct", 100 * values[:, 2], values[:, 1], 1.5),
        ("mean_probability", values[:, 3], values[:, 2], 0.01),
    ):
        theirs = bootstrap((above, below), ratio, paired=True, n_resamples=5000, method="percentile", rng=1)
        interval = theirs.confidence_interval
        assert found["intervals"][name] == pytest.approx([interval.low, interval.high], abs=slack), name
        assert found["intervals"][name][0] <= found[name] <= found["intervals"][name][1]
    nothing = compare(record, {"it": AcceptanceConfig("threshold", threshold=1.0)})["rules"]["it"]
    assert nothing["intervals"]["mean_probability"] is nothing["mean_probability"] is None


def test_probabilities_are_those_of_the_target(tiny: Any, engine: Engine) -> None:
    recorder = Recorder(engine, tokens=64)
    prompt = tiny.prompt(50, 10, VOCAB)
    rounds = run(engine, recorder, [prompt], rule="strict", max_tokens=20)
    record = recorder.record()
    result = engine.generate(prompt, rule="strict", max_tokens=20)
    row, committed = 0, 0
    found = compare(record, settings_of(["threshold:threshold=0.0"]))["alone"]["threshold:threshold=0.0"]
    by_row = {entry["row"]: entry for entry in found}
    assert len(by_row) == len(record)
    for entries in rounds:
        for place, entry in enumerate(entries):
            if not entry.exact:
                ids = prompt.tolist() + result.token_ids[:committed] + [e.token for e in entries[:place]]
                p = tiny.full_logits(engine.model, ids)[-1].softmax(dim=0)
                assert by_row[row]["draft_probability"] == pytest.approx(float(p[entry.token]), rel=1e-3, abs=1e-6)
                assert by_row[row]["clean_probability"] == pytest.approx(float(p.max()), rel=1e-3)
                assert by_row[row]["draft"] == f"w{entry.token}"
                assert by_row[row]["context"].endswith(f"w{ids[-1]}")
                row += 1
        committed += sum(e.accepted for e in entries) + 1


def test_settings_that_need_more_than_was_recorded_are_refused(tiny: Any, engine: Engine) -> None:
    recorder = Recorder(engine, tokens=64)
    run(engine, recorder, [tiny.prompt(60, 10, VOCAB)], rule="strict")
    record = recorder.record()
    for text, message in (
        ("js:sampled", "Gaussian heads only: record with --dropout-heads"),
        ("js:m=65", "gaussian_tokens=65 needs more tokens than this record keeps rows of the LM head for \\(64\\)"),
        ("topk:candidates=100", "candidates=100 needs more tokens than this record keeps \\(64\\)"),
        ("js:evaluation=eager", "'eager' asks about exact matches too, of which a record keeps nothing: leave it out"),
        ("fly", "drafts are too short: rule 'fly' with window=6 needs at least 7 .* and draft_length is 5"),
    ):
        with pytest.raises(SettingError, match=message):
            replay(record, AcceptanceConfig.from_options(parse_rule(text)))
    full = Recorder(engine, tokens=64, dropout_heads=True)
    run(engine, full, [tiny.prompt(60, 10, VOCAB)], rule="strict")
    for text, message in (
        ("js:support=full", "support='full' looks at the whole vocabulary"),
        ("js:sampled", "shortlist_size=2048 needs more tokens than this record keeps \\(64\\)"),
    ):
        with pytest.raises(SettingError, match=message):
            replay(full.record(), AcceptanceConfig.from_options(parse_rule(text)))
    with pytest.raises(SettingError, match="at least 64 tokens"):
        Recorder(engine, tokens=63)


def test_a_drafter_without_distribution_leaves_the_rules_that_need_none(tiny: Any) -> None:
    target = tiny.build_model("llama", vocab_size=VOCAB)
    engine = Engine(target, tiny.word_tokenizer(VOCAB), PromptLookup())
    recorder = Recorder(engine, tokens=64)
    prompt = tiny.prompt(1, 8, VOCAB).repeat(3)
    run(engine, recorder, [prompt], rule="strict")
    record = recorder.record()
    for rule in ("naive", "margin", "typical"):
        replay(record, AcceptanceConfig(rule))
    with pytest.raises(SettingError, match="'js' compares distributions"):
        replay(record, AcceptanceConfig("js"))


def test_ctrl_c_within_a_draft_leaves_the_drafts_before_it(
    tiny: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    class Interrupted(recorder_module.Vocabulary):
        def split(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if next(calls) == 9:
                raise KeyboardInterrupt
            return super().split(token_ids)

    monkeypatch.setattr(recorder_module, "Vocabulary", Interrupted)
    recorder = Recorder(engine, tokens=64)
    with pytest.raises(KeyboardInterrupt):
        run(engine, recorder, [tiny.prompt(3, 12, VOCAB)], rule="strict")
    record = recorder.record()
    assert len(record) == int(record.tensors["row"].max()) + 1 == len(record.about["contexts"]) > 0
    replay(record, AcceptanceConfig("naive"))


def test_what_is_no_record_is_refused(tmp_path: Path, engine: Engine) -> None:
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    for name, message in (("text", "cannot read the record"), ("other", "is no record"), ("absent", "cannot read")):
        with pytest.raises(SettingError, match=message):
            Record.load(tmp_path / name)
    with pytest.raises(SettingError, match="nothing to record"):
        Recorder(engine).record()


def test_rules_are_named_by_their_texts() -> None:
    assert settings_of(["js:p=0.1"]) == {"js:p=0.1": AcceptanceConfig(dropout=0.1)}
    with pytest.raises(SettingError, match="js is given twice"):
        settings_of(["js", "js"])
    with pytest.raises(SettingError, match="leave L out"):
        settings_of(["js:L=3"])
