"""Drafters: what proposes the tokens that the target verifies, one a file."""

from dropmatch.drafting.base import Draft, Drafter
from dropmatch.drafting.draft_model import DraftModel
from dropmatch.drafting.prompt_lookup import PromptLookup

__all__ = ["Draft", "DraftModel", "Drafter", "PromptLookup"]
