"""Loading local folders: dtype, device, safety, and what the errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import VOCAB

import dropmatch.models as models
from dropmatch.errors import ModelError
from dropmatch.models import resources

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[("h", "e"), ("l", "l")]))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>").save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen2 model in bfloat16."""
    return make_folder(tmp_path / "model", torch.bfloat16)


def make_folder(folder: Path, dtype: torch.dtype, **settings: Any) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(dtype).save_pretrained(folder, **settings)
    save_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_local_folder(folder: Path, capfd: pytest.CaptureFixture) -> None:
    loaded = models.load(str(folder), device="cpu")
    assert isinstance(loaded, models.LoadedModel)
    assert (loaded.name, loaded.path, loaded.dtype) == (str(folder), folder, torch.bfloat16)
    assert not loaded.model.training
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, len(VOCAB))
    assert len(loaded.tokenizer("he")["input_ids"]) >= 1
    assert models.fetch(str(folder)) == models.where(str(folder)) == folder
    assert capfd.readouterr().err == ""
    with pytest.raises(AttributeError):
        loaded.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, "float16", torch.float16),
    ],
)
def test_dtype_on_a_cpu(tmp_path: Path, stored: torch.dtype, asked: Any, got: torch.dtype) -> None:
    loaded = models.load(str(make_folder(tmp_path / "m", stored)), dtype=asked, device="cpu")
    assert loaded.dtype == got
    assert {p.dtype for p in loaded.model.parameters()} == {got}


def test_shards_are_counted_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "m", torch.bfloat16, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert models.load(str(folder), device="cpu").dtype == torch.bfloat16
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"is incomplete: {shards[0].name} missing"):
        models.load(str(folder))


def test_a_truncated_safetensors_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(ModelError, match=f"model.safetensors is incomplete: its tensors need {len(data):,} bytes"):
        models.load(str(folder))
    file.write_bytes(b"\x00" * 4)
    with pytest.raises(ModelError, match=r"is no whole safetensors file"):
        models.load(str(folder))


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_read(folder: Path, pickle: str) -> None:
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(ModelError, match=r"no safetensors weights \(it has \.(bin|pt)\).*can run code.*convert them"):
        models.load(str(folder))


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no safetensors weights"):
        models.load(str(folder))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model folder: it has no config.json"):
        models.load(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        models.load(str(folder))


def test_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer"):
        models.load(str(folder))


def test_encoder_decoder_by_the_file_and_by_its_type(folder: Path) -> None:
    for change in ({"is_encoder_decoder": True}, {"is_encoder_decoder": None, "model_type": "t5"}):
        config = json.loads((folder / "config.json").read_text())
        config.update(change)
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"encoder-decoder model .*dropmatch needs a decoder-only model"):
            models.load(str(folder), device="cpu")


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    folder = tmp_path / "vit"
    config = ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32)
    ViTModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(ModelError, match=r"cannot be loaded as a decoder-only model"):
        models.load(str(folder), device="cpu")


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2Model

    folder = tmp_path / "headless"
    Qwen2Model(Qwen2Config(**SIZES)).save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(ModelError, match=r"no whole decoder-only model: weights for lm_head\.weight are missing"):
        models.load(str(folder), device="cpu")


def test_code_is_not_run_unless_asked_for(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(ModelError, match=r"needs Python code that its repository carries.*trust_remote_code=True"):
        models.load(str(folder), device="cpu")


def test_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"device 'nonsense' is not known"):
        models.load(str(folder), device="nonsense")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"torch sees no GPU"):
        models.load(str(folder), device="cuda")
    assert models.load(str(folder)).model.device.type == "cpu"


def test_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda: 100_000)
    with pytest.raises(ModelError) as caught:
        models.load(str(folder), dtype="float32", device="cpu")
    weights = (folder / "model.safetensors").stat().st_size
    assert "not enough memory to load" in str(caught.value)
    assert "100.0 kB available" in str(caught.value)
    assert "smaller dtype" in str(caught.value)
    needed = float(str(caught.value).split(": ")[1].split(" kB")[0]) * 1e3
    assert needed == pytest.approx(2.2 * weights, rel=0.1)  # stored in two bytes, loaded in four


@pytest.mark.real_models
def test_smollm2_answers() -> None:
    loaded = models.load("demo:smollm2", device="cpu")
    assert models.where("demo:smollm2") == loaded.path
    assert loaded.model.config.tie_word_embeddings
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0])
