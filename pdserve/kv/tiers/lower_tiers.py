"""Keeps one engine core's host and disk tiers: what is stored there, what comes back.

    store     device blocks that will soon be evicted are copied to frames of the host arena
    spill     frames are written to disk, in batches, ahead of their eviction
    fetch     leading blocks of a prompt come back: from disk to frames, from there to the device

Nothing here waits. Jobs go out by `TierIo`, and `advance`, which the core calls between steps,
takes in their ends. Each direction decides in a file of its own in `moves`; this one joins them and
owns jobs, lanes and time.

A frame or a segment that a job reads is claimed, and one that a job writes is in no index. So what
a job touches is used for nothing else before the job has ended.

Pure but for the jobs: times are arguments. The engine core owns it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, FillShared, LookShared, Maintain, Spill
from pdserve.kv.tiers.moves.arrivals import Arrivals
from pdserve.kv.tiers.moves.counts import disk_stats, host_stats
from pdserve.kv.tiers.moves.fetching import FetchDone, Fetching, LayersCome
from pdserve.kv.tiers.moves.fills import Fills
from pdserve.kv.tiers.moves.indexes import TierIndexes
from pdserve.kv.tiers.moves.job_lanes import JobLanes
from pdserve.kv.tiers.moves.sharing import Sharing
from pdserve.kv.tiers.moves.spilling import Spilling
from pdserve.kv.tiers.moves.storing import DeviceBlock, DevicePool, Storing
from pdserve.messages.kv_events import KvEvent, PoolCleared
from pdserve.messages.tiers import LaneLoad, TierStats

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.disk.index import DiskIndex
    from pdserve.kv.tiers.disk.sealed_reader import SealedReader
    from pdserve.kv.tiers.host_index import HostIndex
    from pdserve.kv.tiers.jobs import JobDone, TierIo
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.kv.tiers.layer_groups import LayerGroups
    from pdserve.messages.kv_events import Tier
    from pdserve.messages.tiers import LaneName, SourceName

__all__ = ["DeviceBlock", "DevicePool", "FetchDone", "LayersCome", "LowerTiers"]

_log = logging.getLogger(__name__)


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
        rates: Mapping[LaneName, LaneEstimate] | None = None,
        shared: SealedReader | None = None,
    ) -> None:
        """`device` is the pool above. `rates`: the lanes that were measured. `shared` knows what
        other workers have sealed."""
        self.host = host
        self.disk_trouble = ""
        """Why there is no disk tier any more, in words for the operator."""
        self.trouble = ""
        """Why the host tier works in part, in words for the operator."""
        self._host_admission = host_admission
        self._block_size = block_size
        self._tiers = TierIndexes(host, disk, block_bytes, shared)
        self._jobs = JobLanes(io, block_bytes, rates)
        self._spilling = Spilling(self._tiers, self._jobs, disk_admission)
        self._storing = Storing(self._tiers, self._jobs, self._spilling, device, host_admission)
        self._sharing = Sharing(self._tiers, self._jobs)
        self._fills = Fills(self._tiers, self._jobs, self._sharing, self._storing.frame)
        self.arrivals = Arrivals(host, self._storing)
        """Takes in blocks that other workers send."""
        self._fetching = Fetching(self._tiers, self._jobs, self._fills)

    # ------------------------------------------------------------------ reading

    @property
    def disk(self) -> DiskIndex | None:
        """The disk tier; None: there is none."""
        return self._tiers.disk

    @property
    def disk_paused(self) -> bool:
        """While True nothing is looked up on disk, read or written."""
        return self._tiers.disk_paused

    @property
    def disk_idle(self) -> bool:
        """Return whether nothing is read from disk or written to it."""
        return not self._jobs.disk_jobs

    def has(self, block_hash: bytes) -> bool:
        """Return whether a block is on the host or on disk. Takes no claim."""
        return block_hash in self.host or self._tiers.on_disk(block_hash)

    def parent(self, block_hash: bytes) -> bytes | None:
        """Hash before that of a block on the host or on disk; None if it is not there."""
        return self._tiers.parent(block_hash)

    def run(self, hashes: Sequence[bytes], start: int = 0) -> list[SourceName]:
        """Where the blocks `hashes[start:]` are, up to the first that is nowhere. No claim is
        taken."""
        return self._tiers.run(hashes, start)

    def blocks(self) -> Iterator[TierBlock]:
        """Every block on host and disk, once for each; also those that are read from disk now, and
        those of other workers. O(all)."""
        yield from filter(None, map(self.host.block, self.host.names()))
        yield from self._fills.contents()
        if self.disk is not None:
            yield from filter(None, map(self.disk.block, self.disk.hashes()))
        if self._tiers.shared is not None:
            yield from self._tiers.shared.blocks()

    # ------------------------------------------------------------------ storing

    def wants(self, block_hash: bytes) -> bool:
        """Return whether a device block is to be offered: it is not on the host nor on its way
        there, and was not refused."""
        return self._storing.wants(block_hash)

    def keep(self, block_hash: bytes, now: Seconds) -> None:
        """A device block is evicted soon: what the host has of it is needed from now on."""
        self._storing.keep(block_hash, now)

    def store(self, sources: Sequence[DeviceBlock], now: Seconds, *, spare: bool = False) -> int:
        """Begin to copy these device blocks to the host, as far as there is room and admission
        allows; returns how many were taken or refused. With `spare`, nothing is lost for them: they
        take free frames, and those of blocks that are on disk too."""
        return self._storing.store(sources, now, spare=spare)

    def used(self, block_hash: bytes, turns: int, now: Seconds) -> None:
        """Take note that a request uses a block; one that was refused before may be taken now."""
        self._storing.used(block_hash, turns, now)

    def follow(self, events: Sequence[KvEvent], now: Seconds) -> None:
        """Take note of what the device pool has stored and removed."""
        self._storing.follow(events, now)

    # ------------------------------------------------------------------ bringing to the host

    def comes(self, block_hash: bytes) -> bool:
        """Return whether a block is on its way to the host, from the device or from disk."""
        return block_hash in self._storing.under_way or block_hash in self._fills

    def lift(self, block_hash: bytes, now: Seconds) -> bool:
        """Read a block from disk to the host; False: it is not there, or there is no frame."""
        return self._fills.lift(block_hash, now)

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
        device blocks. `FetchDone` with this number follows, in `advance`."""
        self._fetching.begin(number, hashes, parent, blocks, now, deadline)

    def cancel(self, number: int, now: Seconds) -> None:
        """End a fetch; `FetchDone` follows when nothing writes to its blocks any more."""
        self._fetching.cancel(number, now)

    @property
    def layers(self) -> LayerGroups | None:
        """How blocks are divided, so that steps may begin before all layers have come; None: they
        are copied whole."""
        return self._fetching.layers

    @layers.setter
    def layers(self, layers: LayerGroups | None) -> None:
        self._fetching.layers = layers

    def take_layers(self) -> list[LayersCome]:
        """The layer groups that have come since the last call, of fetches that may have ended."""
        return self._fetching.take_layers()

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        """Wait until the copies of a fetch's layer group have ended, at most `seconds`; then
        `advance` takes them in. False: they have not."""
        return self._jobs.io.wait_copied(fetch, group, seconds)

    def copied_at(self, fetch: int, group: int) -> Seconds | None:
        """When those copies end, in simulated time; None: it is not known, or they have ended."""
        return self._jobs.io.copied_at(fetch, group)

    def count_hits(self, source: SourceName, blocks: int) -> None:
        """Count blocks that the device has got from a tier without a fetch."""
        counts = self._tiers.disk_counts if source == "disk" else self._tiers.host_counts
        counts.hit_blocks += blocks

    def came_late(self) -> None:
        """Count a step whose layers did not come in time."""
        self._tiers.host_counts.failed += 1

    # ------------------------------------------------------------------ time and jobs

    @property
    def busy(self) -> bool:
        """Return whether `advance` may have something soon."""
        return self._fetching.some_done

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        due = (
            self._fetching.next_deadline(),
            self._spilling.due(),
            self._sharing.due(),
            self._jobs.io.next_due(),
        )
        return min((time for time in due if time is not None), default=None)

    def advance(self, now: Seconds) -> list[FetchDone]:
        """Take in the jobs that have ended, end late fetches, write to disk; returns the fetches
        that have ended."""
        for done in self._jobs.io.poll():
            self._take(done, now)
        self._jobs.age(now)
        self._fetching.expire(now)
        disk = self._tiers.open_disk
        if disk is not None:
            self._spilling.spill(now)
            self._sharing.look(now)
            for command in disk.commands(now):
                self._jobs.submit(Maintain(command), now)
        return self._fetching.take_done()

    def _take(self, done: JobDone, now: Seconds) -> None:
        self._jobs.ended(done, now)
        match done.job:
            case CopyOut() as job:
                self._storing.stored(job, done.error, now)
            case CopyIn() as job:
                self._fetching.copied_in(done, job, now)
            case Fill() | FillShared() as job:
                self._fetching.filled(done, job, now)
            case Spill() as job:
                self._spilling.spilled(done, job, now)
            case LookShared():
                self._sharing.looked(done, now)
            case Maintain(command):
                assert self.disk is not None
                self.disk.finished(command, now, done.errno if done.error else 0)

    def drain_events(self) -> list[KvEvent]:
        """The events of host and disk since the last call."""
        events = self.host.drain_events()
        disk = self._tiers.open_disk
        return events if disk is None else events + disk.drain_events()

    # ------------------------------------------------------------------ clearing and ending

    def clear(self) -> None:
        """Forget every block that nothing reads now, on host and disk."""
        self._forget_host()
        # Files of other workers may have what is not to be used any more, and are not for it to
        # remove: so they are not looked at again.
        self._tiers.shared = None
        if self.disk is not None:
            self.disk.clear()

    def _forget_host(self) -> None:
        self._spilling.clear()
        self._fills.drop(lambda block_hash: True)
        self.host.clear()

    def drop(
        self, hashes: Collection[bytes] | None, older: Seconds, now: Seconds, since: Seconds
    ) -> dict[Tier, int]:
        """Forget these blocks, or all, and overwrite them on disk; returns their numbers by tier.
        With `older`, only what nothing has used for so long on the host, and what was written so
        long ago on disk; `since` is when this life of the core began, to which blocks of earlier
        ones count. O(all). Without `older`, subdirectories of other secrets or models that this
        worker may remove go as a whole: whose blocks they hold cannot be told.

        Copies from the device that are under way end by themselves: the caller has dropped the
        device's blocks before.
        """

        def wanted(block_hash: bytes, age: Seconds) -> bool:
            return (hashes is None or block_hash in hashes) and age >= older

        host = [name for name in self.host.names() if wanted(name, self.host.age(name, now))]
        for name in host:
            self._spilling.withdraw(name)
            self.host.drop(name)
        self._fills.drop(lambda name: wanted(name, 0.0))
        if not older:  # when others wrote theirs is not known
            self._sharing.drop(lambda name: wanted(name, 0.0))
        gone: dict[Tier, int] = {"host": len(host)}
        disk = self.disk
        if disk is not None:

            def written(block: TierBlock) -> Seconds:
                born = disk.born(block.hash)
                return since if born is None else born

            gone["disk"] = disk.drop_where(lambda block: wanted(block.hash, now - written(block)))
            if not older and (count := disk.drop_unreachable()):
                _log.info("%d subdirectories of another secret or model are removed", count)
        return gone

    def rename(self) -> None:
        """The hash secret has changed: nobody knows the names of the blocks any more. The disk is
        paused until its owner has opened it under the other secret (`reopen_disk`)."""
        self._forget_host()
        self._tiers.disk_paused = self.disk is not None

    def reopen_disk(
        self, disk: DiskIndex | None, trouble: str = "", shared: SealedReader | None = None
    ) -> list[KvEvent]:
        """Go on with another index of the disk, or with none, for the reason `trouble`. Only while
        the old one is paused and idle. Returns the event of the change."""
        self._tiers.disk, self._tiers.shared, self._tiers.disk_paused = disk, shared, False
        self._sharing.restart()
        self.disk_trouble = trouble
        return [PoolCleared(tier="disk")]

    def close(self) -> None:
        """End the threads. The files stay."""
        self._jobs.io.close()

    # ------------------------------------------------------------------ statistics and self-audit

    def stats(self, now: Seconds) -> tuple[TierStats, ...]:
        """A record for each tier."""
        tiers, size = self._tiers, self._block_size
        retention = self._host_admission.retention.seconds(now) or 0.0
        host = host_stats(self.host, tiers.host_counts, size, retention, self.trouble)
        if tiers.disk is not None:
            return host, disk_stats(tiers, tiers.disk, self._sharing.counts, size, now)
        return (
            (host, TierStats(tier=2, trouble=self.disk_trouble)) if self.disk_trouble else (host,)
        )

    def lanes(self) -> tuple[LaneLoad, ...]:
        """What each lane does now."""
        return self._jobs.loads()

    def lane_estimates(self) -> dict[LaneName, LaneEstimate]:
        """What each lane is predicted to do."""
        return self._jobs.estimates()

    def check(self) -> None:
        """Raise AssertionError unless frames and claims have their owners. O(frames)."""
        self.host.check()
        counts = self.host.counts()
        copies, reads = len(self._storing.under_way), len(self._fills)
        peers = len(self.arrivals)
        assert counts.filling == copies + reads + peers, (
            f"{counts.filling} frames are being filled, for {copies} copies, {reads} reads and "
            f"{peers} blocks of peers"
        )
        if self.disk is not None:
            self.disk.check()
