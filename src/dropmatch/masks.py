"""Counter-based random numbers: what is drawn depends on its key alone.

A dropout mask is a pure function f(seed, position, head, unit), so a verdict does not depend on the batch,
the order of the rows, the chunking, the tensor-parallel rank or the engine. The generator is Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with 64-bit integer tensor
operations, so that CPU and CUDA give the same bits.

    seed      64 bits, the sequence's own                      -> key
    position  index in the sequence of the token being judged  -> counter word 2
    head      0 .. K-1                                         -> counter word 1
    unit      what is drawn: a component of the hidden state,
              a token of the support; four a block             -> counter word 0 and lane
    stream    what the numbers are for                         -> counter word 3
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Stream(IntEnum):
    """Independent streams under one seed."""

    DROPOUT = 0
    ACCEPT = 1
    TARGET_TOKEN = 2
    DRAFT_TOKEN = 3
    GAUSSIAN = 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2**32), broadcastable to one shape [...].
        key: two such tensors.

    Returns:
        Four int64 tensors [...] of values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps modulo 2**64, and bits 32..63 of the wrapped product are those of the unsigned one
        product0, product1 = c0 * _ROUND_MULTIPLIERS[0], c2 * _ROUND_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _WORD, (k1 + _KEY_INCREMENTS[1]) & _WORD
    return torch.broadcast_tensors(c0, c1, c2, c3)


def random_words(stream: Stream, seeds: Tensor, positions: Tensor, heads: int, units: int) -> Tensor:
    """32-bit words keyed by (seed, position, head, unit).

    Args:
        stream: what the numbers are for.
        seeds: [N] int64, any values.
        positions: [N] int64, in [0, 2**32).
        heads: K.
        units: d.

    Returns:
        [N, K, d] int64, values in [0, 2**32).
    """
    device = seeds.device
    block = torch.arange((units + 3) // 4, device=device).view(1, 1, -1)  # [1, 1, ceil(d/4)]
    head = torch.arange(heads, device=device).view(1, -1, 1)  # [1, K, 1]
    position = positions.view(-1, 1, 1) & _WORD  # [N, 1, 1]
    purpose = torch.full((1, 1, 1), int(stream), dtype=torch.int64, device=device)
    key = (seeds.view(-1, 1, 1) & _WORD, (seeds.view(-1, 1, 1) >> 32) & _WORD)
    words = torch.stack(philox4x32((block, head, position, purpose), key), dim=-1)  # [N, K, ceil(d/4), 4]
    return words.flatten(2)[..., :units]


def dropout_masks(seeds: Tensor, positions: Tensor, heads: int, units: int, dropout: float) -> Tensor:
    """Keep-masks m ~ Bernoulli(1 - p) of equation 1, nested in K: head i is the same whatever K is.

    Args:
        seeds: [N] int64, one a row: the seed of the row's sequence.
        positions: [N] int64: index in its sequence of the token being judged.
        heads: K, number of heads.
        units: d, size of the hidden state.
        dropout: p in [0, 1).

    Returns:
        [N, K, d] bool, True where a unit is kept.
    """
    return random_words(Stream.DROPOUT, seeds, positions, heads, units) >= round(dropout * 2**32)


def normals(stream: Stream, seeds: Tensor, positions: Tensor, heads: int, units: int) -> Tensor:
    """Standard normal numbers keyed by (seed, position, head, unit), nested in K and in the units.

    Box-Muller in fp64 on pairs of words, one pair for two units.

    Args:
        stream: what the numbers are for.
        seeds: [N] int64.
        positions: [N] int64.
        heads: K.
        units: S, how many numbers a head.

    Returns:
        [N, K, S] fp32.
    """
    words = random_words(stream, seeds, positions, heads, units + units % 2)
    first, second = ((words.double() + 0.5) / 2**32).unflatten(2, (-1, 2)).unbind(dim=3)  # [N, K, ceil(S/2)]
    radius, angle = (-2.0 * first.log()).sqrt(), 2.0 * math.pi * second
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=3)
    return pairs.flatten(2)[..., :units].float()


def uniforms(stream: Stream, seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in (0, 1) for each (seed, position): [N] int64, [N] int64 -> [N] fp64."""
    words = random_words(stream, seeds, positions, 1, 2).squeeze(1)  # [N, 2]
    # 52 bits and half a step, which fp64 holds exactly: never 0 or 1, so an inverse CDF finds a token with mass
    return ((words[:, 0] << 20 | words[:, 1] >> 12).double() + 0.5) / 2**52
