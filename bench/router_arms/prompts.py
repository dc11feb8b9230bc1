"""Prompts as routers see them: hashes of blocks, whose first half is shared with others."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

__all__ = ["BLOCK", "NAME", "Prompts"]

BLOCK: Final = 32
"""Tokens of a block."""
_FAMILIES: Final = 32
NAME: Final = 8
_AGAIN: Final = 0.25
_LATELY: Final = 256


class Prompts:
    """Prompts of one length."""

    def __init__(self, blocks: int, *, seed: int) -> None:
        self._random = Random(seed)
        self._rest = NAME * (blocks - blocks // 2)
        self._lately: deque[bytes] = deque(maxlen=_LATELY)
        self.prefixes = [self._random.randbytes(NAME * (blocks // 2)) for _ in range(_FAMILIES)]

    def draw(self) -> bytes:
        """Draws a shared beginning and a new end, or repeats a recent prompt."""
        if self._lately and self._random.random() < _AGAIN:
            return self._random.choice(self._lately)
        names = self._random.choice(self.prefixes) + self._random.randbytes(self._rest)
        self._lately.append(names)
        return names
