"""Evidence to the heads that judge it, in the way that the settings ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dropmatch.config import AcceptanceConfig
from dropmatch.heads.cluster import Cluster
from dropmatch.heads.dropout import DRAFT_SHORTLIST, dropout_cluster, uses_shortlist
from dropmatch.heads.gaussian import DRAFT_TOKENS, gaussian_cluster, gaussian_sets
from dropmatch.heads.head import Head
from dropmatch.heads.support import Distributions, common_vocab

if TYPE_CHECKING:
    from dropmatch.acceptance.evidence import Evidence

HEAD_SETS = 64  # G: over how many sets of K heads a denoised verdict takes the probability of acceptance
# bound on the temporaries of one chunk of rows; a row over the full vocabulary takes about 30 bytes a logit
CHUNK_BYTES = 64 << 20
BYTES_PER_LOGIT = 30


def build_cluster(evidence: Evidence, config: AcceptanceConfig, head: Head) -> Cluster:
    """K heads for each of N rows.

    Raises:
        SettingError: a shortlist is asked of a head whose rows cannot be gathered.
    """
    make = gaussian_cluster if draws_gaussian(config, head) else dropout_cluster
    return make(evidence, config, head)


def build_sets(
    evidence: Evidence, distributions: Distributions, config: AcceptanceConfig, head: Head
) -> Iterator[tuple[int, Cluster]]:
    """G sets of K heads for each of N rows, whose distributions are known, the same for any seed and position.

    Yields:
        How many sets, and their cluster of N * sets rows, those of one evidence row together; G sets in all.

    Raises:
        SettingError: a shortlist is asked of a head whose rows cannot be gathered.
    """
    if draws_gaussian(config, head):
        yield HEAD_SETS, gaussian_sets(evidence, distributions, config, head, HEAD_SETS)
        return
    for number in range(HEAD_SETS):
        fixed = replace(evidence, positions=torch.zeros_like(evidence.positions))
        fixed = replace(fixed, seeds=torch.full_like(evidence.seeds, number))
        yield 1, dropout_cluster(fixed, config, head)


def draws_gaussian(config: AcceptanceConfig, head: Head) -> bool:
    """Whether heads are drawn from the Gaussian; without rows to gather there are dropout heads only."""
    return config.wants_gaussian and head.can_gather


def check_heads(config: AcceptanceConfig, head: Head) -> str | None:
    """Whether a head can serve the settings.

    Returns:
        What is done instead of what was asked for, to be told to the user; None if nothing is.

    Raises:
        SettingError: a shortlist is asked of a head whose rows cannot be gathered.
    """
    uses_shortlist(config, head, head.vocab_size)
    asked = config.heads_mode == "gaussian" or config.verdict == "denoised"
    if head.can_gather or not (asked and config.wants_gaussian):
        return None
    text = (
        "the rows of this LM head cannot be gathered (it is quantised, or wrapped by an adapter), so its heads are "
        "dropout heads over the full vocabulary and not Gaussian ones"
    )
    if config.verdict == "denoised":
        text += f", {HEAD_SETS} x K of them for each denoised verdict: verdict='sampled' is much cheaper here"
    return text


def rows_per_chunk(evidence: Evidence, config: AcceptanceConfig, head: Head | None) -> int:
    """How many rows to judge at once so that the temporaries stay near CHUNK_BYTES; without a head, no heads."""
    vocab, units = common_vocab(evidence), evidence.hidden.shape[1]
    if head is None:
        row = vocab * BYTES_PER_LOGIT
    elif draws_gaussian(config, head):
        heads = config.heads * (HEAD_SETS if config.denoises(head.can_gather) else 1)
        row = (config.gaussian_tokens + DRAFT_TOKENS) * (heads * BYTES_PER_LOGIT + units * 10) + vocab * 16
    elif uses_shortlist(config, head, vocab):
        size = config.shortlist_size + DRAFT_SHORTLIST
        row = size * (config.heads * BYTES_PER_LOGIT + units * evidence.hidden.element_size()) + vocab * 16
    else:
        row = vocab * config.heads * BYTES_PER_LOGIT
    return max(1, CHUNK_BYTES // row)
