"""Defines the port for the few CUDA driver calls that transfers need; tests use a fake.

    export     a pool, as another process can open it
    open       another process's pool, as an address here
    stream     a queue of copies, which complete later and in order
    read       bytes of device memory, for checksums

Addresses are device addresses: with unified addressing one number identifies memory of any device,
and of peers whose memory has been opened. Methods are called from threads and may block. Knows no
paths, tickets or loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from array import array

    from pdserve.ids import Bytes

__all__ = ["CudaDriver", "CudaError", "CudaIpcExport", "CudaStream"]


class CudaError(OSError):
    """The driver refused, and says which call and why. An `OSError`, as what the system refuses."""


class CudaIpcExport(msgspec.Struct, frozen=True, array_like=True):
    """A pool as its peers can open it. Whoever has it can read and write the pool."""

    process: bytes
    """A process cannot open what is its own: it recognises that by this."""
    device: bytes
    """The UUID of the GPU: ordinals differ between processes."""
    handle: bytes
    """Of the whole allocation that the pool is in."""
    offset: int
    """Of the pool in it."""
    address: int
    """In the process that exports."""


class CudaStream(Protocol):
    """A queue of copies on one device. For one thread at a time."""

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        """Copy `lengths[i]` bytes from address `from_[i]` to `to[i]`, some time after this returns.
        Raises `CudaError`; some of it may be under way then."""
        ...

    def mark(self) -> object:
        """A point after everything asked for so far, to wait for."""
        ...

    def wait(self, mark: object) -> None:
        """Return when it is reached. Raises `CudaError`: also for copies that failed before it."""
        ...

    def close(self) -> None:
        """Nothing is under way."""
        ...


class CudaDriver(Protocol):
    """One process's use of CUDA, on any number of devices."""

    def export(self, address: int, size: Bytes) -> CudaIpcExport:
        """Raises `CudaError`: not every allocator's memory can be exported."""
        ...

    def open(self, exported: CudaIpcExport, beside: int) -> int:
        """The pool's address, as the device that holds the address `beside` reaches it. Raises
        `CudaError` when it does not."""
        ...

    def close(self, exported: CudaIpcExport, address: int, beside: int) -> None:
        """What `open` has opened; nothing is read from it any more."""
        ...

    def stream(self, beside: int) -> CudaStream:
        """A new one, on the device that holds this address."""
        ...

    def allocate(self, size: Bytes, device: int = 0) -> int:
        """Memory that can be exported, on the device of this ordinal; its address."""
        ...

    def free(self, address: int) -> None:
        """What `allocate` gave; nobody has it open."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Returns when the bytes are there. Raises `CudaError`."""
        ...

    def read(self, address: int, size: Bytes) -> bytes:
        """A copy, that waits for no other stream: what is read must be complete. Any thread. Raises
        `CudaError`."""
        ...

    def release(self) -> None:
        """Give back what `read` and `write` keep for the next time; none of them is under way."""
        ...
