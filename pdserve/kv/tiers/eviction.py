"""Decides in which order a lower tier gives blocks up.

`EvictionOrder` scores a block: the time of its last use, plus a bonus for each earlier turn of its
conversation, because a conversation that went on before is likely to go on again. `EvictionQueue`
keeps names sorted by such keys. Neither knows frames, claims or events.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["EvictionKey", "EvictionOrder", "EvictionQueue"]

EvictionKey = tuple[int, float, int]
"""Rank, score and number of a name. The smallest key is evicted first."""

_SLACK = 64
"""Stale entries that a queue always may keep, so that a small one is not rebuilt all the time."""


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """Least recently used first, with a bonus for turns."""

    turn_bonus: Seconds = 60.0
    """Seconds by which a block counts as younger for each earlier turn; 0: plain LRU."""
    turn_cap: int = 4
    """Most earlier turns that count: without a bound, an ended conversation stays for long."""

    def score(self, last_use: Seconds, turns: int) -> Seconds:
        """The time up to which the block counts as used; the lowest is evicted first."""
        return last_use + self.turn_bonus * min(turns - 1, self.turn_cap)


class EvictionQueue:
    """Names sorted by key. Each operation takes O(log n) for each name, amortised.

    A heap with stale entries: a name that was put again or removed leaves its old entry behind.
    The heap is rebuilt when more than half of it is stale.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, EvictionKey] = {}
        self._heap: list[tuple[EvictionKey, bytes]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: bytes) -> bool:
        return name in self._keys

    def put(self, name: bytes, key: EvictionKey) -> None:
        """Adds `name`, or moves it to another key."""
        self._keys[name] = key
        heapq.heappush(self._heap, (key, name))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._rebuild()

    def remove(self, name: bytes) -> None:
        """Removes `name`; nothing happens if it is not there."""
        self._keys.pop(name, None)

    def clear(self) -> None:
        self._keys.clear()
        self._heap.clear()

    def first(self, count: int) -> list[bytes]:
        """The `count` names with the smallest keys, in order; fewer if there are no more. They stay
        in the queue."""
        found: list[tuple[EvictionKey, bytes]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            # An equal entry: the same name was put twice with the same key.
            if self._keys.get(entry[1]) == entry[0] and (not found or found[-1] != entry):
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [name for _, name in found]

    def _rebuild(self) -> None:
        self._heap = [(key, name) for name, key in self._keys.items()]
        heapq.heapify(self._heap)
