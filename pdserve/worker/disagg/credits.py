"""Computes how many more prompts a prefill worker offers to take.

Enough that the engine never waits for the next prompt, and no more: a prompt in the queue can still
go to another worker, a claimed one cannot. Pure; `prefill_handler` owns one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineCapabilities

__all__ = ["Credits"]

_AHEAD: Final = 2
"""Full steps of the engine that may be in hand,"""
_AT_LEAST: Final = 2
"""and this many prompts however long: one computes while the next is opened."""
_NEWEST: Final = 0.1
"""Weight of one prompt in their mean length."""


class Credits:
    """See above."""

    def __init__(self) -> None:
        self._length = 0.0
        """Of a prompt, lately; 0: none has come yet."""

    def took(self, tokens: int) -> None:
        """A prompt of this length was taken."""
        before = self._length or tokens
        self._length = before + _NEWEST * (tokens - before)

    def left(self, prompts: int, uncomputed: int, capabilities: EngineCapabilities) -> int:
        """With this many in hand, of so many uncomputed tokens."""
        step = capabilities.max_batch_tokens
        room = _AHEAD * step - uncomputed
        usual = max(1.0, self._length or step)
        wanted = max(_AT_LEAST - prompts, int(room / usual) if room > 0 else 0)
        return max(0, min(wanted, capabilities.max_sequences - prompts))
