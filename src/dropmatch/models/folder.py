"""What a local model folder holds, checked before anything is loaded from it."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.errors import ModelError
from dropmatch.models.hub import no_safetensors

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Weights:
    """The safetensors weights of a folder."""

    float_elements: int  # numbers stored as floats of 16 bits or more
    other_bytes: int  # bytes of everything else: packed, quantised (fp8 too), indices
    dtype: str | None  # of most floats; None when that is no dtype a model is loaded in

    def bytes_in(self, item_bytes: int) -> int:
        """Bytes in memory when the floats take `item_bytes` each."""
        return self.float_elements * item_bytes + self.other_bytes


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a model folder.

    Raises ModelError when there is none or it cannot be read, and for an encoder-decoder model.
    """
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" It holds {', '.join(ggufs)}: give the path of that file." if ggufs else ""
        raise ModelError(f"{folder} is no model folder: it has no config.json.{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}). Download or copy it again.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} cannot be read (it is no JSON object). Download or copy it again.")
    if config.get("is_encoder_decoder"):
        raise encoder_decoder(str(folder), str(config.get("model_type", "unknown")))
    return config


def encoder_decoder(what: str, model_type: str) -> ModelError:
    """The error for a model that is of no use here."""
    return ModelError(f"{what} is an encoder-decoder model ({model_type}); dropmatch needs a decoder-only model.")


def check_folder(folder: Path) -> Weights:
    """Makes sure that a folder holds a config, a tokenizer and whole safetensors weights.

    Raises ModelError for whatever is missing, incomplete or in a format that is not read.
    """
    read_config(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer (such as tokenizer.json). Save the tokenizer there as well.")
    return _read_weights(folder, _weight_files(folder))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read ({error!r}). Download or copy it again.") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} is incomplete: {', '.join(missing)} missing. Download or copy it again.")
        return [folder / name for name in names]
    kinds = sorted({file.suffix for file in folder.iterdir()} & set(_PICKLES))
    raise ModelError(no_safetensors(str(folder), kinds))


def _read_weights(folder: Path, files: list[Path]) -> Weights:
    elements: Counter[str] = Counter()
    other = 0
    for file in files:
        for info in _tensors(file):
            begin, end = info["data_offsets"]
            if info["dtype"] in _ITEM_BYTES:
                elements[info["dtype"]] += (end - begin) // _ITEM_BYTES[info["dtype"]]
            else:
                other += end - begin
    most = elements.most_common(1)[0][0] if elements else ""
    return Weights(sum(elements.values()), other, _NAMES.get(most))


def _tensors(file: Path) -> list[dict[str, Any]]:
    """The tensors that a safetensors header lists, after a check that the file reaches to the last one."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError("header longer than the file")
            header = json.loads(stream.read(length))
        tensors = [info for name, info in header.items() if name != "__metadata__"]
        end = 8 + length + max((info["data_offsets"][1] for info in tensors), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}). Download or copy it again.") from error
    if end > size:
        raise ModelError(
            f"{file} is incomplete: its tensors need {end:,} bytes, the file has {size:,}. Download or copy it again."
        )
    return tensors
