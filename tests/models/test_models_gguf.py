"""GGUF headers: what is read, and what is refused with which words."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from models_support import VOCAB, write_gguf

import dropmatch.models as models
from dropmatch.errors import ModelError
from dropmatch.models.gguf_file import check_convertible, read_header

# embedding, 4 attention matrices, 3 of the MLP, 3 norms
ELEMENTS = len(VOCAB) * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32


def test_reads_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    header = check_convertible(write_gguf(tmp_path / "m.gguf"))
    assert (header.architecture, header.n_elements, header.tied_head) == ("llama", ELEMENTS, True)
    assert not header.all_float32
    assert header.split_count == 1
    assert not read_header(write_gguf(tmp_path / "u.gguf", head="different")).tied_head
    assert read_header(write_gguf(tmp_path / "f.gguf", dtype=np.float32)).all_float32


def test_wrong_magic(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match=r"m\.gguf is no GGUF file: it starts with b'PK"):
        models.fetch(str(file))


def test_unknown_version(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", 99)
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"version 99; versions 2 and 3"):
        read_header(file)


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 30, 200, 3000])
def test_cut_off_in_the_header(tmp_path: Path, keep: int) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    expected = "is no GGUF file" if keep < 4 else "is incomplete: its header is cut off"
    with pytest.raises(ModelError, match=expected):
        models.fetch(str(file))


@pytest.mark.parametrize("less", [32, 5000])
def test_cut_off_in_the_tensors(tmp_path: Path, less: int) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - less])
    with pytest.raises(
        ModelError, match=rf"is incomplete: its tensors need {size:,} bytes, the file has {size - less:,}"
    ):
        models.fetch(str(file))


def test_absurd_lengths_end_as_errors(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 2**62) + bytes(50))
    with pytest.raises(ModelError, match=r"its header is cut off"):
        read_header(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77))
    with pytest.raises(ModelError, match=r"value of unknown type 77"):
        read_header(file)


def test_unsupported_architecture(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", architecture="rwkv7")
    with pytest.raises(ModelError, match=r"architecture 'rwkv7', which transformers does not convert.*llama.*qwen2"):
        models.fetch(str(file))


def test_encoder_decoder(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", architecture="t5")
    with pytest.raises(ModelError, match=r"encoder-decoder model \(t5\); dropmatch needs a decoder-only model"):
        models.fetch(str(file))


def test_one_piece_of_a_split_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", split=3)
    with pytest.raises(ModelError, match=r"one of 3 pieces"):
        models.fetch(str(file))


def test_a_folder_with_only_a_gguf_points_to_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"has no config.json. It holds m\.gguf: give the path of that file"):
        models.load(str(tmp_path))
