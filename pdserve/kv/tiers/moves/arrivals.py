"""Host frames that another worker fills: they become blocks of the host once they are whole.

Whoever has a frame filled says when nothing writes to it any more. Until then it is in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.host_index import HostIndex
    from pdserve.kv.tiers.moves.storing import Storing

__all__ = ["Arrivals"]


class Arrivals:
    """The frames of one host tier that are being filled from outside."""

    def __init__(self, host: HostIndex, storing: Storing) -> None:
        self._host = host
        self._storing = storing
        self._frames: set[int] = set()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def capacity(self) -> int:
        """Frames of the tier."""
        return self._host.capacity

    def keep_near(self, hashes: Sequence[bytes], now: Seconds) -> None:
        """These blocks of one chain are used soon: others are evicted before them."""
        for name in reversed(hashes):
            self._host.touch(name, now)

    def take(self, count: int, now: Seconds) -> list[int]:
        """Frames to be filled: `count`, or fewer if the others are in use."""
        taken: list[int] = []
        while len(taken) < count and (frame := self._storing.frame(now)) is not None:
            taken.append(frame)
        self._frames.update(taken)
        return taken

    def keep(self, frame: int, block: TierBlock, now: Seconds) -> None:
        """The frame has this block, whole and verified."""
        self._frames.remove(frame)
        self._storing.received(frame, block, now)

    def give_back(self, frames: Iterable[int]) -> None:
        """Nothing writes to these frames any more, and what is in them is of no use."""
        for frame in frames:
            self._frames.remove(frame)
            self._host.abandon(frame)
