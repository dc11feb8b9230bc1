"""Names for what one side of a connection starts: slots, with generations to tell uses apart.

    bit 31         30 .. 16     15 .. 0
    who started    generation   slot, from 1

A slot is given back when both sides are done with it; the generation makes a frame that comes later
all the same a violation instead of a mix-up. Owned by one `Connection`.
"""

from __future__ import annotations

from typing import Final

from pdserve.wire.limits import MAX_STREAMS

__all__ = ["ACCEPTORS", "GENERATION", "Slots"]

ACCEPTORS: Final = 1 << 31
"""Set in the ids that the accepting side gives out."""

GENERATION: Final = 1 << 16
"""Added to an id for the next use of its slot. What then reaches `Slots.end` wraps, by `ACCEPTORS`:
below the generation's bits nothing changes."""


class Slots:
    """The ids of one side. `take` the most recently returned first: its table entries are warm."""

    __slots__ = ("_fresh", "end", "free", "side")

    def __init__(self, *, dialled: bool) -> None:
        self.side = 0 if dialled else ACCEPTORS
        self.end = self.side + ACCEPTORS
        """All ids of this side are less."""
        self.free: list[int] = []
        """Ids to give out next. The hottest paths do `take` and `give` on it themselves."""
        self._fresh = 1

    def take(self) -> int:
        """An id that nothing under way has. Raises `IndexError` when all slots are in use."""
        if self.free:
            return self.free.pop()
        if self._fresh >= MAX_STREAMS:
            raise IndexError("every slot of the connection is in use")
        self._fresh += 1
        return self.side | (self._fresh - 1)

    def give(self, stream_id: int) -> None:
        """Both sides are done with `stream_id`; its slot returns under the next generation."""
        following = stream_id + GENERATION
        self.free.append(following if following < self.end else following - ACCEPTORS)

    def ours(self, stream_id: int) -> bool:
        """Whether this side gives out ids like it."""
        return stream_id & ACCEPTORS == self.side
