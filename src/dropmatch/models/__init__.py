"""From a model's name to a loaded model: hub ids, local folders, GGUF files and demo models."""

from dropmatch.models.demos import CatalogueEntry, default_draft
from dropmatch.models.loading import LoadedModel, load
from dropmatch.models.store import catalogue, fetch, where

__all__ = ["CatalogueEntry", "LoadedModel", "catalogue", "default_draft", "fetch", "load", "where"]
