"""Moves KV in host memory on one host: the destination maps the source's pool and copies from it.

Descriptors are passed over the Unix socket (SCM_RIGHTS), not opened through /proc/PID/fd: what is
passed is fixed, while a PID may belong to another process by then; no common PID namespace is
needed. Pools are passed read-only and must be sealed against shrinking, so that a peer can neither
write to them nor make the reader fault. `pull_transport` has everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.transfer.copy_plan import split_runs
from pdserve.transfer.copying import CHUNK, NON_TEMPORAL_BYTES, checksum, chunks, copy_runs
from pdserve.transfer.same_host.pull_transport import PATIENCE, PullPath, PullTransport
from pdserve.transfer.same_host.shared_table import PeerMapping, map_peer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.block_mapping import RegionCopy
    from pdserve.transfer.same_host.pull_transport import PullJob
    from pdserve.transfer.same_host.unix_socket import SocketGreeting
    from pdserve.transfer.verify import Verify

__all__ = ["ShmPath", "ShmTransport"]


class ShmPath(PullPath):
    """A path that copies from the peer's shared memory."""

    backend = "shm"

    def _map(self, greeting: SocketGreeting, fds: Sequence[int]) -> PeerMapping:
        self._peer = map_peer(fds, self.theirs)
        return self._peer

    def _copy(self, job: PullJob, moves: Sequence[RegionCopy]) -> Bytes:
        size = 0
        streaming = sum(move.runs.size for move in moves) >= NON_TEMPORAL_BYTES
        for move in moves:
            memory = self.transport.regions[move.destination].view
            assert memory is not None
            for to, from_, lengths in chunks(split_runs(move.runs, CHUNK)):
                if job.stop:
                    return size
                source = self._peer.views[move.source]
                size += copy_runs(memory, source, to, from_, lengths, streaming)
        return size


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

    def _sum(self, region: int, runs: Iterable[tuple[Bytes, Bytes]], start: int) -> int:
        view = self.regions[region].view
        assert view is not None
        return checksum(view, runs, start)
