"""Fixtures for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cli_support import Pair, build_pair
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target, its draft, and the target with a chat template, in folders."""
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in this process; the result has exit_code, stdout and stderr."""
    from dropmatch.cli.app import app

    for name in ("NO_COLOR", "FORCE_COLOR", "DROPMATCH_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: str, width: int = 100, **options: Any) -> Any:
        return CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(args), **options)

    return invoke
