"""Gives a TCP path the bytes of this node's pools, and takes those that come.

Host memory is sent from and received into its place. Device memory is staged: it goes through
pinned buffers, a ring for each direction of the path (`cuda.host_staging`). The path does not know
which of the two it has, but must not touch device memory on the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.transfer.cuda.host_staging import StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.transfer.base import Region
    from pdserve.transfer.block_mapping import RegionCopy
    from pdserve.transfer.cuda.driver import CudaDriver
    from pdserve.transfer.cuda.host_staging import PoolRuns

__all__ = ["HostPools", "PoolAccess", "StagedPools"]


class PoolAccess(Protocol):
    """The pools of one end of one path. Both iterables are in the order in which bytes travel."""

    waits: bool
    """Whether its methods wait for a device, so that only threads may call them."""

    def source(self, moves: Sequence[RegionCopy]) -> Iterable[Sequence[memoryview]]:
        """The bytes of these runs; each batch is valid until the next one is asked for. Errors:
        `CudaError`."""
        ...

    def destination(
        self, moves: Sequence[RegionCopy], allowed: Callable[[], bool]
    ) -> Iterable[Sequence[memoryview]]:
        """Memory to fill; each batch must be full before the next one is asked for. While `allowed`
        is false nothing is placed. Errors: `CudaError`."""
        ...

    def place(self) -> None:
        """Return when all that was filled is in the pools. Errors: `CudaError`."""
        ...

    def fence(self) -> None:
        """Return when nothing is under way to the pools, or to come for an `allowed` that is
        false."""
        ...

    def position(self) -> object | None:
        """A value that changes when a wait for the device ends; None: no thread waits."""
        ...

    def close_source(self) -> None:
        """Return when the pools are not read any more. Called once `source` is not used."""
        ...

    def close_destination(self) -> None:
        """Return when nothing is written to the pools any more. Called once `destination` is not
        used."""
        ...


class HostPools:
    """Pools in host memory; implements `PoolAccess`. Nothing here waits."""

    waits = False

    def __init__(self, regions: Sequence[Region]) -> None:
        """Every region needs a view."""
        self._memories = [region.view for region in regions]

    def source(self, moves: Sequence[RegionCopy]) -> Iterable[Sequence[memoryview]]:
        """The runs themselves, in one batch."""
        return (self._views(_ends(moves, source=True)),)

    def destination(
        self, moves: Sequence[RegionCopy], allowed: Callable[[], bool]
    ) -> Iterable[Sequence[memoryview]]:
        """The runs themselves, in one batch. The caller checks before it writes."""
        return (self._views(_ends(moves, source=False)),)

    def _views(self, runs: Iterable[PoolRuns]) -> list[memoryview]:
        views = []
        for region, offsets, lengths in runs:
            memory = self._memories[region]
            assert memory is not None
            pairs = zip(offsets, lengths, strict=True)
            views += [memory[at : at + length] for at, length in pairs]
        return views

    def place(self) -> None:
        """Bytes are received in their place."""

    def fence(self) -> None:
        """The caller's lock is the fence."""

    def position(self) -> None:
        """None: it never waits."""

    def close_source(self) -> None:
        """Nothing is owned."""

    def close_destination(self) -> None:
        """Nothing is owned."""


class StagedPools:
    """Pools in device memory; implements `PoolAccess`."""

    waits = True

    def __init__(self, regions: Sequence[Region], driver: CudaDriver) -> None:
        """Every region needs an address."""
        pools = [region.address for region in regions]
        self._out, self._in = StagingRing(driver, pools), StagingRing(driver, pools)

    def source(self, moves: Sequence[RegionCopy]) -> Iterable[Sequence[memoryview]]:
        """Buffers with the bytes of the runs."""
        return ([view] for view in self._out.load(_ends(moves, source=True)))

    def destination(
        self, moves: Sequence[RegionCopy], allowed: Callable[[], bool]
    ) -> Iterable[Sequence[memoryview]]:
        """Buffers, each of which is copied to the device when the next one is asked for."""
        return ([view] for view in self._in.store(_ends(moves, source=False), allowed))

    def place(self) -> None:
        """Wait for the copies to the device. Errors: `CudaError` if one has failed."""
        self._in.drain()
        self._in.check()

    def fence(self) -> None:
        """Wait for the copies to the device."""
        self._in.drain()

    def position(self) -> object | None:
        """How often each ring has waited, while one waits."""
        if not (self._in.waiting or self._out.waiting):
            return None
        return self._out.waiting, self._out.waits, self._in.waiting, self._in.waits

    def close_source(self) -> None:
        """Free the buffers behind the last copy."""
        self._out.close()

    def close_destination(self) -> None:
        """Free the buffers behind the last copy."""
        self._in.close()


def _ends(moves: Sequence[RegionCopy], *, source: bool) -> list[PoolRuns]:
    if source:
        return [(move.source, move.runs.source, move.runs.length) for move in moves]
    return [(move.destination, move.runs.destination, move.runs.length) for move in moves]
