"""Fixtures of the tests of evaluation."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def prompts(tiny: Any) -> list[str]:
    """Five prompts of the tiny models' words."""
    return [" ".join(f"w{i}" for i in tiny.prompt(seed).tolist()) for seed in range(5)]
