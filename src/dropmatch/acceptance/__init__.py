"""The acceptance core: pure functions of evidence, one rule a file in `rules`, a registry by name."""

from dropmatch.acceptance.evidence import EXACT, REJECTED, SAMPLED, Evidence, Verdict, reason_code, reason_name
from dropmatch.acceptance.registry import Parameter, Rule, get_rule, register, rule_names

from dropmatch.acceptance import rules  # isort: skip  (importing it registers the built-in ones)
from dropmatch.acceptance.judging import judge  # isort: skip

__all__ = [
    "EXACT",
    "REJECTED",
    "SAMPLED",
    "Evidence",
    "Parameter",
    "Rule",
    "Verdict",
    "get_rule",
    "judge",
    "reason_code",
    "reason_name",
    "register",
    "rule_names",
    "rules",
]
