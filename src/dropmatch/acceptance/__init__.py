"""The acceptance core: pure functions of evidence, one rule a file, a registry by name."""

from dropmatch.acceptance.evidence import EXACT, REJECTED, SAMPLED, Evidence, Verdict, reason_code, reason_name
from dropmatch.acceptance.registry import Rule, get_rule, register, rule_names

# importing a rule's module registers it
from dropmatch.acceptance import js, naive, strict  # isort: skip
from dropmatch.acceptance.judging import judge  # isort: skip

__all__ = [
    "EXACT",
    "REJECTED",
    "SAMPLED",
    "Evidence",
    "Rule",
    "Verdict",
    "get_rule",
    "judge",
    "js",
    "naive",
    "reason_code",
    "reason_name",
    "register",
    "rule_names",
    "strict",
]
