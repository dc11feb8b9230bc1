"""Computes scores from the vectors of a request's prompts, and their order.

Pure: engines' bytes in, numbers out.
"""

from __future__ import annotations

import math
import sys
from array import array
from operator import mul
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """How scores are sent as a ranking."""

    texts: tuple[str, ...] | None
    """The documents that results show; None: they show none."""
    top_n: int
    """Number of results; 0: all."""

    def order(self, scores: Sequence[float]) -> list[int]:
        """The places of the best scores, best first; of equal ones the first."""
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return order[: self.top_n] if self.top_n else order


class ScoreFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors become the scores of an answer."""

    queries: int
    """Number of leading prompts that the others are compared with, by the cosine of their vectors;
    0: each prompt is a pair, and its vector is its score's logit."""
    sigmoid: bool
    """True if a logit is sent as a probability."""
    ranking: Ranking | None
    """None: scores are sent in the order of the pairs."""

    @property
    def repeats(self) -> Bytes:
        """Bytes of the request that the answer repeats, at most four per character."""
        texts = None if self.ranking is None else self.ranking.texts
        return 4 * sum(map(len, texts or ()))

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """The score of each pair."""
        numbers = list(map(_numbers, vectors))
        if self.queries:
            return _cosines(numbers[: self.queries], numbers[self.queries :])
        logits = [vector[0] for vector in numbers]
        return list(map(_sigmoid, logits)) if self.sigmoid else logits


def _numbers(vector: bytes) -> array[float]:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _cosines(queries: Sequence[array[float]], others: Sequence[array[float]]) -> list[float]:
    sizes = [math.hypot(*query) for query in queries]
    found = []
    for index, other in enumerate(others):
        place = index if len(queries) > 1 else 0
        size = sizes[place] * math.hypot(*other)
        # Zeros have no direction.
        cosine = sum(map(mul, queries[place], other)) / size if size else 0.0
        found.append(max(-1.0, min(1.0, cosine)))
    return found


def _sigmoid(logit: float) -> float:
    # Both forms are the same number; neither overflows.
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
