"""Evidence of real rounds in a file, and any rule asked about it again without the models."""

from dropmatch.evaluation.lab.record import Record
from dropmatch.evaluation.lab.recorder import Recorder
from dropmatch.evaluation.lab.replay import Replayed, compare, replay, settings_of

__all__ = ["Record", "Recorder", "Replayed", "compare", "replay", "settings_of"]
