"""What this router has sent to each worker lately: a memory bounded in time and in size.

Two of them exist. One lives for seconds and lets a choice count at once, before the worker's events
say the same. The other lives for minutes: for workers whose engines tell nothing it is all that is
known, and some policies weigh it. Neither knows whether a block is really there.

Time is kept in parts: what is sent again moves to the newest part, and the oldest is dropped whole
when its time has passed or when there is no room. So an entry lives between `(parts - 1) / parts`
of the time and all of it, and what was used least recently goes first. Pure; owned by the index.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.router.index.tree import DEVICE

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.router.bookings import Life
    from pdserve.router.index.slots import Slots
    from pdserve.router.index.tree import Tree

__all__ = ["Memory"]


@dataclass(slots=True)
class _Part:
    """What was sent in a stretch of time."""

    began: Seconds
    slots: dict[Life, int] = field(default_factory=dict)
    blocks: int = 0
    """Taken in, whether or not they are still there."""


class Memory:
    """See above. Its slots are shown in `slots`, so that answers of `tree` include it."""

    def __init__(self, tree: Tree, slots: Slots, *, ttl: Seconds, parts: int, most: int) -> None:
        """`most` blocks in all, counted once for each worker."""
        self._tree = tree
        self._slots = slots
        self._ttl = ttl
        self._most_parts = parts
        self._part_blocks = max(1, most // parts)
        self._parts: deque[_Part] = deque()
        """Newest first."""
        self._retired: deque[int] = deque()
        """Slots that are not shown any more and still hold blocks."""
        self.noted = 0
        """Prompts, ever."""

    def note(self, now: Seconds, life: Life, names: bytes) -> None:
        """This prompt goes there."""
        self.expire(now)
        part = self._newest(now)
        slot = part.slots.get(life)
        if slot is None:
            slot = part.slots[life] = self._slots.take(life.node)
        part.blocks += self._tree.stored(slot, DEVICE, None, names)
        self.noted += 1
        self.reclaim(1)

    def _newest(self, now: Seconds) -> _Part:
        """The part that takes what is sent now."""
        newest = self._parts[0] if self._parts else None
        if (
            newest is None
            or newest.blocks >= self._part_blocks
            or now - newest.began >= self._ttl / self._most_parts
        ):
            self.reclaim(len(self._retired))
            newest = _Part(now)
            self._parts.appendleft(newest)
            if len(self._parts) > self._most_parts:
                self._retire()
        return newest

    def expire(self, now: Seconds) -> None:
        """What is older no longer counts."""
        while self._parts and now - self._parts[-1].began >= self._ttl:
            self._retire()

    def _retire(self) -> None:
        """The oldest part no longer counts; its memory comes back by and by."""
        for slot in self._parts.pop().slots.values():
            self._slots.hide(slot)
            self._retired.append(slot)

    def reclaim(self, workers: int) -> None:
        """Free what retired, of so many workers: a whole part at once would hold up the router."""
        for _ in range(min(workers, len(self._retired))):
            self._end(self._retired.popleft())

    def _end(self, slot: int) -> None:
        self._tree.drop(slot)
        self._slots.give(slot)

    # ------------------------------------------------------------------ what workers say

    def removed(self, life: Life, names: bytes) -> None:
        """The worker has just said that these are gone."""
        for part in self._parts:
            slot = part.slots.get(life)
            if slot is not None:
                self._tree.removed(slot, DEVICE, names)

    def forget(self, life: Life) -> None:
        """The worker is gone, or all that it had."""
        for part in self._parts:
            slot = part.slots.pop(life, None)
            if slot is not None:
                self._end(slot)

    # ------------------------------------------------------------------ looking

    def blocks(self, life: Life) -> int:
        """Remembered of this worker; what is in two parts counts twice."""
        found = (part.slots.get(life) for part in self._parts)
        return sum(self._tree.blocks(slot) for slot in found if slot is not None)

    @property
    def slots(self) -> int:
        """In use, for audits."""
        return sum(len(part.slots) for part in self._parts) + len(self._retired)
