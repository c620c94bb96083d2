"""HumanEval and HumanEval+: programs that a model writes, and what comes of running them."""

from dropmatch.evaluation.tasks.humaneval.judging import Limits, UnconfinedWarning
from dropmatch.evaluation.tasks.humaneval.task import HumanEval

__all__ = ["HumanEval", "Limits", "UnconfinedWarning"]
