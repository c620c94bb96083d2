"""Engines as the evaluation uses them: texts and counts for a group of examples with one setting."""

from dropmatch.evaluation.backends.base import Backend, EngineLost, Group, Output

__all__ = ["Backend", "EngineLost", "Group", "Output"]
