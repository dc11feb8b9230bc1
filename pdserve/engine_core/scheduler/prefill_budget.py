"""Sets how many prompt tokens a step computes (chunked prefill), so that steps stay short. Pure.

A core takes commands between steps only: until a step ends, a cancelled request keeps its blocks
and running streams get no tokens. On a GPU the largest step takes a fraction of a second. On a CPU
2048 tokens of a small model can take many, so the budget follows the duration of past steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["TARGET_STEP_SECONDS", "PrefillBudget"]

TARGET_STEP_SECONDS: Final[Seconds] = 0.6
"""Longest step aimed at: a request that is cancelled during one should be gone within a second."""
_LEAST: Final = 64
"""Smallest budget in tokens. Shorter steps mostly read weights, so they are also not measured."""
_FIRST: Final = 256
"""First budget of a slow device, in tokens."""
_SPARE: Final = 0.8
"""Share of the number of tokens for the target time up to which the budget grows."""


class PrefillBudget:
    """Adapts the prefill budget of one core; `tokens` is the present one."""

    def __init__(self, limit: int, *, slow: bool) -> None:
        """`limit` is the largest budget in tokens; a `slow` device begins with a smaller one."""
        self.tokens = min(limit, _FIRST) if slow else limit
        self._limit = limit

    def note(self, tokens: int, took: Seconds) -> None:
        """Take note of a step that computed `tokens` tokens in `took` seconds."""
        if tokens < min(_LEAST, self._limit):
            return
        fits = int(tokens * TARGET_STEP_SECONDS / took) if took > 0 else self._limit
        if took > TARGET_STEP_SECONDS:
            self.tokens = min(self._limit, max(_LEAST, fits))
        else:
            most = min(int(_SPARE * fits), 2 * self.tokens)
            self.tokens = min(self._limit, max(self.tokens, most))
