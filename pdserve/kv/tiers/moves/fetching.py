"""Brings leading blocks of a prompt back to the device: from frames, and from disk by way of them.

A fetch has a deadline, after which it ends with the blocks that have come so far. A block that
cannot be read, or that does not match its checksum, ends its fetch before itself: it is a miss and
never data. Frames of a fetch are claimed until they are copied; its device blocks stay with it
until `FetchDone`.

The last blocks of a fetch are copied layer group by layer group, if they are enough for that
(`layer_groups`): `LayersCome` tells of each group that all blocks of the fetch have.

Pure but for the jobs: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import CopyIn
from pdserve.kv.tiers.moves.job_lanes import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.jobs import Fill, FillShared, JobDone
    from pdserve.kv.tiers.layer_groups import LayerGroups
    from pdserve.kv.tiers.moves.fills import Fills
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.job_lanes import JobLanes
    from pdserve.messages.tiers import SourceName

__all__ = ["FetchDone", "Fetching", "LayersCome"]

_NO_FRAME: Final = -1


@dataclass(frozen=True, slots=True)
class FetchDone:
    """The end of a fetch: nothing writes to its device blocks any more."""

    number: int
    blocks: int
    """Leading blocks that hold their content."""
    sources: tuple[SourceName, ...]
    """Where each of them came from."""
    reason: str = ""
    """Why the others have not come: `absent`, `busy`, `deadline`, `cancelled`, `crc`, `io`."""


@dataclass(frozen=True, slots=True)
class LayersCome:
    """All blocks of a fetch have the layers of one more group; every copy of the rest has begun."""

    number: int
    group: int
    groups: int


@dataclass(slots=True, eq=False)
class _Fetch:
    number: int
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    deadline: Seconds
    limit: int
    """Leading blocks that may still come."""
    frames: list[int] = field(default_factory=list)
    sources: list[SourceName] = field(default_factory=list)
    copying: int = 0
    """Leading blocks that were given to copy jobs."""
    copied: int = 0
    """Leading blocks that have come."""
    jobs: list[int] = field(default_factory=lambda: [0])
    """Copy jobs under way, by layer group. Copies of whole blocks count to the first one."""
    broken: bool = False
    """True once a copy has failed: blocks that are copied later are not used."""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Return whether no job touches its blocks and none will."""
        return not any(self.jobs) and self.copying >= self.limit


class Fetching:
    """The fetches under way."""

    def __init__(self, tiers: TierIndexes, jobs: JobLanes, fills: Fills) -> None:
        self.layers: LayerGroups | None = None
        """How blocks are divided; None: they are copied whole."""
        self._tiers = tiers
        self._host = tiers.host
        self._jobs = jobs
        self._fills = fills
        self._fetches: dict[int, _Fetch] = {}
        self._done: list[FetchDone] = []
        self._come: list[LayersCome] = []

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def some_done(self) -> bool:
        """Return whether `take_done` has something."""
        return bool(self._done)

    def take_done(self) -> list[FetchDone]:
        """The fetches that have ended since the last call."""
        ended, self._done = self._done, []
        return ended

    def take_layers(self) -> list[LayersCome]:
        """The layer groups that have come since the last call."""
        come, self._come = self._come, []
        return come

    # ------------------------------------------------------------------ beginning and ending

    def begin(
        self,
        number: int,
        hashes: Sequence[bytes],
        parent: bytes,
        blocks: Sequence[int],
        now: Seconds,
        deadline: Seconds,
    ) -> None:
        """As `LowerTiers.fetch`."""
        sources = self._tiers.run(hashes, 0)
        fetch = self._fetches[number] = _Fetch(number, hashes, blocks, deadline, len(sources))
        if len(sources) < len(hashes):
            fetch.reason = "absent"
        fetch.sources = sources
        # All frames are claimed before one is evicted for a read.
        for block_hash, source in zip(hashes, sources, strict=False):
            fetch.frames.append(self._claimed(block_hash) if source == "host" else _NO_FRAME)
        for index, source in enumerate(sources):
            before = hashes[index - 1] if index else parent
            if source == "disk" and not self._join(fetch, index, before, now):
                self._shorten(fetch, index, "busy", now)
                break
        self._go_on(fetch, now)

    def _claimed(self, block_hash: bytes) -> int:
        frame = self._host.frame(block_hash)
        assert frame is not None
        self._host.claim(frame)
        return frame

    def _join(self, fetch: _Fetch, index: int, parent: bytes, now: Seconds) -> bool:
        """Wait for the read of a record; False without a frame."""
        frame = self._fills.join(fetch.number, index, fetch.hashes[index], parent, now)
        if frame is None:
            return False
        fetch.frames[index] = frame
        return True

    def next_deadline(self) -> Seconds | None:
        """When `expire` must be called at the latest; None: never."""
        late = [each.deadline for each in self._fetches.values() if each.limit > each.copying]
        return min(late, default=None)

    def expire(self, now: Seconds) -> None:
        """End late fetches."""
        for fetch in [each for each in self._fetches.values() if each.deadline <= now]:
            self._shorten(fetch, 0, "deadline", now)

    def cancel(self, number: int, now: Seconds) -> None:
        """As `LowerTiers.cancel`."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._shorten(fetch, 0, "cancelled", now)

    # ------------------------------------------------------------------ ends of jobs

    def filled(self, done: JobDone, job: Fill | FillShared, now: Seconds) -> None:
        """A read from disk ended: those that wait for it go on, or end before it."""
        filling = self._fills.ended(done, job, now)
        waiting, filling.fetches = filling.fetches, {}
        for number, index in waiting.items():
            if filling.valid:
                self._go_on(self._fetches[number], now)
            else:
                self._shorten(self._fetches[number], index, done.reason or "io", now)
        self._fills.settle(job.hash, now)

    def copied_in(self, done: JobDone, job: CopyIn, now: Seconds) -> None:
        """A copy to the device ended."""
        fetch = self._fetches[job.fetch]
        fetch.jobs[job.group] -= 1
        if job.last:
            self._let_go(fetch, job.first, job.first + len(job.frames), now)
        if done.error:
            fetch.broken = True
            self._shorten(fetch, 0, "io", now)
        elif not fetch.broken:
            fetch.copied += len(job.frames) if job.last else 0
            self._note_layers(fetch, job.group)
        self._go_on(fetch, now)

    def _note_layers(self, fetch: _Fetch, group: int) -> None:
        """A copy has brought layers of a group; was it the last one?"""
        groups = len(fetch.jobs)
        if groups > 1 and not fetch.jobs[group]:
            self._come.append(LayersCome(fetch.number, group, groups))

    # ------------------------------------------------------------------ one fetch

    def _go_on(self, fetch: _Fetch, now: Seconds) -> None:
        """Copy what has become ready; end the fetch if nothing more can come."""
        ready = fetch.copying
        while ready < fetch.limit and self._is_ready(fetch, ready):
            ready += 1
        if ready > fetch.copying:
            self._copy(fetch, fetch.copying, ready, now)
        fetch.copying = ready
        if fetch.over:
            self._finish(fetch)

    def _copy(self, fetch: _Fetch, begin: int, end: int, now: Seconds) -> None:
        """Copy the blocks from place `begin` to `end`: layer group by layer group if no others
        follow, so that every block of the fetch has a group when these have it."""
        layers = self.layers
        whole = layers is None or end < len(fetch.hashes)
        groups = 1 if layers is None or whole else layers.count(end - begin)
        fetch.jobs += [0] * (groups - 1)
        for group in range(groups):
            span = layers.span(group, groups) if layers is not None and groups > 1 else None
            for part in parts(end - begin, self._jobs.copy_blocks * groups):
                first, last = begin + part.start, begin + part.stop
                frames, blocks = fetch.frames[first:last], fetch.blocks[first:last]
                is_last = group == groups - 1
                job = CopyIn(fetch.number, first, frames, blocks, span, group, is_last)
                self._jobs.submit(job, now)
                fetch.jobs[group] += 1

    def _is_ready(self, fetch: _Fetch, index: int) -> bool:
        return fetch.sources[index] == "host" or self._fills.is_ready(fetch.hashes[index])

    def _let_go(self, fetch: _Fetch, first: int, last: int, now: Seconds) -> None:
        """The fetch does not read these frames any more."""
        for index in range(first, last):
            if fetch.frames[index] == _NO_FRAME:
                continue
            if fetch.sources[index] == "host":
                self._host.release(fetch.frames[index])
            else:
                self._fills.leave(fetch.number, fetch.hashes[index], now)
            fetch.frames[index] = _NO_FRAME

    def _shorten(self, fetch: _Fetch, limit: int, reason: str, now: Seconds) -> None:
        """Nothing from place `limit` on will come, but for what is being copied."""
        limit = max(limit, fetch.copying)
        if limit >= fetch.limit:
            return
        self._let_go(fetch, limit, fetch.limit, now)
        fetch.limit, fetch.reason = limit, reason
        if fetch.over:
            self._finish(fetch)

    def _finish(self, fetch: _Fetch) -> None:
        if self._fetches.pop(fetch.number, None) is None:
            return
        came = tuple(fetch.sources[: fetch.copied])
        self._tiers.host_counts.hit_blocks += came.count("host")
        self._tiers.disk_counts.hit_blocks += came.count("disk")
        self._done.append(FetchDone(fetch.number, fetch.copied, came, fetch.reason))
