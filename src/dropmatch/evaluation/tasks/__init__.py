"""Tasks: where prompts come from, and how texts are scored. One kind a file."""

from dropmatch.evaluation.tasks.base import Example, Task, digest, following
from dropmatch.evaluation.tasks.harness import HarnessTask
from dropmatch.evaluation.tasks.prompts import Prompts

__all__ = ["Example", "HarnessTask", "Prompts", "Task", "digest", "following"]
