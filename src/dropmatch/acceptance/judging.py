"""Evidence to verdict: builds the heads that a rule needs, a few rows at a time, and asks it."""

from __future__ import annotations

from dataclasses import replace

import torch

from dropmatch.acceptance.denoising import denoised
from dropmatch.acceptance.evidence import Evidence, Verdict
from dropmatch.acceptance.registry import Rule, get_rule
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import Head, build_cluster, common_vocab, rows_per_chunk


@torch.no_grad()
def judge(evidence: Evidence, config: AcceptanceConfig, head: Head | None = None) -> Verdict:
    """Ask the rule about every row of the evidence.

    Rows are judged in chunks, so that no tensor of N × K × V elements is ever held; a verdict does not depend
    on the chunking.

    Args:
        evidence: N rows, N ≥ 0.
        config: rule and settings.
        head: the target's LM head; may be None for rules that look at no heads.

    Returns:
        The verdict on N rows.

    Raises:
        SettingError: the rule needs a head, a draft distribution or the rest of the draft, which is not there, or a
            shortlist is asked of a head whose rows cannot be gathered.
    """
    rule = get_rule(config.rule)
    rule.check_drafter(evidence.draft_logits is not None)
    if rule.needs_heads and head is None:
        raise SettingError(f"rule {rule.name!r} needs the target's LM head")
    if rule.needs_block and evidence.followed is None:
        raise SettingError(f"rule {rule.name!r} looks at what follows in the draft, which this evidence does not say")
    # a placeholder (-1) or a token that the target does not know is never accepted and never indexed with
    vocab = common_vocab(evidence)
    allowed = (evidence.draft_tokens >= 0) & (evidence.draft_tokens < vocab)  # [N]
    if evidence.allowed is not None:
        allowed = allowed & evidence.allowed
    if evidence.bias is not None:
        banned = evidence.bias[:, :vocab].gather(1, evidence.draft_tokens.clamp(0, vocab - 1)[:, None]).isneginf()
        allowed = allowed & ~banned.squeeze(1)
    evidence = replace(evidence, draft_tokens=evidence.draft_tokens.clamp(0, vocab - 1))

    if len(evidence) == 0:
        return Verdict.blank(allowed, "exact")
    used = head if rule.needs_heads else None
    size = rows_per_chunk(evidence, config, used)
    parts = [_judge(rule, evidence.rows(slice(i, i + size)), config, used) for i in range(0, len(evidence), size)]
    return Verdict.join(parts).only(allowed)


def _judge(rule: Rule, rows: Evidence, config: AcceptanceConfig, head: Head | None) -> Verdict:
    """The verdict on a few rows; their draft tokens are in the common vocabulary."""
    if head is None:
        return rule.judge(rows, None, config)
    basis = rows if rule.needs_draft_distribution else _without_draft(rows, common_vocab(rows))
    if config.denoises(head.can_gather):
        return denoised(rule, basis, config, head)
    return rule.judge(rows, build_cluster(basis, config, head), config)


def _without_draft(evidence: Evidence, vocab: int) -> Evidence:
    """What heads are made from where no one looks at the draft's distribution, which costs time."""
    bias = None if evidence.bias is None else evidence.bias[:, :vocab]
    return replace(evidence, clean_logits=evidence.clean_logits[:, :vocab], draft_logits=None, bias=bias)
