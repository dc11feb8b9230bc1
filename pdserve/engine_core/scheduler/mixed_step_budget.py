"""Sets how many prompt tokens a step computes beside decoding streams, so that the streams' tokens
come within a target time. Pure.

A step is taken to last as long as decoding alone, and so much more for each prompt token:

    seconds = decode + per_token * prompt tokens

Steps without prompts tell the first, steps with both the second. It rises while a long prompt is
computed, since its later tokens have more to attend to: what is higher than before counts at once,
what is lower counts little by little. Where decoding alone takes as long as the target, prompts
still go on, by the least number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["MixedStepBudget"]

_LEAST: Final = 64
"""Smallest budget in tokens."""
_FIRST: Final = 256
"""Budget of the first step, which nothing is known of."""
_SHARE: Final = 0.9
"""Part of the target that a step is planned to take."""
_NEWEST: Final = 0.2
"""Weight of the newest step in the means."""


class MixedStepBudget:
    """Adapts the budget of one core; `tokens` is the present one."""

    def __init__(self, target: Seconds, limit: int) -> None:
        """`target`: longest time between two tokens of a stream; 0: none. `limit`: most tokens."""
        self._target, self._limit = target, limit
        self._decode: Seconds = 0.0
        self._per_token: Seconds = 0.0
        self.tokens = min(limit, _FIRST) if target else limit

    def note(self, prompt_tokens: int, took: Seconds) -> None:
        """Take note of a step that decoded streams and computed so many tokens of prompts."""
        if not self._target:
            return
        if prompt_tokens <= 0:
            self._decode += (took - self._decode) * (_NEWEST if self._decode else 1.0)
            return
        cost = max(0.0, took - self._decode) / prompt_tokens
        newest = 1.0 if cost > self._per_token else _NEWEST
        self._per_token += (cost - self._per_token) * newest
        self.tokens = self._fitting()

    def _fitting(self) -> int:
        room = max(0.0, _SHARE * self._target - self._decode)
        most = min(self._limit, 2 * self.tokens)
        fits = int(room / self._per_token) if self._per_token else most
        return min(most, max(min(_LEAST, self._limit), fits))
