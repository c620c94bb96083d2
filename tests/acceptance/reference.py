"""The acceptance rules once more, slowly: plain loops and fp64, from the paper's equations and not from the code.

The generator is written from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); how its
counter is laid out is the interface that `dropmatch.masks` documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORD = 2**32


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * c[2], WORD)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def word(stream: int, seed: int, position: int, head: int, unit: int) -> int:
    """The 32-bit word of one unit of one head."""
    unsigned = seed % 2**64
    return philox((unit // 4, head, position, stream), (unsigned % WORD, unsigned // WORD))[unit % 4]


def mask(seed: int, position: int, head: int, units: int, p: float) -> np.ndarray:
    """Equation 1: a unit is kept with probability 1 - p. [d] of 0 and 1."""
    return np.array([1.0 if word(0, seed, position, head, j) >= p * WORD else 0.0 for j in range(units)])


def dropped(h: np.ndarray, seed: int, position: int, heads: int, p: float) -> np.ndarray:
    """Equation 2: [d] -> [K, d]."""
    return np.stack([h * mask(seed, position, i, len(h), p) / (1.0 - p) for i in range(heads)])


def normal(seed: int, position: int, head: int, unit: int) -> float:
    """Box-Muller: two words make the normal numbers of two units."""
    first, second = ((word(4, seed, position, head, unit // 2 * 2 + i) + 0.5) / WORD for i in (0, 1))
    wave = math.sin if unit % 2 else math.cos
    return math.sqrt(-2.0 * math.log(first)) * wave(2.0 * math.pi * second)


def covariance(h: np.ndarray, rows: np.ndarray, p: float) -> np.ndarray:
    """Covariance of the logits of dropped-out copies of h, unit by unit: [d], [S, d] -> [S, S]."""
    total = np.zeros((len(rows), len(rows)))
    for j in range(len(h)):
        # variance of h_j m / (1 - p), m = 1 with probability 1 - p
        total += h[j] ** 2 * p / (1.0 - p) * np.outer(rows[:, j], rows[:, j])
    return total


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) if x > -math.inf else 0.0 for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def js(p: Sequence[float], q: Sequence[float]) -> float:
    """Half of KL(p || m) plus half of KL(q || m), m the mean; natural logarithm."""
    terms = []
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        terms += [x * math.log(x / m) for x in (a, b) if x > 0]
    return max(0.0, math.fsum(terms) / 2)


def argmax(values: Sequence[float]) -> int:
    """The lowest index on a tie."""
    return max(range(len(values)), key=lambda i: (values[i], -i))


def majority(tokens: Sequence[int], centroid_logits: Sequence[float]) -> int:
    """Equation 7: the commonest token; among equally common ones that of the higher centroid logit."""
    counts = Counter(tokens)
    most = max(counts.values())
    return max((t for t in counts if counts[t] == most), key=lambda t: centroid_logits[t])


@dataclass
class Answer:
    """What a rule should say about one row."""

    naive: bool
    js: bool
    reason: str
    distance: float
    radius: float
    uniform: float
    votes: int
    probability: float

    @property
    def clear(self) -> bool:
        """Whether equation 6 is so far from equality that rounding cannot turn it."""
        return abs(self.distance - self.radius) > 1e-5 + 1e-4 * self.radius


def answer(head_logits: np.ndarray, draft_logits: np.ndarray, token: int, floor: float = 0.0) -> Answer:
    """Equations 4 to 7 and Algorithm 1 for one row: [K, V], [V]."""
    probabilities = [softmax(row) for row in head_logits.tolist()]
    centroid_logits = [math.fsum(column) / len(column) if min(column) > -math.inf else -math.inf
                       for column in head_logits.T.tolist()]  # fmt: skip
    centroid = softmax(centroid_logits)
    distance = js(softmax(draft_logits.tolist()), centroid)
    radius = max(js(p, centroid) for p in probabilities)
    uniform = js(softmax([0.0 if x > -math.inf else x for x in centroid_logits]), centroid)
    tokens = [argmax(p) for p in probabilities]
    enough = centroid[token] >= floor
    inside, is_majority = distance <= radius, majority(tokens, centroid_logits) == token
    accept = enough and (inside or is_majority)
    reason = "rejected" if not accept else "js" if inside else "majority"
    return Answer(
        naive=enough and token in tokens,
        js=accept,
        reason=reason,
        distance=distance,
        radius=radius,
        uniform=uniform,
        votes=tokens.count(token),
        probability=centroid[token],
    )
