"""Moves KV between GPUs of one host: the destination copies from the source's pool, opened by CUDA
IPC.

The greeting passes a handle of each pool (`cuIpcGetMemHandle`). Both ends need the same user, the
same host, and the same GPU or peer access between the two; ROCm is not supported. A part becomes
copies on a CUDA stream, run by run, or by one kernel if the runs are many and short. Threads queue
the copies and wait for them, so the event loop does not. `pull_transport` has everything else,
above all what guards the bytes.

**Fence**: queued copies cannot be taken back, but they end soon: they are queued in chunks, two at
a time, and `revoke` waits for these.

**Memory that another process has opened must not be freed.** So a path that ends waits until the
peer reports that it has closed what it opened, and logs a warning if it does not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.transfer.copy_plan import PlanError, split_runs
from pdserve.transfer.copying import chunks, crc32
from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport
from pdserve.transfer.cuda.host_staging import StagingRing
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve.transfer.same_host.pull_transport import PATIENCE, PullPath, PullTransport
from pdserve.transfer.same_host.shared_table import map_table

if TYPE_CHECKING:
    import mmap
    import socket
    from collections.abc import Iterable, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.block_mapping import RegionCopy
    from pdserve.transfer.cuda.driver import CudaDriver, CudaStream
    from pdserve.transfer.same_host.pull_transport import PullJob, Verify
    from pdserve.transfer.same_host.unix_socket import SocketGreeting

__all__ = ["CHUNK", "CudaIpcPath", "CudaIpcTransport", "unsupported_reason"]

_log = logging.getLogger(__name__)

CHUNK: Final[Bytes] = 64 << 20
"""Bytes queued on a stream between two checks for a stop: a fraction of a millisecond over NVLink,
a few milliseconds over PCIe."""
UNMAPPING: Final[Seconds] = 5.0
"""How long an ending path waits for the peer to close what it has opened."""


def unsupported_reason(regions: Sequence[Region], driver: CudaDriver | None = None) -> str:
    """Why these pools cannot be shared; empty: they can. It exports each pool to find out (memory
    of torch with `expandable_segments:True` cannot be exported)."""
    try:
        found = NvidiaDriver() if driver is None else driver
        for region in regions:
            found.export(region.address, region.size)
    except (CudaError, RuntimeError) as error:
        return str(error)
    return ""


class _Words(msgspec.Struct, frozen=True, array_like=True):
    """The backend's part of the greeting."""

    pools: tuple[CudaIpcExport, ...]


@dataclass(slots=True)
class _Opened:
    """A peer's pools, mapped for one or more devices of this node; implements
    `pull_transport.PeerPools`."""

    driver: CudaDriver
    table: mmap.mmap
    pools: dict[tuple[int, int], tuple[CudaIpcExport, int, int]] = field(default_factory=dict)
    """Opened pools by (peer's region, own region): the opened export, its address here, and the
    address whose device opened it."""

    def address(self, move: RegionCopy) -> int:
        return self.pools[move.source, move.destination][1]

    def close(self) -> None:
        self.table.close()
        for opened in self.pools.values():
            try:
                self.driver.close(*opened)
            except CudaError as error:
                _log.warning("cuda_ipc: a pool of the peer could not be closed: %s", error)
        self.pools.clear()


class CudaIpcPath(PullPath):
    """A path that copies from the peer's GPU memory."""

    backend = "cuda_ipc"
    transport: CudaIpcTransport

    def _map(self, greeting: SocketGreeting, fds: Sequence[int]) -> _Opened:
        try:
            pools = msgspec.msgpack.decode(greeting.words, type=_Words).pools
        except msgspec.MsgspecError as error:
            raise PlanError(f"the peer's greeting cannot be decoded: {error}") from error
        if len(fds) != 1 or len(pools) != len(self.theirs):
            raise PlanError(f"the greeting has {len(fds)} descriptors and {len(pools)} pools")
        regions = self.transport.regions
        opened = _Opened(self.transport.driver, map_table(fds[0], self.theirs))
        try:
            for there, here in self.into.pairs:
                beside = regions[here].address
                address = opened.driver.open(pools[there], beside)
                opened.pools[there, here] = (pools[there], address, beside)
        except BaseException:
            opened.close()
            raise
        self._opened = opened
        return opened

    def _copy(self, job: PullJob, moves: Sequence[RegionCopy]) -> Bytes:
        """Streams of several devices copy side by side."""
        lanes: list[_Lane] = []
        try:
            return sum(self._ask_for(job, move, lanes) for move in moves)
        finally:
            self._drain(lanes)

    def _drain(self, lanes: Sequence[_Lane]) -> None:
        """Wait until nothing is under way on these streams. Raises the first error, after all have
        been waited for."""
        errors: list[CudaError] = []
        for lane in lanes:
            try:
                lane.drain()
            except CudaError as error:
                errors.append(error)
            else:
                self.transport.give_back(lane)
        if errors:
            raise errors[0]

    def _ask_for(self, job: PullJob, move: RegionCopy, lanes: list[_Lane]) -> Bytes:
        lane = self.transport.lane(move.destination)
        lanes.append(lane)
        here, there = self.transport.regions[move.destination].address, self._opened.address(move)
        size = 0
        for to, from_, lengths in chunks(split_runs(move.runs, CHUNK), CHUNK):
            if job.stop:
                break
            size += lane.copy(_shifted(to, here), _shifted(from_, there), array("q", lengths))
        return size

    async def _part(self, connection: socket.socket) -> None:
        """Tell the peer that this end has closed its pools, and wait until it says the same."""
        loop = asyncio.get_running_loop()
        try:
            connection.shutdown(1)
            async with asyncio.timeout(UNMAPPING):
                while await loop.sock_recv(connection, 1 << 17):
                    pass
        except TimeoutError:
            _log.warning(
                "%r: the peer has not closed this node's memory within %g s; do not free it",
                self,
                UNMAPPING,
            )
        except OSError:
            pass  # it has ended, and with it what it had opened


def _shifted(offsets: Iterable[int], base: int) -> array[int]:
    return array("q", [base + offset for offset in offsets])


class _Lane:
    """A stream and the chunks queued on it."""

    def __init__(self, stream: CudaStream, region: int) -> None:
        self.stream = stream
        self.region = region
        self._marks: deque[object] = deque()

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> Bytes:
        """Queue a chunk once at most one is under way."""
        while len(self._marks) > 1:
            self.stream.wait(self._marks.popleft())
        self.stream.copy(to, from_, lengths)
        self._marks.append(self.stream.mark())
        return sum(lengths)

    def drain(self) -> None:
        """Wait until nothing is under way. Errors: `CudaError` if a copy failed."""
        self._marks.append(self.stream.mark())
        while self._marks:
            self.stream.wait(self._marks.popleft())


class CudaIpcTransport(PullTransport):
    """A node whose regions are in device memory, at `Region.address`. Each must be within one
    allocation of cuMemAlloc or cudaMalloc. Blocks must be complete before they are delivered: the
    caller has synchronised with the device."""

    name = "cuda_ipc"
    path_type = CudaIpcPath
    threads = 2

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        *,
        verify: Verify = "sample",
        patience: Seconds = PATIENCE,
        driver: CudaDriver | None = None,
    ) -> None:
        """Errors: ValueError for a region without an address, `CudaError` if CUDA cannot be used or
        a region cannot be shared."""
        if any(not region.address for region in regions):
            raise ValueError("device memory needs regions with an address")
        self.driver: CudaDriver = NvidiaDriver() if driver is None else driver
        self._exported = tuple(self.driver.export(r.address, r.size) for r in regions)
        self._lanes: list[_Lane] = []
        self._rings: list[StagingRing] = []
        """Unused buffers for checksums; as many as threads have summed at a time."""
        self._free = threading.Lock()
        super().__init__(node, epoch, regions, ask, verify=verify, patience=patience)

    def _pass(self) -> tuple[list[int], bytes]:
        return [], msgspec.msgpack.encode(_Words(self._exported))

    def _sum(self, region: int, from_: array[int], lengths: array[int], start: int) -> int:
        ring = self._ring()
        try:
            for view in ring.load([(region, from_, lengths)]):
                start = crc32(view, start)
        except BaseException:
            ring.close()
            raise
        with self._free:
            self._rings.append(ring)
        return start

    def _ring(self) -> StagingRing:
        """Unused buffers to bring bytes to the host, in a stream that waits for no kernel."""
        with self._free:
            if self._rings:
                return self._rings.pop()
        return StagingRing(self.driver, [region.address for region in self.regions])

    # ------------------------------------------------------------------ streams, in threads

    def lane(self, region: int) -> _Lane:
        """An unused stream on the region's device."""
        with self._free:
            for lane in self._lanes:
                if lane.region == region:
                    self._lanes.remove(lane)
                    return lane
        return _Lane(self.driver.stream(self.regions[region].address), region)

    def give_back(self, lane: _Lane) -> None:
        """Return a stream on which nothing is under way."""
        with self._free:
            self._lanes.append(lane)

    async def close(self) -> None:
        """Close every path, then the streams, the buffers and the driver's memory."""
        await super().close()
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.stream.close()
        rings, self._rings = self._rings, []
        for ring in rings:
            ring.close()
        self.driver.release()
