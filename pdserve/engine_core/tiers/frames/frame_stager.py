"""Brings blocks to the host tier, from disk and from the device, for a peer that fetches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.cleaner import Cleaner
    from pdserve.kv.tiers.lower_tiers import LowerTiers

__all__ = ["FrameStager"]


class FrameStager:
    """Implements `kv_fetch.ports.StageBlocks`. The server bounds how much is wanted at once."""

    def __init__(self, lower: LowerTiers, cleaner: Cleaner) -> None:
        self.now: Seconds = 0.0
        """The present time; its owner keeps it."""
        self._lower = lower
        self._cleaner = cleaner
        self._waiting: dict[int, tuple[list[bytes], Callable[[], None]]] = {}
        """Blocks on their way, and whom to tell, by number."""
        self._numbers = 0

    def begin(self, hashes: Sequence[bytes], done: Callable[[], None]) -> int:
        """Begin to bring the leading run of `hashes` that this worker has; 0: all of it is on the
        host, or there is no room."""
        coming = self._order(hashes)
        if not coming:
            return 0
        self._numbers += 1
        self._waiting[self._numbers] = coming, done
        return self._numbers

    def _order(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Order the copies and reads; returns the hashes that are on their way now."""
        coming: list[bytes] = []
        place = 0
        while place < len(hashes):
            name = hashes[place]
            if name in self._lower.host:
                place += 1
                continue
            count = 1
            if not self._lower.comes(name):
                count = self._cleaner.lend(hashes[place:], self.now)
                count = count or int(self._lower.lift(name, self.now))
            if not count:
                break
            coming += hashes[place : place + count]
            place += count
        return coming

    def cancel(self, number: int) -> None:
        """`done` is not called any more; what is on its way comes all the same."""
        self._waiting.pop(number, None)

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return any(self._is_here(coming) for coming, _ in self._waiting.values())

    def _is_here(self, coming: Sequence[bytes]) -> bool:
        return not any(map(self._lower.comes, coming))

    def advance(self) -> None:
        """Tell those whose blocks have come, or will not."""
        for number, (coming, done) in list(self._waiting.items()):
            if self._is_here(coming):
                del self._waiting[number]
                done()
