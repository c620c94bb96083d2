"""Distributions over the vocabulary, and their likeliest tokens.

What has the size of the vocabulary is read in as few passes as can be: they are most of what a verdict costs.

N rows, S tokens in a support, V in the vocabulary.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

BLOCK = 64  # tokens whose maximum is looked at first when the likeliest are searched
CPU_ROWS = 4  # the most rows of a vocabulary's size that are worked on at once on a CPU


def likeliest_token(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id on a tie: [N, V] -> [N] int64."""
    return likeliest_and_mass(logits)[0]


def likeliest_and_mass(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and a lower bound of its log-sum-exp: [N, V] -> [N] int64, [N] fp32.

    The former is `argmax`, which on a CPU reads a vocabulary several times as slowly as the maxima of its blocks are
    found. The bound is the log-sum-exp of those maxima: mostly close, since likely tokens seldom share a block.
    """
    vocab = logits.shape[1]
    blocks, rest = divmod(vocab, BLOCK)
    if logits.device.type != "cpu" or blocks < 2:
        token = logits.argmax(dim=1, keepdim=True)
        return token.squeeze(1), logits.gather(1, token).squeeze(1).float()
    peaks = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(dim=2)  # [N, blocks]
    if rest:
        peaks = torch.cat([peaks, logits[:, -rest:].amax(dim=1, keepdim=True)], dim=1)
    first = peaks.argmax(dim=1, keepdim=True) * BLOCK  # [N, 1]
    # what would be behind the last token is the last token, which the real one precedes
    ids = (first + torch.arange(BLOCK, device=logits.device)).clamp_max(vocab - 1)  # [N, BLOCK]
    token = ids.gather(1, logits.gather(1, ids).argmax(dim=1, keepdim=True)).squeeze(1)
    return token, peaks.float().logsumexp(dim=1)


class Vocabulary:
    """One distribution over the vocabulary for N rows.

    Args:
        logits: [N, V].
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        # on a CPU a few rows at once: what is larger leaves the cache
        self._size = CPU_ROWS if logits.device.type == "cpu" else max(1, logits.shape[0])
        self._blocks, self._rest = divmod(logits.shape[1], BLOCK)

    @cached_property
    def _read(self) -> tuple[Tensor, list[Tensor]]:
        """What is found in one pass: the largest logit of each block of BLOCK tokens, [N, blocks], and the softmax of
        some rows at a time, [n, V] fp32 each.
        """
        peaks, probs = [], []
        for part in self.logits.split(self._size):
            logits = part.float()  # bf16 is reduced much more slowly
            peaks.append(logits[:, : self._blocks * BLOCK].unflatten(1, (self._blocks, BLOCK)).amax(dim=2))
            probs.append(torch.softmax(logits, dim=1))  # faster than torch's exponential alone
        return torch.cat(peaks), probs

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids of the likeliest tokens, first to last, the lower id first on a tie: [N, m] fp32, [N, m]."""
        ids = self._candidates(count)
        values = self._at(ids)
        if ids.shape[1] > count:
            # the lower id first needs a stable sort by value of ids in order; of the few that are left only
            best = values.topk(count, dim=1, sorted=False).indices
            ids = ids.gather(1, best).sort(dim=1).values
            values = self._at(ids)
        values, order = values.sort(dim=1, descending=True, stable=True)
        return values, ids.gather(1, order)

    def split(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits on a support that has the likeliest token, and log-sum-exp of the rest: [N, S] -> [N, S], [N] fp32."""
        values = self._at(token_ids)
        likeliest = values.argmax(dim=1, keepdim=True)  # [N, 1]
        known, outside = [], []
        parts = (token_ids.split(self._size), likeliest.split(self._size))
        for probs, ids, best in zip(self._read[1], *parts, strict=True):
            inside = probs.gather(1, ids)
            known.append(inside.gather(1, best))
            outside.append(_row_sums(probs.scatter_(1, ids, 0.0)))
            probs.scatter_(1, ids, inside)  # as they were
        # log-sum-exp of all is what a token has, less the logarithm of its probability
        tail = values.gather(1, likeliest) + (torch.cat(outside) / torch.cat(known)).log()  # [N, 1]
        return values, torch.where(tail.isnan(), -torch.inf, tail).squeeze(1)

    def probability(self, tokens: Tensor) -> Tensor:
        """[N] -> [N] fp32."""
        parts = zip(self._read[1], tokens[:, None].split(self._size), strict=True)
        return torch.cat([probs.gather(1, token) for probs, token in parts]).squeeze(1)

    def _candidates(self, count: int) -> Tensor:
        """Ids among which the likeliest are; in order if they are m: [N, m or more].

        The m blocks of the largest maxima hold them, so that most of the vocabulary is read only once.
        """
        vocab, device = self.logits.shape[1], self.logits.device
        if self._blocks <= 2 * count:
            return torch.arange(vocab, device=device).expand(self.logits.shape[0], -1)
        chosen = self._read[0].topk(count, dim=1, sorted=False).indices  # [N, m]
        ids = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)  # [N, m * BLOCK]
        if self._rest:
            last = torch.arange(vocab - self._rest, vocab, device=device).expand(self.logits.shape[0], -1)
            ids = torch.cat([ids, last], dim=1)
        return ids

    def _at(self, token_ids: Tensor) -> Tensor:
        """[N, n] -> [N, n] fp32."""
        return self.logits.gather(1, token_ids).float()


def _row_sums(values: Tensor) -> Tensor:
    """[n, V] -> [n, 1]; on a CPU one by one, since a row alone is added up in another order than one of several."""
    if values.device.type != "cpu":
        return values.sum(dim=1, keepdim=True)
    return torch.stack([row.sum() for row in values])[:, None]
