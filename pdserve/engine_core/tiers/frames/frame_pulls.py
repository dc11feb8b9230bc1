"""Pulls blocks of other workers into frames of the host tier: `FramePulls`.

    begin    fresh frames are filled by a peer
    ended    blocks whose checksums are right become blocks of the host tier
    fenced   no peer can write to the other frames any more: they are free

A frame that a peer may still write to is in use until then, whatever has become of the pull. What
the blocks are for is the caller's business, who loads them from the host as any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.engine_core.tiers.ended_lives import EndedLives
from pdserve.kv.tiers.block import TierBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.kv_fetch.puller import KvPuller
    from pdserve.engine_core.tiers.fetch_lane import FetchLane
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.moves.arrivals import Arrivals
    from pdserve.messages.tiers import KvSource

__all__ = ["FramePulls"]

SHARE: Final = 0.25
"""Most of the host tier that pulls fill at once, as a share; a single one may take half."""


@dataclass(frozen=True, slots=True)
class _Pull:
    hashes: Sequence[bytes]
    parent: bytes
    frames: list[int]
    root: bytes
    short: str
    """Why it is for fewer blocks than were asked for."""
    ended: Callable[[Sequence[bytes], str], None]


class FramePulls:
    """The pulls of one core into its host tier; a `PullListener`."""

    def __init__(
        self,
        arrivals: Arrivals,
        puller: KvPuller,
        lane: FetchLane,
        block_size: int,
        first: int = 0,
    ) -> None:
        """`lane` learns how fast they are. `first`: the region's block that is frame 0."""
        self.lane = lane
        self.now: Seconds = 0.0
        """The present time; its owner keeps it."""
        self._arrivals = arrivals
        self._puller = puller
        self._size = block_size
        self._first = first
        self._pulls: dict[int, _Pull] = {}
        """Pulls that have not ended."""
        self._closing: dict[int, list[int]] = {}
        """Frames that a peer may still write to, of pulls that have ended."""
        self._coming: dict[bytes, int] = {}
        """Every hash that is being pulled, with its pull."""
        self._ended_lives = EndedLives()
        self._numbers = 0

    def __len__(self) -> int:
        """Pulls that have not ended."""
        return len(self._pulls)

    def coming(self, block_hash: bytes) -> bool:
        """Return whether a block is being pulled."""
        return block_hash in self._coming

    def may_pull(self, source: KvSource) -> bool:
        """Return whether this life of a worker may be asked: it has not ended."""
        return not self._ended_lives.has(source.node, source.epoch)

    def peer_gone(self, node: str, epoch: int) -> None:
        """This life of a node has ended: it is not asked any more."""
        self._ended_lives.add(node, epoch)

    # ------------------------------------------------------------------ beginning

    def begin(
        self,
        source: KvSource,
        hashes: Sequence[bytes],
        first: int,
        parent: bytes,
        root: bytes,
        patience: Seconds,
        local: Sequence[bytes],
        ended: Callable[[Sequence[bytes], str], None],
    ) -> int:
        """Pull these blocks, the first of which is block `first` of its chain and follows `parent`.
        `root` is the mark of their owner; `local` are blocks of the host that are used with them,
        and must not make room for them. Returns a number above 0, or 0 if there is no room.
        `ended` is called once, with the hashes of the leading blocks that are on the host then and
        why others have not come, unless the pull is cancelled. `room`: there was none for them."""
        self._arrivals.keep_near(local, self.now)
        frames = self._reserve(len(hashes))
        if not frames:
            return 0
        self._numbers += 1
        number, now = self._numbers, self.now
        wanted = list(hashes[: len(frames)])
        short = "room" if len(wanted) < len(hashes) else ""
        self._pulls[number] = _Pull(wanted, parent, frames, root, short, ended)
        self._coming.update(dict.fromkeys(wanted, number))
        self.lane.begin(number, len(wanted), now)
        self._puller.pull(
            number,
            source,
            wanted,
            [self._first + frame for frame in frames],
            first * self._size,
            now + patience,
            now=now,
            listener=self,
        )
        return number

    def _reserve(self, count: int) -> list[int]:
        capacity, taken = self._arrivals.capacity, len(self._arrivals)
        if taken:
            count = count if taken + count <= int(SHARE * capacity) else 0
        return self._arrivals.take(min(count, capacity // 2), self.now)

    # ------------------------------------------------------------------ ends

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        """The first `blocks_ok` blocks have come, and are blocks of the host from now on."""
        pull = self._forget(number)
        self.lane.end(number, blocks_ok, error, self.now)
        parent = pull.parent
        for frame, name in zip(pull.frames[:blocks_ok], pull.hashes, strict=False):
            block = TierBlock(name, parent, tokens=self._size, root=pull.root)
            self._arrivals.keep(frame, block, self.now)
            parent = name
        if blocks_ok < len(pull.frames):
            self._closing[number] = pull.frames[blocks_ok:]
        pull.ended(pull.hashes[:blocks_ok], error or pull.short)

    def on_fenced(self, number: int) -> None:
        """No peer can write to the pull's other frames any more."""
        self._arrivals.give_back(self._closing.pop(number, []))

    def cancel(self, number: int) -> None:
        """A pull is not wanted any more. Ignores those that have ended."""
        if number not in self._pulls:
            return
        pull = self._forget(number)
        self.lane.end(number, 0, "cancelled", self.now)
        self._closing[number] = pull.frames
        self._puller.cancel(number, self.now)

    def drop(self) -> None:
        """Nothing that is being pulled is wanted: it has no name any more."""
        for number, pull in list(self._pulls.items()):
            self.cancel(number)
            pull.ended((), "cancelled")

    def _forget(self, number: int) -> _Pull:
        pull = self._pulls.pop(number)
        for name in pull.hashes:
            if self._coming.get(name) == number:
                del self._coming[name]
        return pull
