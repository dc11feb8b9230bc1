"""Uses frames of the host tier for a prompt that a peer prefills: `FrameHolds`.

    bring      what the disk has of the prompt is read into frames, while the peer computes
    hold       the frames that have it when the peer asks are kept for the prompt; it sends the rest
    release    the engine has copied from them, or does not need them

The frames and the staging blocks are in one memory, so the engine copies from both in one step. No
deadline is needed: a block that is not there when the peer asks is sent by the peer.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pdserve.engine_core.staged_kv.port import HeldFrames
from pdserve.messages.tiers import CachedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdserve.engine_core.tiers.onboarder import FetchChooser
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import LowerTiers
    from pdserve.messages.tiers import SourceName

__all__ = ["FrameHolds"]

SHARE: Final = 0.5
"""Most of the host tier that is held at once, as a share: the rest takes what the device evicts."""


class FrameHolds:
    """The frames that one core holds for prompts of peers."""

    def __init__(
        self,
        lower: LowerTiers,
        planner: Callable[[], FetchChooser],
        block_size: int,
        first: int,
    ) -> None:
        """`first`: the region's block that is frame 0."""
        self._lower = lower
        self._planner = planner
        self._size = block_size
        self._first = first
        self._held = 0

    @property
    def held(self) -> int:
        """Frames that are held; one that two prompts hold counts twice."""
        return self._held

    def bring(self, hashes: Sequence[bytes], device: int, now: Seconds) -> frozenset[bytes]:
        """Begin to read blocks behind the first `device` ones of a chain from disk, as far as that
        is sooner than to compute them. Returns the hashes of those that are being read."""
        lower = self._lower
        found = lower.run(hashes, device)
        if "disk" not in found:
            return frozenset()
        plan = self._planner().choose(device, found, (), len(hashes), 0.0)
        count = min(0 if plan is None else plan.local, int(SHARE * lower.host.capacity))
        wanted = hashes[device : device + count]
        lower.arrivals.keep_near(wanted, now)
        read: set[bytes] = set()
        for name, source in zip(wanted, found, strict=False):
            if source == "disk":
                if not lower.lift(name, now):
                    break
                read.add(name)
        return frozenset(read)

    def hold(self, hashes: Sequence[bytes], first: int, read: Collection[bytes]) -> HeldFrames:
        """Hold the frames with block `first` of a chain and those that follow. `read`: hashes that
        `bring` has returned, which count as the disk's."""
        host = self._lower.host
        blocks: list[int] = []
        sources: list[SourceName] = []
        room = int(SHARE * host.capacity) - self._held
        for name in hashes[first : first + max(0, room)]:
            frame = host.frame(name)
            if frame is None:
                break
            host.claim(frame)
            blocks.append(self._first + frame)
            sources.append("disk" if name in read else "host")
        self._held += len(blocks)
        return HeldFrames(tuple(blocks), self._cached(sources))

    def _cached(self, sources: Sequence[SourceName]) -> tuple[CachedSource, ...]:
        counts = Counter(sources)
        return tuple(CachedSource(name, count * self._size) for name, count in counts.items())

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks of `hold` back."""
        self._held -= len(blocks)
        for block in blocks:
            self._lower.host.release(block - self._first)

    def loaded(self, sources: Sequence[CachedSource]) -> None:
        """The engine has loaded these tokens from frames: count them as hits of their tiers."""
        for source in sources:
            self._lower.count_hits(source.source, source.tokens // self._size)
