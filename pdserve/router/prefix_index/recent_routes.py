"""Remembers which prompt blocks were sent to each worker recently, bounded in time and size.

Two of them exist. One lives for seconds and makes a choice count as cached before the worker's
events confirm it. The other lives for minutes: it is all that is known of workers without KV
events, and some policies weigh it. Neither knows whether a block is really cached.

Time is kept in parts: a repeated block moves to the newest part, and the oldest part is dropped
whole when its time has passed or room is needed. So an entry lives between `(parts - 1) / parts` of
the time and all of it, and least recently used entries go first. Pure; owned by the index.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.router.prefix_index.radix_tree import DEVICE

if TYPE_CHECKING:
    from pdserve.ids import NodeLife, Seconds
    from pdserve.router.prefix_index.radix_tree import Tree
    from pdserve.router.prefix_index.worker_slots import WorkerSlots

__all__ = ["RecentRoutes"]


@dataclass(slots=True)
class _Part:
    """Blocks sent in one stretch of time."""

    began: Seconds
    slots: dict[NodeLife, int] = field(default_factory=dict)
    blocks: int = 0
    """Blocks added, whether or not they are still there."""


class RecentRoutes:
    """Recently sent blocks. Its slots are shown in `worker_slots`, so `radix_tree` answers include
    it.
    """

    def __init__(
        self, tree: Tree, slots: WorkerSlots, *, ttl: Seconds, parts: int, most: int
    ) -> None:
        """Args: `most` bounds blocks over all workers, counted once per worker."""
        self._tree = tree
        self._slots = slots
        self._ttl = ttl
        self._most_parts = parts
        self._part_blocks = max(1, most // parts)
        self._parts: deque[_Part] = deque()
        """Parts, newest first."""
        self._retired: deque[int] = deque()
        """Hidden slots that still hold blocks."""
        self.noted = 0
        """Prompts noted, in total."""

    def note(self, now: Seconds, life: NodeLife, names: bytes) -> None:
        """Notes that a prompt is sent to a worker."""
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
        """Drops expired parts."""
        while self._parts and now - self._parts[-1].began >= self._ttl:
            self._retire()

    def _retire(self) -> None:
        """Hides the oldest part; its memory is freed step by step."""
        for slot in self._parts.pop().slots.values():
            self._slots.hide(slot)
            self._retired.append(slot)

    def reclaim(self, workers: int) -> None:
        """Frees retired blocks of at most that many workers: a whole part at once would stall the
        router.
        """
        for _ in range(min(workers, len(self._retired))):
            self._end(self._retired.popleft())

    def _end(self, slot: int) -> None:
        self._tree.drop(slot)
        self._slots.give(slot)

    # ------------------------------------------------------------------ what workers say

    def removed(self, life: NodeLife, names: bytes) -> None:
        """Drops blocks that the worker has just reported as removed."""
        for part in self._parts:
            slot = part.slots.get(life)
            if slot is not None:
                self._tree.removed(slot, DEVICE, names)

    def forget(self, life: NodeLife) -> None:
        """Drops everything about a worker."""
        for part in self._parts:
            slot = part.slots.pop(life, None)
            if slot is not None:
                self._end(slot)

    # ------------------------------------------------------------------ looking

    def blocks(self, life: NodeLife) -> int:
        """Blocks remembered for this worker; a block in two parts counts twice."""
        found = (part.slots.get(life) for part in self._parts)
        return sum(self._tree.blocks(slot) for slot in found if slot is not None)

    @property
    def slots(self) -> int:
        """Slots in use, for audits."""
        return sum(len(part.slots) for part in self._parts) + len(self._retired)
