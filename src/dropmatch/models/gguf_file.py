"""What the header of a GGUF file says, read without loading the tensors, and whether to trust it.

Only the header is parsed here, so that a damaged file is refused in milliseconds and with a message of
its own; the tensors are read by transformers when the file is converted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dropmatch.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0
# Files name these architectures otherwise than the table in transformers does.
_ALIASES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
_ENCODER_DECODER = ("t5", "t5encoder", "umt5")


@dataclass(frozen=True)
class GGUFHeader:
    """What is needed to know before a GGUF file is converted."""

    architecture: str
    n_elements: int  # of all tensors together
    all_float32: bool
    tied_head: bool
    split_count: int


class _Header:
    """A cursor over the header; the file's end is reported as such, never as garbage."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = path.stat().st_size

    def take(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes) if nbytes <= self._size else b""
        if len(data) != nbytes:
            raise truncated(self._path, "its header is cut off")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:  # skipped: no array matters here, and vocabularies are long
                self.take(count * struct.calcsize("<" + _SCALARS[item]))
            else:
                for _ in range(count):
                    self.value(item)
            return None
        raise ModelError(f"{self._path} is damaged: its header has a value of unknown type {kind}.")


def truncated(path: Path, detail: str) -> ModelError:
    """The error for a file that ends too early."""
    return ModelError(f"{path} is incomplete: {detail}. Download or copy it again.")


def read_header(path: Path) -> GGUFHeader:
    """Reads the header of a GGUF file and checks that all of its tensors lie within the file.

    Raises ModelError when the file cannot be read, is no GGUF file, is of a version that is not known,
    or is cut off.
    """
    try:
        with open(path, "rb") as file:
            return _parse(file, path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}.") from error


def _parse(file: BinaryIO, path: Path) -> GGUFHeader:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    magic = file.read(4)
    if magic != MAGIC:
        raise ModelError(
            f"{path} is no GGUF file: it starts with {magic!r}, not {MAGIC!r}. "
            "Give a file in GGUF format, or a folder with safetensors weights."
        )
    header = _Header(file, path)
    version = header.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is of GGUF version {version}; versions 2 and 3 (little endian) can be read.")
    n_tensors, n_values = header.scalar("Q"), header.scalar("Q")
    values: dict[str, Any] = {}
    for _ in range(n_values):
        key = header.string()
        values[key] = header.value(header.scalar("I"))
    tensors: list[tuple[str, int, int, int]] = []  # name, elements, type, offset
    for _ in range(n_tensors):
        name = header.string()
        elements = 1
        for _ in range(header.scalar("I")):
            elements *= header.scalar("Q")
        tensors.append((name, elements, header.scalar("I"), header.scalar("Q")))

    alignment = int(values.get("general.alignment", 32)) or 32
    data_start = -(-file.tell() // alignment) * alignment
    end = data_start
    for name, elements, kind, offset in tensors:
        try:
            block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(f"{path}: tensor {name} is stored in a type ({kind}) that cannot be read.") from None
        end = max(end, data_start + offset + elements // block * nbytes)
    size = path.stat().st_size
    if end > size:
        raise truncated(path, f"its tensors need {end:,} bytes, the file has {size:,}")
    return GGUFHeader(
        architecture=str(values.get("general.architecture", "")),
        n_elements=sum(elements for _, elements, _, _ in tensors),
        all_float32=bool(tensors) and all(kind == _F32 for _, _, kind, _ in tensors),
        tied_head=all(name != "output.weight" for name, *_ in tensors),
        split_count=int(values.get("split.count", 1) or 1),
    )


def supported_architectures() -> tuple[str, ...] | None:
    """The architectures that the installed transformers converts; None when it does not say."""
    try:
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    except ImportError:
        return None
    return tuple(sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer", *_ENCODER_DECODER}))


def check_convertible(path: Path) -> GGUFHeader:
    """Reads the header, and makes sure that the file can be converted to a decoder-only model.

    Raises ModelError as `read_header` does, and for an encoder-decoder model, an architecture that
    transformers does not convert, one piece of a split file, and a file without tensors.
    """
    header = read_header(path)
    architecture = header.architecture
    if architecture in _ENCODER_DECODER:
        raise ModelError(
            f"{path} holds an encoder-decoder model ({architecture}); dropmatch needs a decoder-only model."
        )
    known = supported_architectures()
    if known is not None and _ALIASES.get(architecture, architecture) not in known:
        raise ModelError(
            f"{path} holds a model of architecture {architecture or '(none given)'!r}, which transformers "
            f"does not convert from GGUF. It converts: {', '.join(known)}. "
            "Use the model's safetensors weights instead."
        )
    if header.split_count > 1:
        raise ModelError(
            f"{path} is one of {header.split_count} pieces of a model. "
            "Join them first (llama-gguf-split --merge) and give the joined file."
        )
    if header.n_elements == 0:
        raise ModelError(f"{path} holds no tensors: it is a vocabulary or metadata file, not a model.")
    return header
