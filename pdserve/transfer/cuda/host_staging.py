"""Stages device memory through pinned host buffers, for transports that move host memory only.

    load     copies runs of the pools to the host; the caller sends each buffer
    store    gives out buffers to fill, and copies each one to its place in the pools
    drain    waits until no copy is under way

A ring has a fixed number of buffers, and copies in streams of its own: it waits for no kernel of
the engine. A buffer is used again after its last copy has ended. One thread at a time loads or
stores; any other may drain meanwhile. After an error of the driver the ring waits for what is under
way, and refuses all that follows. It knows neither paths nor grants.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.transfer.cuda.driver import CudaError
from pdserve.transfer.cuda.nvidia import NvidiaDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pdserve.ids import Bytes
    from pdserve.transfer.base import Region
    from pdserve.transfer.cuda.driver import CudaDriver, CudaStream, PinnedMemory

__all__ = ["BUFFER", "BUFFERS", "PoolRuns", "StagingRing", "unsupported_reason"]

_log = logging.getLogger(__name__)

BUFFER: Final[Bytes] = 1 << 20
"""Bytes of one buffer: about 50 us on PCIe, several times what a copy costs by itself."""
BUFFERS: Final = 4
"""Buffers of a ring: one that the network empties or fills, and three that the device does."""

PoolRuns = tuple[int, "Iterable[int]", "Iterable[int]"]
"""Runs of one pool: its index, and the runs' offsets and lengths, in the order in which they
travel."""


def unsupported_reason(regions: Sequence[Region], driver: CudaDriver | None = None) -> str:
    """Why these pools cannot be staged; empty: they can. Copies a byte of each to find out."""
    try:
        found = NvidiaDriver() if driver is None else driver
        ring = StagingRing(found, [region.address for region in regions])
        try:
            for _ in ring.load([(pool, (0,), (1,)) for pool in range(len(regions))]):
                pass
        finally:
            ring.close()
    except (CudaError, RuntimeError) as error:
        return str(error)
    return ""


class _Copies(NamedTuple):
    """Runs of one pool, and where they are in a buffer."""

    pool: int
    offsets: array[int]
    lengths: array[int]
    begin: Bytes


@dataclass(slots=True)
class _Piece:
    """What one buffer takes."""

    copies: list[_Copies] = field(default_factory=list)
    size: Bytes = 0


@dataclass(slots=True)
class _Buffer:
    memory: PinnedMemory
    marks: list[tuple[CudaStream, object]] = field(default_factory=list)
    """The ends of its copies that are under way."""


class StagingRing:
    """The buffers of one direction of a path, allocated at first use. The pools must outlive it."""

    def __init__(self, driver: CudaDriver, pools: Sequence[int]) -> None:
        """`pools`: their device addresses."""
        self._driver = driver
        self._pools = pools
        self._lock = threading.Lock()
        """Held while copies are queued or waited for."""
        self._buffers: list[_Buffer] = []
        self._streams: dict[int, CudaStream] = {}
        self._turn = 0
        self._ended = ""
        """Why nothing is copied any more; empty: it is."""
        self.waits = 0
        """Waits for the device that have ended."""
        self.waiting = False
        """True while a thread waits for the device. Like `waits` it may be read without the
        lock."""

    # ------------------------------------------------------------------ copies

    def load(self, runs: Iterable[PoolRuns]) -> Iterator[memoryview]:
        """Copy these runs to the host. Yields their bytes in order; each view is valid until the
        next one is asked for. Errors: `CudaError`."""
        under_way: deque[tuple[_Buffer, Bytes]] = deque()
        for piece in _pieces(runs):
            if len(under_way) == BUFFERS - 1:
                yield self._loaded(*under_way.popleft())
            buffer = self._next()
            self._queue(buffer, piece, loading=True)
            under_way.append((buffer, piece.size))
        while under_way:
            yield self._loaded(*under_way.popleft())

    def store(self, runs: Iterable[PoolRuns], allowed: Callable[[], bool]) -> Iterator[memoryview]:
        """Yield buffers to fill, in the order of the runs. Each one is copied when the next one is
        asked for, if `allowed` is true then. A `drain` that begins after `allowed` became false
        returns when no copy of these runs is under way or to come. Errors: `CudaError`."""
        for piece in _pieces(runs):
            buffer = self._next()
            yield buffer.memory.view[: piece.size]
            self._queue(buffer, piece, loading=False, allowed=allowed)

    def drain(self) -> None:
        """Return when no copy is under way. An error of the driver ends the ring, which is the
        same; `load` and `store` raise it."""
        with self._lock, contextlib.suppress(CudaError):
            for buffer in self._buffers:
                self._wait(buffer)

    def check(self) -> None:
        """Errors: `CudaError` if a copy has failed."""
        if self._ended:
            raise CudaError(self._ended)

    def close(self) -> None:
        """Return when no copy is under way, and free the buffers. Their views must not be used any
        more. Idempotent."""
        with self._lock:
            self._end("the ring of staging buffers is closed")
            while self._buffers:
                try:
                    self._driver.unpin(self._buffers.pop().memory)
                except CudaError as error:
                    _log.warning("a staging buffer could not be freed: %s", error)

    # ------------------------------------------------------------------ in the lock

    def _next(self) -> _Buffer:
        """The next buffer; no copy uses it."""
        with self._lock:
            self.check()
            while len(self._buffers) < BUFFERS:
                self._buffers.append(_Buffer(self._driver.pin(BUFFER, self._pools[0])))
            buffer = self._buffers[self._turn % BUFFERS]
            self._turn += 1
            self._wait(buffer)
            return buffer

    def _loaded(self, buffer: _Buffer, size: Bytes) -> memoryview:
        with self._lock:
            self.check()
            self._wait(buffer)
            return buffer.memory.view[:size]

    def _queue(
        self,
        buffer: _Buffer,
        piece: _Piece,
        *,
        loading: bool,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        with self._lock, self._ending():
            self.check()
            if not allowed():
                return
            for copies in piece.copies:
                stream = self._stream(copies.pool)
                staged = _in_a_row(buffer.memory.address + copies.begin, copies.lengths)
                pool = self._pools[copies.pool]
                placed = array("q", [pool + offset for offset in copies.offsets])
                ends = (staged, placed) if loading else (placed, staged)
                stream.copy(*ends, copies.lengths)
                buffer.marks.append((stream, stream.mark()))

    def _stream(self, pool: int) -> CudaStream:
        stream = self._streams.get(pool)
        if stream is None:
            stream = self._streams[pool] = self._driver.stream(self._pools[pool])
        return stream

    def _wait(self, buffer: _Buffer) -> None:
        """Wait for the copies of a buffer. Errors: `CudaError`."""
        with self._ending():
            while buffer.marks:
                self.waiting = True
                stream, mark = buffer.marks.pop()
                stream.wait(mark)
                self.waits += 1
        self.waiting = False

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """An error ends the ring: copies without a mark may be under way."""
        try:
            yield
        except CudaError as error:
            self._end(str(error))
            raise

    def _end(self, reason: str) -> None:
        """Wait for the streams, and destroy them. One that cannot be waited for is broken, and
        copies nothing any more."""
        self._ended = self._ended or reason
        streams, self._streams = self._streams, {}
        self.waiting = bool(streams)
        for stream in streams.values():
            try:
                stream.close()
            except CudaError as error:
                _log.warning("a staging stream could not be closed: %s", error)
        self.waiting = False
        for buffer in self._buffers:
            buffer.marks.clear()


def _pieces(runs: Iterable[PoolRuns]) -> Iterator[_Piece]:
    """Cut the runs into pieces of a buffer's size; the last one may be smaller."""
    piece = _Piece()
    for pool, offsets, lengths in runs:
        copies = _Copies(pool, array("q"), array("q"), piece.size)
        for offset, length in zip(offsets, lengths, strict=True):
            at, end = offset, offset + length
            while at < end:
                step = min(end - at, BUFFER - piece.size)
                copies.offsets.append(at)
                copies.lengths.append(step)
                at += step
                piece.size += step
                if piece.size == BUFFER:
                    piece.copies.append(copies)
                    yield piece
                    piece = _Piece()
                    copies = _Copies(pool, array("q"), array("q"), 0)
        if copies.lengths:
            piece.copies.append(copies)
    if piece.size:
        yield piece


def _in_a_row(address: int, lengths: Iterable[int]) -> array[int]:
    """Addresses of runs that lie one after the other."""
    addresses = array("q")
    for length in lengths:
        addresses.append(address)
        address += length
    return addresses
