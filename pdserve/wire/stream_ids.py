"""Assigns stream ids: slots of one side of a connection, with generations.

    bit 31         30 .. 16     15 .. 0
    who started    generation   slot, from 1

A slot is free when both sides are done with it. Its next user has another generation, so a late
frame is detected as a violation and not taken for the next user's. Owned by one `Connection`.
"""

from __future__ import annotations

from typing import Final

from pdserve.wire.limits import MAX_STREAMS

__all__ = ["ACCEPTORS", "GENERATION", "StreamIds"]

ACCEPTORS: Final = 1 << 31
"""Bit set in the ids that the accepting side assigns."""

GENERATION: Final = 1 << 16
"""Added to an id for the next use of its slot. A result that reaches `StreamIds.end` wraps, by
`ACCEPTORS`: the bits below the generation do not change.
"""


class StreamIds:
    """The ids of one side. `take` prefers the id that was returned last, because its table entries
    are probably in the CPU's cache.
    """

    __slots__ = ("_fresh", "end", "free", "side")

    def __init__(self, *, dialled: bool) -> None:
        self.side = 0 if dialled else ACCEPTORS
        self.end = self.side + ACCEPTORS
        """Upper bound (exclusive) of all ids of this side."""
        self.free: list[int] = []
        """Ids to assign next. The hottest paths inline `take` and `give` on it."""
        self._fresh = 1

    def take(self) -> int:
        """Assigns an id that is not in use. Raises `IndexError` when all slots are in use."""
        if self.free:
            return self.free.pop()
        if self._fresh >= MAX_STREAMS:
            raise IndexError("every slot of the connection is in use")
        self._fresh += 1
        return self.side | (self._fresh - 1)

    def give(self, stream_id: int) -> None:
        """Returns `stream_id` after both sides are done; its slot comes back under the next
        generation.
        """
        following = stream_id + GENERATION
        self.free.append(following if following < self.end else following - ACCEPTORS)

    def ours(self, stream_id: int) -> bool:
        """True if this side assigned `stream_id`."""
        return stream_id & ACCEPTORS == self.side
