"""Small models, small GGUF files and small wheels for the tests of dropmatch.models."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dropmatch.models.demos import Demo, Wheel

BYTES = list(range(ord("!"), ord("~") + 1)) + list(range(ord("¡"), ord("¬") + 1)) + list(range(ord("®"), ord("ÿ") + 1))
ALPHABET = [chr(b) for b in BYTES] + [chr(256 + i) for i in range(256 - len(BYTES))]
VOCAB = [*ALPHABET, "he", "ll", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    head: str | None = None,
    dtype: type = np.float16,
    split: int = 0,
) -> Path:
    """A one-layer model with a byte-level tokenizer. `head`: None (tied), "equal" or "different"."""
    from gguf import GGUFWriter, TokenType

    rng = np.random.default_rng(0)
    width, inner = 32, 64
    writer = GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCAB))
    if split:
        writer.add_uint16("split.count", split)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([TokenType.NORMAL] * (len(VOCAB) - 3) + [TokenType.CONTROL] * 3)
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(len(VOCAB) - 3)
    writer.add_eos_token_id(len(VOCAB) - 1)
    writer.add_pad_token_id(len(VOCAB) - 3)

    def add(name: str, *shape: int) -> np.ndarray:
        data = (rng.standard_normal(shape) * 0.1).astype(dtype)
        writer.add_tensor(name, data)
        return data

    embedding = add("token_embd.weight", len(VOCAB), width)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{name}.weight", width, width)
    add("blk.0.ffn_gate.weight", inner, width)
    add("blk.0.ffn_up.weight", inner, width)
    add("blk.0.ffn_down.weight", width, inner)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    if head == "equal":
        writer.add_tensor("output.weight", embedding)
    elif head == "different":
        add("output.weight", len(VOCAB), width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, wheel: Wheel, data: bytes) -> Path:
    """A wheel with one data member, as pip wants it."""
    stem = wheel.package.replace("-", "_")
    info = f"{stem}-{wheel.version}.dist-info"
    path = folder / f"{stem}-{wheel.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(wheel.member, data)
        out.writestr(f"{stem}/__init__.py", "raise SystemExit('this package must never be imported')\n")
        out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: {wheel.version}\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")
    return path


def make_demo(data: bytes, wheelhouse: Path, *, pieces: int = 3, dense_bytes: int = 1000, **changes: object) -> Demo:
    """A demo model whose GGUF file is `data`, in wheels that are written to `wheelhouse`."""
    step = -(-len(data) // pieces)
    wheels = []
    for i in range(pieces):
        part = data[i * step : (i + 1) * step]
        wheel = Wheel(f"dropmatch-test-part{i + 1}", "0.1.0", f"dropmatch_test_part{i + 1}/data/x.bin", len(part))
        write_wheel(wheelhouse, wheel, part)
        wheels.append(wheel)
    settings: dict[str, object] = {
        "name": "demo:tiny",
        "description": "a tiny model",
        "licence": "Apache-2.0",
        "filename": "tiny.gguf",
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "dense_bytes": dense_bytes,
        "wheels": tuple(wheels),
    }
    return Demo(**{**settings, **changes})  # type: ignore[arg-type]


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process and returns its exit status; 99 stands for an exception."""

    def run() -> None:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode
