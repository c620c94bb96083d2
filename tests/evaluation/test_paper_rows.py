"""Tables 2 and 3: the draft rows of a run and what the heads say there are those of the paper's equations."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acceptance import reference
from dropmatch import Engine
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.divergence import divergence_sheet, divergences
from dropmatch.evaluation.paper.draft_rows import Rows
from dropmatch.evaluation.paper.kept_rows import KeptRows, decode_rows
from dropmatch.evaluation.paper.majority import majorities, majority_sheet
from dropmatch.evaluation.paper.settings import sampled
from dropmatch.evaluation.tasks import Example

HEADS = 4


class Quiet:
    """Counts what is done."""

    def __init__(self) -> None:
        self.measured = self.found = 0

    def begin(self, what: str) -> None: ...

    def done(self, tokens: int, measured: bool) -> None:
        self.measured += measured
        self.found += not measured


def words(tiny: Any, seed: int, length: int = 12) -> str:
    return " ".join(f"w{i}" for i in tiny.prompt(seed, length).tolist())


def measured(engine: Engine, prompts: list[str], config: AcceptanceConfig, tokens: int = 30) -> Rows:
    return of_examples(engine, [Example(str(i), prompt) for i, prompt in enumerate(prompts)], config, tokens)


def of_examples(engine: Engine, examples: list[Example], config: AcceptanceConfig, tokens: int) -> Rows:
    rows, seed = KeptRows(None, {}), config.mask_seed
    assert seed is not None
    decode_rows(engine, examples, [config], 4, tokens, rows, Quiet())
    return rows.by_seed(examples, [seed])[seed]


def lazy_run(engine: Engine, prompt: str, config: AcceptanceConfig, tokens: int = 30) -> Any:
    options = {name: value for name, value in vars(config).items() if value is not None}
    return engine.generate(prompt, draft_length=4, max_tokens=tokens, trace=True, **options)


@torch.no_grad()
def hidden_of(model: Any, ids: list[int]) -> np.ndarray:
    return model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1].double().numpy()


@pytest.mark.parametrize(("family", "dropout", "seed"), [("llama", 0.3, 3), ("gemma2", 0.5, 0)])
def test_rows_are_those_of_the_equations(tiny: Any, family: str, dropout: float, seed: int) -> None:
    engine, prompt = tiny.engine(family), words(tiny, 2)
    config = sampled("js", HEADS, dropout, seed)
    rows = measured(engine, [prompt], config)
    result = lazy_run(engine, prompt, config)
    ids = engine.encode(prompt).tolist() + result.token_ids
    assert len(rows) == sum(entry.reason != "not reached" for entries in result.trace for entry in entries) > 15

    target, draft = engine.model, engine.drafter.model  # type: ignore[union-attr]
    weight = target.get_output_embeddings().weight.detach().double().numpy()
    cap = getattr(target.config, "final_logit_softcapping", None)
    sizes = set()
    for n in range(len(rows)):
        position = int(rows.position[n])
        prefix = ids[:position]
        h = hidden_of(target, prefix)
        heads = reference.dropped(h, seed, position, HEADS, dropout) @ weight.T  # [K, V]
        heads = heads if cap is None else cap * np.tanh(heads / cap)
        said = tiny.full_logits(draft, prefix)[-1].double().numpy()
        token = reference.argmax(said.tolist())
        answer = reference.answer(heads, said, token)
        centroid_logits = heads.mean(axis=0)
        centroid = reference.softmax(centroid_logits.tolist())
        probabilities = [reference.softmax(row) for row in heads.tolist()]
        tokens = [reference.argmax(row) for row in probabilities]
        most = reference.majority(tokens, centroid_logits.tolist())
        agreeing = [p[most] for p, t in zip(probabilities, tokens, strict=True) if t == most]
        spread = [reference.js(p, centroid) for p in probabilities]

        assert int(rows.token[n]) == token
        assert bool(rows.exact[n]) == (token == int(tiny.full_logits(target, prefix)[-1].argmax()))
        assert int(rows.agreeing[n]) == len(agreeing)
        assert bool(rows.majority[n]) == (most == token)
        for ours, theirs in (
            (rows.of_heads, math.fsum(p[most] for p in probabilities) / HEADS),
            (rows.of_agreeing, math.fsum(agreeing) / len(agreeing)),
            (rows.of_centroid, centroid[most]),
            (rows.distance, answer.distance),
            (rows.heads_mean, math.fsum(spread) / HEADS),
            (rows.radius, max(spread)),
        ):
            assert float(ours[n]) == pytest.approx(theirs, rel=2e-3, abs=2e-5)
        if answer.clear:
            assert bool(rows.inside[n]) == (answer.distance <= answer.radius)
        sizes.add(len(agreeing))
    assert len(sizes) > 1


def test_an_eager_run_says_the_same_of_the_rows_that_it_shares(tiny: Any) -> None:
    """The text goes on lazily here; where the prefix is the same, an eager run is asked and told the same."""
    engine, config = tiny.engine(), sampled("js", HEADS, 0.3, 1)
    shared = refused = 0
    for seed in range(4):
        prompt = words(tiny, 10 + seed)
        rows, lazy = measured(engine, [prompt], config), lazy_run(engine, prompt, config)
        eager = lazy_run(engine, prompt, config.changed(evaluation="eager"))
        start = lazy.prompt_tokens
        here = {int(position): n for n, position in enumerate(rows.position)}
        committed = 0
        for entries in eager.trace:
            for place, entry in enumerate(entries):
                position = start + committed + place
                same = eager.token_ids[: committed + place] == lazy.token_ids[: committed + place]
                if entry.reason == "not reached" or not same or position not in here:
                    continue
                row = here[position]
                assert int(rows.token[row]) == entry.token
                assert float(rows.distance[row]) == pytest.approx(entry.js, rel=1e-3, abs=1e-6)
                assert float(rows.radius[row]) == pytest.approx(entry.radius, rel=1e-3, abs=1e-6)
                assert (bool(rows.inside[row]) or bool(rows.majority[row])) == entry.accepted
                shared += 1
                refused += entry.exact and not entry.accepted
            committed += sum(entry.accepted for entry in entries) + 1
    assert shared > 40
    assert refused > 0  # exact matches that the heads refuse: where the two runs part


def test_without_dropout_all_heads_agree(tiny: Any) -> None:
    engine = tiny.engine()
    rows = measured(engine, [words(tiny, 4), words(tiny, 5)], sampled("js", HEADS, 0.0, 0))
    assert set(rows.agreeing.tolist()) == {HEADS}
    assert torch.equal(rows.majority, rows.exact)
    assert float(rows.radius.max()) < 1e-6
    assert torch.allclose(rows.of_agreeing, rows.of_centroid, atol=1e-5)
    found = majorities({0: rows}, HEADS)
    assert found["all"]["sizes"][str(HEADS)]["ratio_pct"]["value"] == 100.0
    assert divergences({0: rows})["concentrated"]["rows"] >= int(rows.exact.sum()) - int(rows.inside.sum())


def test_nothing_behind_the_end_of_a_text_is_counted(tiny: Any) -> None:
    engine, config = tiny.engine(), sampled("js", HEADS, 0.3, 0)
    prompt = words(tiny, 6)
    result = lazy_run(engine, prompt, config, tokens=40)
    stop = result.tokens[9].text.strip()
    examples = [Example("1", prompt, stop=(stop,))]
    rows = of_examples(engine, examples, config, 40)
    ended = engine.generate(
        prompt, stop=stop, draft_length=4, max_tokens=40, **{k: v for k, v in vars(config).items() if v is not None}
    )
    assert len(ended.token_ids) < 40
    assert int(rows.position.max()) < ended.prompt_tokens + len(ended.token_ids)
    assert len(rows) <= ended.statistics.proposed + ended.statistics.rounds
    short = of_examples(engine, [Example("1", prompt, max_tokens=5)], config, 40)
    assert int(short.position.max()) < ended.prompt_tokens + 5


def test_a_shortlist_says_nearly_the_same(tiny: Any) -> None:
    target = tiny.build_model("llama", vocab_size=2000, peak=6.0)
    from dropmatch.drafting import DraftModel

    engine = Engine(target, tiny.word_tokenizer(2000), DraftModel(tiny.perturb(target, 0.05)))
    prompt = words(tiny, 3)
    full = measured(engine, [prompt], sampled("js", HEADS, 0.2, 0))
    few = measured(engine, [prompt], AcceptanceConfig(**{
        **vars(sampled("js", HEADS, 0.2, 0, "shortlist")), "shortlist_size": 256,
    }))  # fmt: skip
    assert torch.equal(full.position, few.position)
    assert torch.equal(full.agreeing, few.agreeing)
    for name in ("of_heads", "of_agreeing", "of_centroid", "distance", "radius"):
        assert torch.allclose(getattr(full, name), getattr(few, name), rtol=0.1, atol=5e-3), name


def rows_of(*entries: tuple[int, float, float, float, bool]) -> Rows:
    """Rows of which the size of the majority, its probability, both sides of equation 6 and equation 7 are told."""
    agreeing, own, distance, radius, majority = (torch.tensor(column) for column in zip(*entries, strict=True))
    count = len(entries)
    return Rows(
        position=torch.arange(count),
        token=torch.zeros(count, dtype=torch.int64),
        exact=majority,
        agreeing=agreeing,
        of_heads=own,
        of_agreeing=own / 4,
        of_centroid=own / 2,
        distance=distance,
        heads_mean=radius / 2,
        radius=radius,
        majority=majority,
    )


FIRST = rows_of(
    (5, 0.9, 0.2, 0.1, True),
    (5, 0.7, 0.2, 0.1, True),
    (3, 0.4, 0.2, 0.1, False),
    (5, 0.5, 0.1, 0.2, True),
    (1, 0.2, 0.1, 0.4, False),
)
SECOND = rows_of((5, 0.6, 0.3, 0.1, True), (2, 0.3, 0.3, 0.1, True))


def test_table_2_counts_by_size_over_seeds() -> None:
    found = majorities({0: FIRST, 1: SECOND}, 5)
    few, every = found["not_dispersed"], found["all"]
    assert (few["rows"], every["rows"]) == (5, 7)
    assert few["sizes"]["5"]["ratio_pct"] == pytest.approx({"value": (200 / 3 + 50) / 2, "low": 50, "high": 200 / 3})
    assert every["sizes"]["5"]["ratio_pct"] == pytest.approx({"value": 55, "low": 50, "high": 60})
    assert few["sizes"]["5"]["probability"] == pytest.approx({"value": 0.7, "low": 0.6, "high": 0.8})
    assert few["sizes"]["5"]["of_agreeing"]["value"] == pytest.approx(0.175)
    assert few["sizes"]["5"]["of_centroid"]["value"] == pytest.approx(0.35)
    assert few["sizes"]["2"]["probability"] == pytest.approx({"value": 0.3, "low": 0.3, "high": 0.3})
    assert few["sizes"]["1"] == {
        "rows": 0, "ratio_pct": {"value": 0.0, "low": 0.0, "high": 0.0}, "probability": None,
        "of_agreeing": None, "of_centroid": None,
    }  # fmt: skip
    sheet = majority_sheet(found, "toy", 2)
    assert all(len(row) == len(sheet.headings) for row in sheet.rows)
    assert [row[0] for row in sheet.rows] == ["1", "2", "3", "4", "5"]
    assert sheet.rows[4][1:3] == ("58.33 [50.00, 66.67]", "0.700 [0.600, 0.800]")
    assert sheet.rows[4][-2:] == ("98.40", "0.939")
    assert all(row[-1] == "" for row in majority_sheet(majorities({0: FIRST}, 7), "toy", 1).rows)  # the paper has K=5
    json.dumps(found)


def test_table_3_averages_by_equation_over_seeds() -> None:
    found = divergences({0: FIRST, 1: SECOND})
    assert found["rows"] == 7
    assert {kind: found[kind]["rows"] for kind in ("dispersed", "concentrated", "rejected")} == {
        "dispersed": 2, "concentrated": 4, "rejected": 1,
    }  # fmt: skip
    assert found["dispersed"]["draft"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    assert found["dispersed"]["heads"]["value"] == pytest.approx(0.15)
    assert found["dispersed"]["farthest_head"]["value"] == pytest.approx(0.3)
    assert found["concentrated"]["draft"] == pytest.approx({"value": 0.25, "low": 0.2, "high": 0.3})
    assert found["concentrated"]["share_pct"] == pytest.approx({"value": 70, "low": 40, "high": 100})
    sheet = divergence_sheet(found, "toy", 2)
    assert all(len(row) == len(sheet.headings) for row in sheet.rows)
    assert sheet.rows[0][-2:] == tuple(f"{value:.4f}" for value in published.DIVERGENCE["dispersed"])
    assert sheet.rows[2][-2:] == ("", "")
    assert divergences({0: SECOND})["dispersed"]["draft"] is None
    json.dumps(found)


def test_seeds_give_runs_of_their_own(tiny: Any) -> None:
    engine = tiny.engine()
    examples = [Example("1", words(tiny, 8))]
    configs = [sampled("js", HEADS, 0.3, seed) for seed in (0, 5)]
    rows = KeptRows(None, {})
    decode_rows(engine, examples, configs, 4, 25, rows, Quiet())
    found = rows.by_seed(examples, [0, 5])
    assert list(found) == [0, 5]
    assert not torch.equal(found[0].radius[:5], found[5].radius[:5])
    again = of_examples(engine, examples, configs[1], 25)
    assert torch.equal(again.radius, found[5].radius)


def test_what_cannot_be_measured_is_refused(tiny: Any) -> None:
    config = sampled("js", HEADS, 0.3, 0)
    with pytest.raises(SettingError, match="'js' compares distributions"):
        measured(tiny.engine(drafter="lookup"), [words(tiny, 1)], config)
    with pytest.raises(SettingError, match="no token was drafted: raise max_tokens"):
        measured(tiny.engine(), [words(tiny, 1)], config, tokens=1)


ABOUT = {"target": "tiny", "max_tokens": 20}


def kept(engine: Engine, examples: list[Example], file: Path, seeds: list[int]) -> tuple[KeptRows, Quiet]:
    rows, progress = KeptRows(file, ABOUT), Quiet()
    decode_rows(engine, examples, [sampled("js", HEADS, 0.3, seed) for seed in seeds], 4, 20, rows, progress)
    return rows, progress


def test_rows_that_are_there_are_not_decoded_again(tiny: Any, tmp_path: Path) -> None:
    engine, file = tiny.engine(), tmp_path / "rows.jsonl"
    examples = [*(Example(str(i), words(tiny, i)) for i in range(3)), Example("short", words(tiny, 4), max_tokens=1)]
    first, progress = kept(engine, examples, file, [0])
    assert (progress.measured, progress.found) == (4, 0)
    lines = file.read_text().split("\n")
    assert len(lines) == 1 + 4 + 1
    assert json.loads(lines[0]).items() >= ABOUT.items()
    file.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:30])  # the last is half written
    again, progress = kept(engine, examples, file, [0, 3])
    assert (progress.measured, progress.found) == (5, 3)
    loaded, progress = kept(None, examples, file, [0, 3])  # type: ignore[arg-type]  # without an engine
    assert (progress.measured, progress.found) == (0, 8)
    for rows in (again, loaded):
        for field in fields(Rows):
            ours, theirs = (getattr(each.by_seed(examples, [0])[0], field.name) for each in (rows, first))
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name
    assert list(loaded.by_seed(examples, [3, 0])) == [3, 0]
    assert len(loaded.by_seed(examples[:1], [0])[0]) < len(loaded.by_seed(examples, [0])[0])
    assert loaded.by_seed(examples, [7]) == {}  # nothing is there yet
    with pytest.raises(SettingError, match="no token was drafted"):
        loaded.by_seed(examples[3:], [0])
    assert loaded.kept.machine["device"] == "cpu"


def test_rows_of_other_settings_or_prompts_are_refused(tiny: Any, tmp_path: Path) -> None:
    engine, file = tiny.engine(), tmp_path / "rows.jsonl"
    examples = [Example(str(i), words(tiny, i)) for i in range(2)]
    kept(engine, examples, file, [0])
    before = file.read_bytes()
    with pytest.raises(
        SettingError, match="holds draft rows with max_tokens=20, and now it is 21: give another --rows"
    ):
        KeptRows(file, {**ABOUT, "max_tokens": 21})
    with pytest.raises(SettingError, match=r"holds draft rows of example 1 for another prompt.*another --rows"):
        kept(engine, [examples[0], Example("1", words(tiny, 5))], file, [0])
    assert file.read_bytes() == before
    entry = json.loads(before.decode().split("\n")[1])
    entry["rows"]["radius"].pop()
    file.write_text(before.decode().split("\n")[0] + "\n" + json.dumps(entry) + "\n")
    with pytest.raises(SettingError, match=r"is no file of draft rows .*columns of several lengths"):
        KeptRows(file, ABOUT)
