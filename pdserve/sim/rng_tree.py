"""Derives independent random sources from one seed, one per label.

A source depends only on the seed and its label. So one more draw in one part of a simulation does
not change the others, and a failing run stays reproducible while code is added to debug it.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

__all__ = ["RngTree"]


class RngTree:
    """Makes random sources; the same label gives the same source again."""

    def __init__(self, seed: int, path: str = "") -> None:
        self.seed = seed
        self._path = path

    def fork(self, *labels: object) -> Random:
        """The source for one purpose."""
        return Random(self._number(labels))

    def below(self, *labels: object) -> RngTree:
        """A tree of its own for one part of the simulation."""
        return RngTree(self.seed, f"{self._path}/{_joined(labels)}")

    def _number(self, labels: tuple[object, ...]) -> int:
        text = f"{self.seed}{self._path}/{_joined(labels)}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _joined(labels: tuple[object, ...]) -> str:
    return "/".join(map(str, labels))
