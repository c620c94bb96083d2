"""Words that stand for something in place of a model, where a name is asked for."""

PROMPT_LOOKUP = "prompt-lookup"  # a drafter without a model
NO_DRAFT = "none"  # no drafter
DRAFT_WEIGHTS = ("auto", "dense", "int4")
