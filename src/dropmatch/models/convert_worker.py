"""The child process of `convert`: python -m dropmatch.models.convert_worker SOURCE TARGET DTYPE."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any


def main(source: Path, target: Path, dtype: str) -> None:
    """Writes the dense model and tokenizer of a GGUF file into a folder. Any error ends the process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model, info = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise SystemExit(f"the file lacks weights that the model needs: {', '.join(missing[:5])}")
    # The weights are dense now; a config that says GGUF would send the next load looking for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    _tie_if_equal(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tie_if_equal(model: Any) -> None:
    """Says in the config that head and embedding are one when they are, so that they are stored once.

    A GGUF file often packs the head more finely than the embedding: then they differ and stay two, even if
    the model was trained with one.
    """
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or getattr(head, "bias", None) is not None:
        return
    if model.config.tie_word_embeddings or head.weight.shape != embedding.weight.shape:
        return
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        model.config.tie_word_embeddings = True


def _end_with_parent() -> None:
    """Ends this process when the parent is gone, which closes the pipe that is standard input here."""

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be in the way of a normal exit
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
