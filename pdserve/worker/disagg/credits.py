"""Computes how many more prompts a prefill worker offers to take.

The offer is large enough that the engine never waits for the next prompt, and no larger: a prompt
in the queue can still go to another worker, a claimed one cannot. Pure; `prefill_handler` owns one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineCapabilities

__all__ = ["Credits"]

_AHEAD: Final = 2
"""A worker claims prompts until it has this many full engine steps of uncomputed tokens."""
_AT_LEAST: Final = 2
"""A worker always claims this many prompts, however long: one computes while the next is opened."""
_NEWEST: Final = 0.1
"""Weight of one prompt in their mean length."""


class Credits:
    """Computes the credits of one prefill worker."""

    def __init__(self) -> None:
        self._length = 0.0
        """Moving average of prompt lengths in tokens; 0: no prompt has come yet."""

    def took(self, tokens: int) -> None:
        """Records that a prompt of this length was claimed."""
        before = self._length or tokens
        self._length = before + _NEWEST * (tokens - before)

    def left(
        self, prompts: int, uncomputed: int, capabilities: EngineCapabilities, share: float = 1.0
    ) -> int:
        """Number of prompts to offer, with `prompts` claimed and `uncomputed` tokens of them to
        compute. `share`: the part of each step that may be spent on them; with less than 1, the
        uncomputed tokens fill no more than that, so that no step has more of them. One prompt is
        claimed however long it is."""
        step = capabilities.max_batch_tokens
        room = (_AHEAD if share >= 1 else share) * step - uncomputed
        usual = max(1.0, self._length or step)
        least = _AT_LEAST if share >= 1 else 1
        wanted = max(least - prompts, int(room / usual) if room > 0 else 0)
        return max(0, min(wanted, capabilities.max_sequences - prompts))
