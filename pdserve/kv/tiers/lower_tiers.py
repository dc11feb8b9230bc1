"""Keeps one engine core's host and disk tiers: what is stored there, what comes back.

    store     device blocks that will soon be evicted are copied to frames of the host arena
    spill     frames are written to disk, in batches, ahead of their eviction
    fetch     leading blocks of a prompt come back: from disk to frames, from there to the device

Nothing here waits. Jobs go out by `TierIo` and come back by `take`, which the core calls between
steps; a fetch has a deadline, after which it ends with the blocks that have come so far. A block
that cannot be read, or that does not match its checksum, ends its fetch before itself and is
dropped: it is a miss and never data.

A frame or a segment that a job reads is claimed, and one that a job writes is in no index. So what
a job touches is used for nothing else before the job has ended. Device blocks of a fetch stay with
the fetch until `FetchDone`.

Placement is exclusive in effect: a frame whose block is on the device too, and stays there for a
while, is a *shadow*, which is the first to be evicted.

Pure but for the jobs: times are arguments. The engine core owns it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from errno import EIO
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.format import PAGE, record_bytes
from pdserve.kv.tiers.disk.segment import records_that_fit
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, JobDone, Maintain, Spill, bytes_of, lane_of
from pdserve.kv.tiers.lanes import Lane
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from pdserve.messages.tiers import LaneLoad, TierStats

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission
    from pdserve.kv.tiers.disk.index import DiskIndex
    from pdserve.kv.tiers.host_index import HostIndex
    from pdserve.kv.tiers.jobs import TierIo, TierJob
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.kv_events import Tier
    from pdserve.messages.tiers import LaneName, SourceName

__all__ = ["DeviceBlock", "FetchDone", "LowerTiers"]

_log = logging.getLogger(__name__)

COPY_BYTES: Final[Bytes] = 16 << 20
"""Most bytes of one copy job, so that a fetch is not behind a long copy."""

SPILL_BYTES: Final[Bytes] = 8 << 20
"""Bytes of one write to disk, if there are as many to write."""

SPILL_AFTER: Final[Seconds] = 0.5
"""Seconds after which fewer bytes are written too."""

SPILL_AGAIN: Final[Seconds] = 15.0
"""Pause after the disk had no room or was not to be written to."""

SPILLS: Final = 2
"""Most writes under way: one that the disk does, one that waits."""

_NO_FRAME: Final = -1
_DISK_JOBS: Final = (Fill, Spill, Maintain)

OUT_SHARE: Final = 0.25
"""Most of the arena, as a share, that copies from the device fill at once."""


class DevicePool(Protocol):
    """The device pool, as far as the tiers below look at it; `BlockPool` is one."""

    def __contains__(self, block_hash: object) -> bool:
        """Whether the device has a block with this hash."""
        ...

    def generation(self, block: int) -> int:
        """As `BlockPool.generation`."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A device block to be stored, and what it holds."""

    block: int
    generation: int
    content: TierBlock


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


@dataclass(slots=True, eq=False)
class _Filling:
    """A frame that a record is read into, and the fetches that wait for it."""

    frame: int
    content: TierBlock
    fetches: dict[int, int] = field(default_factory=dict)
    """Number of each waiting fetch -> place of the block in it."""
    readers: int = 0
    """Fetches that copy from the frame or will."""
    valid: bool = False
    unwanted: bool = False
    """An operator has dropped the block: it goes when nobody reads it."""


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
    jobs: int = 0
    """Copy jobs under way."""
    broken: bool = False
    """Whether a copy failed, so that later ones do not count."""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Return whether no job touches its blocks and none will."""
        return not self.jobs and self.copying >= self.limit


@dataclass(slots=True)
class _Counts:
    """Counters of one tier."""

    stored: int = 0
    evicted: int = 0
    refused: int = 0
    unsaved: int = 0
    hit_blocks: int = 0
    failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class LowerTiers:
    """The tiers below one device pool."""

    def __init__(
        self,
        host: HostIndex,
        host_admission: HostAdmission,
        io: TierIo,
        disk: DiskIndex | None = None,
        disk_admission: DiskAdmission | None = None,
        *,
        block_bytes: Bytes,
        block_size: int,
        device: DevicePool,
    ) -> None:
        """`device` is the pool above."""
        self.host = host
        self.disk = disk
        self.disk_paused = False
        """While True nothing is looked up on disk, read or written."""
        self.disk_trouble = ""
        """Why there is no disk tier any more, in words for the operator."""
        self.trouble = ""
        """Why the host tier works in part, in words for the operator."""
        self._io = io
        self._host_admission = host_admission
        self._disk_admission = disk_admission
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._device = device
        self._events: list[KvEvent] = []
        self._refused: set[bytes] = set()
        """Device blocks that admission has refused; each is asked about once for each use."""
        self._storing: set[bytes] = set()
        """Hashes that copies from the device are under way for."""
        self._filling: dict[bytes, _Filling] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._done: list[FetchDone] = []
        self._unspilled: OrderedDict[bytes, None] = OrderedDict()
        """Hashes on the host that may have to be written to disk, oldest first."""
        self._spills = 0
        self._no_room = False
        """Whether the disk had no room when it was last asked."""
        self._spill_at: Seconds | None = None
        """When the oldest of `_unspilled` is written even if few bytes wait."""
        self._disk_jobs = 0
        self._counts: dict[str, _Counts] = {"host": _Counts(), "disk": _Counts()}
        names: tuple[LaneName, ...] = ("d2h", "h2d", "disk_read", "disk_write")
        self._lanes = {name: Lane(name) for name in names}

    # ------------------------------------------------------------------ reading

    def has(self, block_hash: bytes) -> bool:
        """Return whether a block is on the host or on disk. Takes no claim."""
        return block_hash in self.host or block_hash in self._on_disk()

    def parent(self, block_hash: bytes) -> bytes | None:
        """Hash before that of a block on the host or on disk; None if it is not there."""
        found = self.host.block(block_hash)
        if found is None and self.disk is not None:
            found = self.disk.block(block_hash)
        return None if found is None else found.parent

    def run(self, hashes: Sequence[bytes], start: int = 0) -> list[SourceName]:
        """Where the blocks `hashes[start:]` are, up to the first that is nowhere. No claim is
        taken."""
        found: list[SourceName] = []
        disk = self._on_disk()
        for index in range(start, len(hashes)):
            if hashes[index] in self.host:
                found.append("host")
            elif hashes[index] in disk:
                found.append("disk")
            else:
                break
        return found

    def _on_disk(self) -> Container[bytes]:
        """The blocks that can be read from disk now."""
        return () if self.disk is None or self.disk_paused else self.disk

    @property
    def disk_idle(self) -> bool:
        """Return whether nothing is read from disk or written to it."""
        return not self._disk_jobs

    def wants(self, block_hash: bytes) -> bool:
        """Return whether a device block is to be offered: it is not on the host nor on its way
        there, and was not refused."""
        return (
            block_hash not in self.host
            and block_hash not in self._storing
            and block_hash not in self._refused
        )

    def keep(self, block_hash: bytes, now: Seconds) -> None:
        """A device block is evicted soon: what the host has of it is needed from now on."""
        if block_hash in self.host and self.host.is_shadow(block_hash):
            self.host.shadow(block_hash, on=False)
            self.host.touch(block_hash, now)

    def lane_estimates(self) -> dict[LaneName, LaneEstimate]:
        """What each lane is predicted to do."""
        return {name: lane.estimate() for name, lane in self._lanes.items()}

    # ------------------------------------------------------------------ storing

    def store(self, sources: Sequence[DeviceBlock], now: Seconds, *, spare: bool = False) -> int:
        """Begin to copy these device blocks to the host, as far as there is room and admission
        allows; returns how many were taken or refused. With `spare`, nothing is lost for them: they
        take free frames, and those of blocks that are on disk too."""
        budget = max(1, int(OUT_SHARE * self.host.capacity)) - len(self._storing)
        chosen: list[DeviceBlock] = []
        frames: list[int] = []
        refused = 0
        for source in sources:
            if len(chosen) >= budget:
                break
            if not self.wants(source.content.hash):
                continue
            if not self._host_admission.admits(source.content, now):
                refused += 1
                self._refused.add(source.content.hash)
                continue
            frame = self._frame(now, spare=spare)
            if frame is None:
                break
            chosen.append(source)
            frames.append(frame)
        self._counts["host"].refused += refused
        for part in _parts(len(chosen), max(1, COPY_BYTES // self._block_bytes)):
            self._copy_out(chosen[part], frames[part], now, spare=spare)
        return len(chosen) + refused

    def _copy_out(
        self, chosen: list[DeviceBlock], frames: list[int], now: Seconds, *, spare: bool
    ) -> None:
        self._storing.update(source.content.hash for source in chosen)
        self._submit(
            CopyOut(
                [source.block for source in chosen],
                frames,
                [source.content for source in chosen],
                [source.generation for source in chosen],
                spare,
            ),
            now,
        )

    def _frame(self, now: Seconds, *, spare: bool = False) -> int | None:
        """A free frame, or that of the first block in order of eviction; None if all are in use.
        With `spare`, a block is evicted only if it is on disk."""
        frame = self.host.reserve()
        if frame is None and (not spare or self._is_spare(now)) and self._evict(1, now):
            frame = self.host.reserve()
        return frame

    def _is_spare(self, now: Seconds) -> bool:
        if self.disk is None:
            return False
        victims = self.host.victims(1, now)
        return bool(victims) and victims[0] in self.disk

    def _evict(self, count: int, now: Seconds) -> int:
        victims = self.host.victims(count, now)
        for block_hash in victims:
            age = self.host.age(block_hash, now)
            shadow = self.host.is_shadow(block_hash)
            self.host.evict(block_hash)
            if shadow:
                continue
            if block_hash in self._device:
                # It was stored ahead of its eviction there, and others are worth more. Stored
                # again, it would only push out the next one of its kind.
                self._refused.add(block_hash)
            self._counts["host"].evicted += 1
            self._host_admission.evicted(block_hash, age, now)
            if self.disk is not None and block_hash not in self.disk:
                self._counts["disk"].unsaved += 1
        return len(victims)

    def _stored(self, job: CopyOut, error: str, now: Seconds) -> None:
        for block, frame, content, generation in zip(
            job.blocks, job.frames, job.contents, job.generations, strict=True
        ):
            self._storing.discard(content.hash)
            changed = self._device.generation(block) != generation
            if error or changed:
                self.host.abandon(frame)
                continue
            if self.host.commit(frame, content, now):
                self.host.shadow(content.hash, on=job.spare)
                self._entered(content, now)

    def _entered(self, content: TierBlock, now: Seconds) -> None:
        """A block is valid on the host."""
        self._counts["host"].stored += 1
        if content.pin_until > now:
            self.host.pin(content.hash, content.pin_until)
        self._offer(content.hash, now)

    # ------------------------------------------------------------------ the device's events

    def follow(self, events: Sequence[KvEvent], now: Seconds) -> None:
        """Take note of what the device pool has stored and removed."""
        for event in events:
            match event:
                case BlockStored():
                    for block_hash in event.hashes:
                        if block_hash in self.host:
                            self.host.shadow(block_hash, on=True)
                case BlockRemoved():
                    for block_hash in event.hashes:
                        self._left_device(block_hash, now)
                case PoolCleared():
                    self._refused.clear()
                    for block_hash in self.host.names():
                        self.host.shadow(block_hash, on=False)

    def _left_device(self, block_hash: bytes, now: Seconds) -> None:
        self._refused.discard(block_hash)
        if block_hash in self.host:
            self.host.shadow(block_hash, on=False)
            self.host.touch(block_hash, now)
        elif self.disk is None or block_hash not in self.disk:
            self._counts["host"].unsaved += 1

    # ------------------------------------------------------------------ spilling

    def _offer(self, block_hash: bytes, now: Seconds) -> None:
        """Consider a block of the host for the disk."""
        if self.disk is None or self.disk_paused or self.disk.knows(block_hash):
            return
        if len(self._unspilled) >= self.host.capacity:
            self._unspilled.popitem(last=False)
        self._unspilled[block_hash] = None
        if self._spill_at is None:
            self._spill_at = now + SPILL_AFTER

    def used(self, block_hash: bytes, turns: int, now: Seconds) -> None:
        """Take note that a request uses a block; one that was refused before may be taken now."""
        self._refused.discard(block_hash)
        if block_hash in self.host:
            self.host.shadow(block_hash, on=True)
            self.host.touch(block_hash, now, turns)
            self._offer(block_hash, now)
        if self.disk is not None:
            self.disk.touch(block_hash, now)

    def _spill(self, now: Seconds) -> None:
        """Write blocks to disk while there are enough, or old ones."""
        disk = self.disk
        if disk is None or self.disk_paused:
            return
        fitting = records_that_fit(disk.segment_bytes, PAGE, 0, self._block_bytes)
        each = max(1, min(SPILL_BYTES // self._block_bytes, fitting))
        while self._unspilled and self._spills < SPILLS:
            if self._spill_at is not None and now < self._spill_at and self._may_wait(each):
                return
            blocks, frames = self._choose_spill(each, now)
            if not blocks:
                continue
            batch = disk.append(blocks, self._block_bytes, now)
            if batch is None:
                self._put_back(blocks, frames, now)
                return
            self._spills += 1
            self._no_room = False
            self._submit(Spill(batch, frames), now)
        if not self._unspilled:
            self._spill_at = None

    def _may_wait(self, each: int) -> bool:
        """Return whether more blocks are waited for, before they are written."""
        return len(self._unspilled) < each or self._no_room

    def _choose_spill(self, most: int, now: Seconds) -> tuple[list[TierBlock], list[int]]:
        """Take blocks that are to be written, and claim their frames."""
        assert self.disk is not None
        assert self._disk_admission is not None
        blocks: list[TierBlock] = []
        frames: list[int] = []
        while self._unspilled and len(blocks) < most:
            block_hash, _ = self._unspilled.popitem(last=False)
            content, frame = self.host.block(block_hash), self.host.frame(block_hash)
            if content is None or frame is None:
                continue
            if self.disk.knows(block_hash):
                continue
            if not self._disk_admission.admits(content, self._block_bytes, now):
                self._counts["disk"].refused += 1
                continue
            self.host.claim(frame)
            blocks.append(content)
            frames.append(frame)
        return blocks, frames

    def _put_back(self, blocks: list[TierBlock], frames: list[int], now: Seconds) -> None:
        """The disk takes nothing now."""
        self._no_room = True
        assert self._disk_admission is not None
        for frame in frames:
            self.host.release(frame)
            self._disk_admission.budget.refund(self._block_bytes)
        for block in reversed(blocks):
            self._unspilled[block.hash] = None
            self._unspilled.move_to_end(block.hash, last=False)
        self._spill_at = now + SPILL_AGAIN

    def _spilled(self, done: JobDone, job: Spill, now: Seconds) -> None:
        disk = self.disk
        assert disk is not None
        self._spills -= 1
        for frame in job.frames:
            self.host.release(frame)
        if done.error:
            self._counts["disk"].failed += len(job.frames)
            _log.warning("KV blocks were not written to disk: %s", done.error)
            disk.failed(job.batch, done.errno or EIO, now)
        else:
            self._counts["disk"].stored += len(job.frames)
            self._counts["disk"].written_bytes += len(job.frames) * self._block_bytes
            disk.written(job.batch, now)

    # ------------------------------------------------------------------ fetching

    def fetch(
        self,
        number: int,
        hashes: Sequence[bytes],
        parent: bytes,
        blocks: Sequence[int],
        now: Seconds,
        deadline: Seconds,
    ) -> None:
        """Bring the blocks `hashes` of one chain, the first of which follows `parent`, to these
        device blocks. `FetchDone` with this number follows, in `take`."""
        sources = self.run(hashes)
        fetch = self._fetches[number] = _Fetch(number, hashes, blocks, deadline, len(sources))
        if len(sources) < len(hashes):
            fetch.reason = "absent"
        fetch.sources = sources
        # All frames are claimed before one is evicted for a read.
        for block_hash, source in zip(hashes, sources, strict=False):
            fetch.frames.append(self._claimed(block_hash) if source == "host" else _NO_FRAME)
        for index, source in enumerate(sources):
            before = hashes[index - 1] if index else parent
            if source == "disk" and not self._join_fill(fetch, index, before, now):
                self._shorten(fetch, index, "busy", now)
                break
        self._go_on(fetch, now)

    def _claimed(self, block_hash: bytes) -> int:
        frame = self.host.frame(block_hash)
        assert frame is not None
        self.host.claim(frame)
        return frame

    def _join_fill(self, fetch: _Fetch, index: int, parent: bytes, now: Seconds) -> bool:
        """Wait for the read of a record, which begins now if it has not; False without a frame."""
        block_hash = fetch.hashes[index]
        filling = self._filling.get(block_hash) or self._fill(block_hash, parent, now)
        if filling is None:
            return False
        filling.fetches[fetch.number] = index
        filling.readers += 1
        fetch.frames[index] = filling.frame
        return True

    def _fill(self, block_hash: bytes, parent: bytes, now: Seconds) -> _Filling | None:
        """Begin to read a record; None if it is not on disk or there is no frame."""
        if self.disk is None or self.disk_paused:
            return None
        place = self.disk.place(block_hash)
        if place is None:
            return None
        frame = self._frame(now)
        if frame is None:
            return None
        assert self.disk is not None
        self.disk.claim(place)
        content = self.disk.block(block_hash) or TierBlock(block_hash, parent)
        filling = self._filling[block_hash] = _Filling(frame, content)
        self._submit(Fill(block_hash, place, frame), now)
        return filling

    def _filled(self, done: JobDone, job: Fill, now: Seconds) -> None:
        assert self.disk is not None
        filling = self._filling[job.hash]
        if done.error:
            self._fill_failed(done, job, filling, now)
            self.disk.release(job.place)
            return
        self.disk.release(job.place)
        filling.valid = True
        self._counts["disk"].read_bytes += self._block_bytes
        self.disk.touch(job.hash, now)
        waiting, filling.fetches = filling.fetches, {}
        for number in waiting:
            self._go_on(self._fetches[number], now)
        if not filling.readers:
            self._keep(job.hash, filling, now)

    def _fill_failed(self, done: JobDone, job: Fill, filling: _Filling, now: Seconds) -> None:
        assert self.disk is not None
        self._counts["disk"].failed += 1
        _log.warning("a KV block was not read from disk: %s", done.error)
        self.disk.read_failed(job.place, job.hash, done.reason, now, done.errno)
        del self._filling[job.hash]
        self.host.abandon(filling.frame)
        for number, index in filling.fetches.items():
            self._shorten(self._fetches[number], index, done.reason or "io", now)

    def _keep(self, block_hash: bytes, filling: _Filling, now: Seconds) -> None:
        """Nobody copies from the frame any more: it is an ordinary one from now on."""
        del self._filling[block_hash]
        if filling.unwanted:
            self.host.abandon(filling.frame)
        elif self.host.commit(filling.frame, filling.content, now):
            self._counts["host"].stored += 1

    def _go_on(self, fetch: _Fetch, now: Seconds) -> None:
        """Copy what has become ready; end the fetch if nothing more can come."""
        ready = fetch.copying
        while ready < fetch.limit and self._is_ready(fetch, ready):
            ready += 1
        each = max(1, COPY_BYTES // self._block_bytes)
        for part in _parts(ready - fetch.copying, each):
            first, last = fetch.copying + part.start, fetch.copying + part.stop
            frames, blocks = fetch.frames[first:last], fetch.blocks[first:last]
            self._submit(CopyIn(fetch.number, first, frames, blocks), now)
            fetch.jobs += 1
        fetch.copying = ready
        if fetch.over:
            self._finish(fetch)

    def _is_ready(self, fetch: _Fetch, index: int) -> bool:
        if fetch.sources[index] == "host":
            return True
        filling = self._filling.get(fetch.hashes[index])
        return filling is not None and filling.valid

    def _copied_in(self, done: JobDone, job: CopyIn, now: Seconds) -> None:
        fetch = self._fetches[job.fetch]
        fetch.jobs -= 1
        self._let_go(fetch, job.first, job.first + len(job.frames), now)
        if done.error:
            fetch.broken = True
            self._shorten(fetch, 0, "io", now)
        elif not fetch.broken:
            fetch.copied += len(job.frames)
        self._go_on(fetch, now)

    def _let_go(self, fetch: _Fetch, first: int, last: int, now: Seconds) -> None:
        """The fetch does not read these frames any more."""
        for index in range(first, last):
            if fetch.frames[index] == _NO_FRAME:
                continue
            if fetch.sources[index] == "host":
                self.host.release(fetch.frames[index])
            else:
                self._leave_fill(fetch, fetch.hashes[index], now)
            fetch.frames[index] = _NO_FRAME

    def _leave_fill(self, fetch: _Fetch, block_hash: bytes, now: Seconds) -> None:
        filling = self._filling.get(block_hash)
        if filling is None:  # its read failed
            return
        filling.fetches.pop(fetch.number, None)
        filling.readers -= 1
        if filling.valid and not filling.readers:
            self._keep(block_hash, filling, now)

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
        for source in fetch.sources[: fetch.copied]:
            self._counts[source].hit_blocks += 1
        self._done.append(
            FetchDone(
                fetch.number, fetch.copied, tuple(fetch.sources[: fetch.copied]), fetch.reason
            )
        )

    def cancel(self, number: int, now: Seconds) -> None:
        """End a fetch; `FetchDone` follows when nothing writes to its blocks any more."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._shorten(fetch, 0, "cancelled", now)

    # ------------------------------------------------------------------ time and jobs

    @property
    def busy(self) -> bool:
        """Return whether `take` or `advance` may have something soon."""
        return bool(self._done)

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        times = [fetch.deadline for fetch in self._fetches.values() if fetch.limit > fetch.copying]
        if self._spill_at is not None and self._unspilled and self._spills < SPILLS:
            times.append(self._spill_at)
        due = self._io.next_due()
        if due is not None:
            times.append(due)
        return min(times, default=None)

    def advance(self, now: Seconds) -> list[FetchDone]:
        """Take in the jobs that have ended, end late fetches, write to disk; returns the fetches
        that have ended."""
        for done in self._io.poll():
            self._take(done, now)
        for lane in self._lanes.values():
            lane.age(now)
        for fetch in [each for each in self._fetches.values() if each.deadline <= now]:
            self._shorten(fetch, 0, "deadline", now)
        if self.disk is not None and not self.disk_paused:
            self._spill(now)
            for command in self.disk.commands(now):
                self._submit(Maintain(command), now)
        ended, self._done = self._done, []
        return ended

    def _submit(self, job: TierJob, now: Seconds) -> None:
        self._lanes[lane_of(job)].submit(bytes_of(job, self._block_bytes), now)
        self._disk_jobs += isinstance(job, _DISK_JOBS)
        self._io.submit(job)

    def _take(self, done: JobDone, now: Seconds) -> None:
        job = done.job
        lane, size = self._lanes[lane_of(job)], bytes_of(job, self._block_bytes)
        if done.error:
            lane.failed(size, now)
        else:
            lane.done(size, now, done.seconds)
        self._disk_jobs -= isinstance(job, _DISK_JOBS)
        match job:
            case CopyOut():
                self._stored(job, done.error, now)
            case CopyIn():
                self._copied_in(done, job, now)
            case Fill():
                self._filled(done, job, now)
            case Spill():
                self._spilled(done, job, now)
            case Maintain():
                assert self.disk is not None
                self.disk.finished(job.command, now, done.errno if done.error else 0)

    def drain_events(self) -> list[KvEvent]:
        """The events of host and disk since the last call."""
        events = self.host.drain_events()
        if self.disk is not None and not self.disk_paused:
            events += self.disk.drain_events()
        return events

    # ------------------------------------------------------------------ clearing and ending

    def clear(self) -> None:
        """Forget every block that nothing reads now, on host and disk."""
        self._unspilled.clear()
        self._spill_at = None
        for filling in self._filling.values():
            filling.unwanted = True
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def blocks(self) -> Iterator[TierBlock]:
        """Every block on host and disk, once for each; also those that are read from disk now.
        O(all)."""
        yield from filter(None, map(self.host.block, self.host.names()))
        yield from (filling.content for filling in self._filling.values())
        if self.disk is not None:
            yield from filter(None, map(self.disk.block, self.disk.hashes()))

    def drop(
        self, hashes: Collection[bytes] | None, older: Seconds, now: Seconds, since: Seconds
    ) -> dict[Tier, int]:
        """Forget these blocks, or all, and overwrite them on disk; returns their numbers by tier.
        With `older`, only what nothing has used for so long on the host, and what was written so
        long ago on disk; `since` is when this life of the core began, to which blocks of earlier
        ones count. O(all).

        Copies from the device that are under way end by themselves: the caller has dropped the
        device's blocks before.
        """

        def wanted(block_hash: bytes, age: Seconds) -> bool:
            return (hashes is None or block_hash in hashes) and age >= older

        host = [name for name in self.host.names() if wanted(name, self.host.age(name, now))]
        for name in host:
            self._unspilled.pop(name, None)
            self.host.drop(name)
        for name, filling in self._filling.items():
            filling.unwanted |= wanted(name, 0.0)
        gone: dict[Tier, int] = {"host": len(host)}
        disk = self.disk
        if disk is not None:

            def written(block: TierBlock) -> Seconds:
                born = disk.born(block.hash)
                return since if born is None else born

            gone["disk"] = disk.drop_where(lambda block: wanted(block.hash, now - written(block)))
        return gone

    def rename(self) -> None:
        """The hash secret has changed: nobody knows the names of the blocks any more. The disk is
        paused until its owner has opened it under the other secret (`reopen_disk`)."""
        self._unspilled.clear()
        self._spill_at = None
        for filling in self._filling.values():
            filling.unwanted = True
        self.host.clear()
        self.disk_paused = self.disk is not None

    def reopen_disk(self, disk: DiskIndex | None, trouble: str = "") -> list[KvEvent]:
        """Go on with another index of the disk, or with none, for the reason `trouble`. Only while
        the old one is paused and idle. Returns the event of the change."""
        self.disk, self.disk_trouble, self.disk_paused = disk, trouble, False
        return [PoolCleared(tier="disk")]

    def close(self) -> None:
        """End the threads. The files stay."""
        self._io.close()

    # ------------------------------------------------------------------ statistics

    def stats(self, now: Seconds) -> tuple[TierStats, ...]:
        """A record for each tier."""
        counts = self.host.counts()
        records = [
            self._record(
                1,
                "host",
                blocks_total=self.host.capacity,
                blocks_valid=counts.valid,
                blocks_filling=counts.filling,
                blocks_claimed=counts.claimed,
                trouble=self.trouble,
                retention=self._host_admission.retention.seconds(now) or 0.0,
            )
        ]
        if self.disk is not None:
            held = self.disk.counts()
            records.append(
                self._record(
                    2,
                    "disk",
                    blocks_total=held.block_slots
                    or held.capacity // record_bytes(self._block_bytes),
                    blocks_valid=held.blocks,
                    blocks_filling=held.writing,
                    blocks_claimed=held.claims,
                    trouble=self.disk.trouble.text(now),
                    retention=held.retention,
                    evicted=held.evicted,
                )
            )
        elif self.disk_trouble:
            records.append(TierStats(tier=2, trouble=self.disk_trouble))
        return tuple(records)

    def _record(
        self,
        tier: int,
        name: SourceName,
        *,
        blocks_total: int,
        blocks_valid: int,
        blocks_filling: int,
        blocks_claimed: int,
        trouble: str,
        retention: Seconds,
        evicted: int | None = None,
    ) -> TierStats:
        counts = self._counts[name]
        return TierStats(
            tier=tier,
            blocks_total=blocks_total,
            blocks_valid=blocks_valid,
            blocks_filling=blocks_filling,
            blocks_claimed=blocks_claimed,
            blocks_stored=counts.stored,
            blocks_evicted=counts.evicted if evicted is None else evicted,
            blocks_refused=counts.refused,
            blocks_unsaved=counts.unsaved,
            hit_tokens=counts.hit_blocks * self._block_size,
            failed=counts.failed,
            read_bytes=counts.read_bytes,
            written_bytes=counts.written_bytes,
            retention=retention,
            trouble=trouble,
        )

    def lanes(self) -> tuple[LaneLoad, ...]:
        """What each lane does now."""
        return tuple(lane.load() for lane in self._lanes.values())

    # ------------------------------------------------------------------ self-audit

    def check(self) -> None:
        """Raise AssertionError unless frames and claims have their owners. O(frames)."""
        self.host.check()
        counts = self.host.counts()
        assert counts.filling == len(self._storing) + len(self._filling), (
            f"{counts.filling} frames are being filled, for {len(self._storing)} copies and "
            f"{len(self._filling)} reads"
        )
        if self.disk is not None:
            self.disk.check()


def _parts(count: int, each: int) -> list[slice]:
    """Slices of at most `each` that cover `count` items."""
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]
