"""Defines the port for the few CUDA driver calls that transfers need; tests use a fake.

    export     a pool, as another process can open it
    open       another process's pool, as an address here
    stream     a queue of copies, which complete later and in order
    pin        host memory that streams copy to and from
    read       bytes of device memory, for checksums

Addresses are device addresses: with unified addressing one number identifies memory of any device,
and of peers whose memory has been opened. Methods are called from threads and may block. Knows no
paths, tickets or loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from array import array

    from pdserve.ids import Bytes

__all__ = [
    "CudaDriver",
    "CudaError",
    "CudaIpcExport",
    "CudaStream",
    "DmaBufExport",
    "PinnedMemory",
]


class CudaError(OSError):
    """A driver call failed; the text names the call and the reason. An `OSError`, like other
    refusals of the system."""


class CudaIpcExport(msgspec.Struct, frozen=True, array_like=True):
    """Describes a pool so that peers can open it. Anyone who has it can read and write the pool."""

    process: bytes
    """Identifies the exporting process, which cannot open its own export and uses `address`."""
    device: bytes
    """The GPU's UUID, because ordinals differ between processes."""
    handle: bytes
    """CUDA IPC handle of the whole allocation that holds the pool."""
    offset: int
    """Bytes from the allocation's beginning to the pool's."""
    address: int
    """The pool's address in the exporting process."""


class DmaBufExport(NamedTuple):
    """A pool as the kernel shares it with the drivers of other devices, such as adapters."""

    fd: int
    """The DMA-BUF's descriptor. The caller closes it; what was registered by it stays so."""
    offset: Bytes
    """From the DMA-BUF's beginning to the pool's."""


class PinnedMemory(NamedTuple):
    """Host memory that devices reach directly."""

    address: int
    """As streams take it."""
    view: memoryview
    """Its bytes in this process. Not to be used once the memory is freed."""


class CudaStream(Protocol):
    """A queue of copies on one device. Use it from one thread at a time."""

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        """Queue copies of `lengths[i]` bytes from address `from_[i]` to `to[i]`. Errors:
        `CudaError`; some copies may be under way then."""
        ...

    def mark(self) -> object:
        """Mark the point after everything queued so far, for `wait`."""
        ...

    def wait(self, mark: object) -> None:
        """Return when the stream has reached the mark. Errors: `CudaError`, also for copies that
        failed before it."""
        ...

    def close(self) -> None:
        """Wait for the stream, and destroy it. Errors: `CudaError` if a copy has failed; none is
        under way then."""
        ...


class CudaDriver(Protocol):
    """One process's use of CUDA, on any number of devices."""

    def export(self, address: int, size: Bytes) -> CudaIpcExport:
        """Describe a pool so that another process can open it. Errors: `CudaError`; not every
        allocator's memory can be exported."""
        ...

    def open(self, exported: CudaIpcExport, beside: int) -> int:
        """Map a peer's pool; returns its address for the device that holds the address `beside`.
        Errors: `CudaError` if that device cannot reach it."""
        ...

    def close(self, exported: CudaIpcExport, address: int, beside: int) -> None:
        """Unmap what `open` mapped; nothing may read from it any more."""
        ...

    def stream(self, beside: int) -> CudaStream:
        """Create a stream on the device that holds this address."""
        ...

    def pin(self, size: Bytes, beside: int) -> PinnedMemory:
        """Allocate pinned host memory, for streams of any device; `beside`: an address of one that
        will use it. Errors: `CudaError`."""
        ...

    def unpin(self, memory: PinnedMemory) -> None:
        """Free what `pin` returned; no copy may be under way. Errors: `CudaError`."""
        ...

    def allocate(self, size: Bytes, device: int = 0) -> int:
        """Allocate memory that can be exported, on the device of this ordinal; returns its
        address."""
        ...

    def free(self, address: int) -> None:
        """Free what `allocate` returned; no process may have it open."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to device memory; returns when they are there. Errors: `CudaError`."""
        ...

    def read(self, address: int, size: Bytes) -> bytes:
        """Copy bytes of device memory, from any thread. Waits for no stream, so what is read must
        be complete. Errors: `CudaError`."""
        ...

    def release(self) -> None:
        """Free the memory that `read` and `write` keep for the next call; neither may be
        running."""
        ...
