"""How many prompt tokens a step computes, so that it stays short. Pure.

Between two steps a core hears nothing: a request that is cancelled keeps its blocks until the step
has ended, and running streams wait as long. On a GPU the largest step takes a fraction of a second.
On a CPU 2048 tokens of a small model can take many, so the size follows what steps have taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["TARGET", "StepPace"]

TARGET: Final[Seconds] = 0.6
"""For a step: what is cancelled during one is to be gone within a second."""
_LEAST: Final = 64
"""Tokens: with fewer, weights are read too often for what is computed with them. Steps of fewer
tokens tell nothing, since that is what they spend their time with."""
_FIRST: Final = 256
"""Where a slow device begins."""
_SPARE: Final = 0.8
"""It grows to this share of what would take as long as it may."""


class StepPace:
    """Follows one core's steps."""

    def __init__(self, limit: int, *, slow: bool) -> None:
        """`limit` tokens at most; a `slow` device begins with less."""
        self.tokens = min(limit, _FIRST) if slow else limit
        self._limit = limit

    def note(self, tokens: int, took: Seconds) -> None:
        """A step has computed so many tokens in so long."""
        if tokens < min(_LEAST, self._limit):
            return
        fits = int(tokens * TARGET / took) if took > 0 else self._limit
        if took > TARGET:
            self.tokens = min(self._limit, max(_LEAST, fits))
        else:
            most = min(int(_SPARE * fits), 2 * self.tokens)
            self.tokens = min(self._limit, max(self.tokens, most))
