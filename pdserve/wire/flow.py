"""Credit-based flow control, per stream and per peer.

A receiver grants credit; a DATA frame spends its body's length plus `FRAME_COST`, so that one
number bounds bytes and frames. A sender may send while any credit is left, even a frame that costs
more than that. So no stream stalls on a frame that never fits, and a receiver holds at most its
grants and one frame per stream. Credit returns when the consumer has taken half a window.

All grants to one peer come from one `CreditBudget`, however many streams it opens. Owned by one
`Connection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.limits import FRAME_COST

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["CreditBudget", "StreamState", "cost_of"]


def cost_of(body: Bytes) -> int:
    """Credit that a DATA frame with `body` bytes spends."""
    return body + FRAME_COST


class CreditBudget:
    """Credit that may be granted to one peer at a time."""

    __slots__ = ("granted", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.granted = 0

    def take(self, wanted: int, least: int) -> int:
        """Takes up to `wanted`; 0 if less than `least` is left."""
        available = min(wanted, self.total - self.granted)
        if available < min(least, wanted):
            return 0
        self.granted += available
        return available

    def give(self, amount: int) -> None:
        """Returns credit."""
        self.granted -= amount
        if self.granted < 0:
            raise AssertionError("more credit returned than was granted")


class BodyBudget:
    """Bytes of request bodies that this node has under way for all its peers."""

    __slots__ = ("most", "refused", "used")

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.refused = 0
        """Number of requests refused for a limit on requests, streams or body bytes."""


class StreamState:
    """One stream of a connection, in both directions.

    Each half ends exactly once: our half when this side sends END, RESET or a frame flagged LAST,
    the peer's half when this side receives one. The slot is free only when both halves have ended,
    so that a frame of one stream cannot be taken for a frame of the next.
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
        """The owner's object."""
        self.sending = True
        """True while our half goes on."""
        self.receiving = True
        """True while the peer's half goes on."""
        self.listening = True
        """True while the peer's data is reported; False once this side has aborted or
        refused the stream."""
        self.credit = credit
        """Credit left for sending; at 0 or below nothing may be sent."""
        self.window = 0
        """The stream's part of the budget."""
        self.allowance = 0
        """Credit that the peer has left."""
        self.spent = 0
        """Credit of data taken by the consumer since the last grant."""

    @property
    def over(self) -> bool:
        """True if both halves have ended."""
        return not (self.sending or self.receiving)

    def refill(self, cost: int) -> int:
        """Notes that the consumer took data of `cost`; returns the credit to grant now, often 0."""
        self.spent += cost
        if 2 * self.spent < self.window:
            return 0
        grant, self.spent = self.spent, 0
        self.allowance += grant
        return grant

    def release(self) -> int:
        """Ends the peer's half; returns the unoccupied part of the budget. Data received and not
        yet taken stays in `window`; `reclaim` returns it step by step.
        """
        occupied = self.window - self.allowance - self.spent if self.listening else 0
        kept = min(max(occupied, 0), self.window)
        freed, self.window = self.window - kept, kept
        return freed

    def reclaim(self, cost: int) -> int:
        """Notes data of `cost` taken after `release`; returns the part of the budget that this
        frees.
        """
        freed = min(cost, self.window)
        self.window -= freed
        return freed
