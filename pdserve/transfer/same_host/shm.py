"""Moves KV in host memory on one host: the destination maps the source's pool and copies from it.

Descriptors are passed over the Unix socket (SCM_RIGHTS), not opened through /proc/PID/fd: what is
passed is fixed, while a PID may belong to another process by then; no common PID namespace is
needed. Pools are passed read-only and must be sealed against shrinking, so that a peer can neither
write to them nor make the reader fault. `pull_transport` has everything else.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

from pdserve.errors import PathLost
from pdserve.transfer.copy_plan import split_runs
from pdserve.transfer.copying import (
    CHUNK,
    NON_TEMPORAL_BYTES,
    checksum,
    chunks,
    copy_runs,
    copy_summed,
)
from pdserve.transfer.same_host.pull_transport import PATIENCE, PullPath, PullTransport
from pdserve.transfer.same_host.shared_table import PeerMapping, map_peer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.block_mapping import RegionCopy
    from pdserve.transfer.same_host.pull_transport import PullJob
    from pdserve.transfer.same_host.unix_socket import SocketGreeting
    from pdserve.transfer.verify import Verify

__all__ = ["ShmPath", "ShmTransport"]

_Place = tuple[memoryview, memoryview, memoryview, memoryview, memoryview]
"""Destination, source, and the runs between them: to, from, lengths."""


class ShmPath(PullPath):
    """A path that copies from the peer's shared memory."""

    backend = "shm"

    def _map(self, greeting: SocketGreeting, fds: Sequence[int]) -> PeerMapping:
        self._peer = map_peer(fds, self.theirs)
        return self._peer

    def _copy(self, job: PullJob, moves: Sequence[RegionCopy]) -> Bytes:
        streaming = self._streaming(job)
        return sum(copy_runs(*place, streaming) for place in self._places(job, moves))

    def _bring(self, job: PullJob) -> tuple[str, Bytes]:
        """With checksums of everything, sums are computed while copying."""
        if not job.summed_whole():
            return super()._bring(job)
        streaming, size = self._streaming(job), 0
        for place, count, expected in job.fetch.sums:
            some, total = job.share.part(place - job.first, count), 0
            moves = self.into.moves(some, job.granted.ticket.blocks)
            for copied in self._places(job, moves):
                total = copy_summed(*copied, streaming, total)
            if job.stop:
                break
            size += self.into.size(some)
            if total != expected:
                return self.differs(job, place, count), size
        return "", size

    async def probe(self, size: Bytes) -> Bytes:
        """Copy from the peer's first pool. The one thread that copies also unmaps it, later."""
        if self.down is not None:
            raise self._error(PathLost, "", "probe", self.down.message)
        copied: Bytes = await self.transport.run(partial(self._copy_probe, size))
        return copied

    def _copy_probe(self, size: Bytes) -> Bytes:
        source = self._peer.views[0]
        size = min(size, len(source))
        begin, length = array("q", [0]), array("q", [size])
        with memoryview(bytearray(size)) as scratch:
            copy_runs(scratch, source, begin, begin, length, size >= NON_TEMPORAL_BYTES)
        return size

    def _streaming(self, job: PullJob) -> bool:
        return self.into.size(job.share) >= NON_TEMPORAL_BYTES

    def _places(self, job: PullJob, moves: Sequence[RegionCopy]) -> Iterator[_Place]:
        """What to copy next, a chunk at a time, until the job is to stop."""
        for move in moves:
            memory, source = (
                self.transport.regions[move.destination].view,
                self._peer.views[move.source],
            )
            assert memory is not None
            for runs in chunks(split_runs(move.runs, CHUNK)):
                if job.stop:
                    return
                yield memory, source, *runs


class ShmTransport(PullTransport):
    """A node whose regions have descriptors."""

    name = "shm"
    path_type = ShmPath
    inline = 256 << 10  # about 50 us, as long as two changes of threads

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        *,
        verify: Verify = "sample",
        patience: Seconds = PATIENCE,
    ) -> None:
        """Every region needs a view and a descriptor. Errors: ValueError if one lacks them,
        `OSError` if the system lacks a feature."""
        if any(region.view is None or region.fd is None for region in regions):
            raise ValueError("shared memory needs regions with a view and a descriptor")
        super().__init__(node, epoch, regions, ask, verify=verify, patience=patience)

    def _pass(self) -> tuple[list[int], bytes]:
        return [region.fd for region in self.regions if region.fd is not None], b""

    def _sum(self, region: int, from_: array[int], lengths: array[int], start: int) -> int:
        view = self.regions[region].view
        assert view is not None
        return checksum(view, from_, lengths, start)
