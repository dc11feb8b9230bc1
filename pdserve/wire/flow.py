"""Credit: how much of each stream, and of all streams of a peer, may be on its way.

A receiver grants credit; a DATA frame spends its body's length plus `FRAME_COST`, so that one
number bounds bytes and frames. A sender may send while any credit is left, even a frame longer than
it: no stream can stall on a frame that never fits, and a receiver holds at most its grants and one
frame per stream. Credit returns when the consumer has taken half a window.

All grants to one peer come from one `Budget`: however many streams it opens, its data occupies no
more than that. Owned by one `Connection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.limits import FRAME_COST

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["Budget", "Stream", "cost_of"]


def cost_of(body: Bytes) -> int:
    """Credit that a DATA frame with `body` bytes spends."""
    return body + FRAME_COST


class Budget:
    """Credit that may be granted to one peer at a time."""

    __slots__ = ("granted", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.granted = 0

    def take(self, wanted: int, least: int) -> int:
        """As much of `wanted` as there is; 0 if that is less than `least`."""
        available = min(wanted, self.total - self.granted)
        if available < min(least, wanted):
            return 0
        self.granted += available
        return available

    def give(self, amount: int) -> None:
        """Return what was taken."""
        self.granted -= amount
        if self.granted < 0:
            raise AssertionError("more credit returned than was granted")


class Stream:
    """One stream, as both directions of one connection see it.

    Each half ends exactly once: ours when we send END, RESET or a frame flagged LAST, the peer's
    when we receive one. The slot is free when both have ended, and not before: no frame of one
    stream can be taken for a frame of the next.
    """

    __slots__ = (
        "allowance",
        "context",
        "credit",
        "id",
        "listening",
        "receiving",
        "sending",
        "spent",
        "window",
    )

    def __init__(self, stream_id: int, *, credit: int, context: object = None) -> None:
        self.id = stream_id
        self.context = context
        """The owner's."""
        self.sending = True
        """Our half goes on."""
        self.receiving = True
        """The peer's half goes on."""
        self.listening = True
        """What the peer sends is reported; False once we reset or stopped it."""
        self.credit = credit
        """What we may still send; at 0 or below, nothing."""
        self.window = 0
        """What of the budget this stream holds."""
        self.allowance = 0
        """What the peer may still send."""
        self.spent = 0
        """What the consumer has taken since the last grant."""

    @property
    def over(self) -> bool:
        """Both halves have ended."""
        return not (self.sending or self.receiving)

    def refill(self, cost: int) -> int:
        """The consumer took data of `cost`; returns the credit to grant now, often 0."""
        self.spent += cost
        if 2 * self.spent < self.window:
            return 0
        grant, self.spent = self.spent, 0
        self.allowance += grant
        return grant

    def release(self) -> int:
        """The peer's half has ended: returns the share of the budget that nothing occupies.

        What was received and not yet taken stays in `window`; `reclaim` returns it bit by bit.
        """
        occupied = self.window - self.allowance - self.spent if self.listening else 0
        kept = min(max(occupied, 0), self.window)
        freed, self.window = self.window - kept, kept
        return freed

    def reclaim(self, cost: int) -> int:
        """The consumer took data of `cost` after `release`; returns the share that frees."""
        freed = min(cost, self.window)
        self.window -= freed
        return freed
