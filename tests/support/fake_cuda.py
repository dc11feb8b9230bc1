"""A CUDA driver without a GPU: host memory stands for device memory, in one process or several.

Copies happen late: when a caller waits for them, or at a random earlier moment, from a random
stream; one stream keeps its order. So a test fails if code reports bytes before it has waited for
them, or frees memory while a copy is queued. A copy outside of mapped memory breaks the device for
good, as on a GPU; `breaks_after` does so on demand, `fails_at` fails a call, and `hold` stops the
device. `hidden` memory cannot be touched at its address: code of the host that does ends by a
segmentation fault.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport, PinnedMemory

if TYPE_CHECKING:
    from array import array
    from random import Random

    from pdserve.ids import Bytes

__all__ = ["FakeCuda"]

_libc = ctypes.CDLL(None, use_errno=True)
_HANDLE: Final = struct.Struct("<II56x")
"""The process and its descriptor."""


@dataclass(slots=True)
class _Memory:
    map: mmap.mmap
    address: int
    hidden: mmap.mmap | None = None
    """What is mapped at the address, without any access; None: `map` is."""
    fd: int = -1
    opened: int = 0
    """How often, of a peer's memory."""

    def at(self, address: int) -> int:
        """Where the fake itself may touch this memory."""
        return address - self.address + _address(self.map)

    def close(self) -> None:
        self.map.close()
        if self.hidden is not None:
            self.hidden.close()


class FakeCuda:
    """See above, and `transfer.cuda.driver.CudaDriver`. One is one process: a test may have two."""

    def __init__(
        self,
        random: Random,
        process: bytes = b"",
        device: bytes = b"gpu-0",
        *,
        hidden: bool = False,
    ) -> None:
        self.random = random
        self._map = _hidden if hidden else _mapped
        self.process = process or str(os.getpid()).encode()
        self.device = device
        self.reachable = {b"gpu-0", b"gpu-1"}
        """Devices of peers that this one has access to."""
        self.broken = ""
        self.breaks_after: int | None = None
        """Number of runs that are still copied before the device fails; None: no limit."""
        self.copied = 0
        self.fails_at: int | None = None
        """Number of calls from now on that succeed before one fails; None: none fails."""
        self.calls = 0
        self._goes = threading.Event()
        self._goes.set()
        self._lock = threading.RLock()
        self._memories: dict[int, _Memory] = {}
        self._theirs: dict[tuple[bytes, bytes], _Memory] = {}
        self._streams: list[FakeCudaStream] = []

    @property
    def mapped(self) -> int:
        """How many memories there are, its own and opened ones."""
        return len(self._memories)

    @property
    def queued(self) -> int:
        """How many runs are under way."""
        with self._lock:
            return sum(len(stream.queued) for stream in self._streams)

    # ------------------------------------------------------------------ memory

    def call(self, name: str) -> None:
        """Count a call of the driver. Errors: `CudaError` if it is to fail."""
        self.calls += 1
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise CudaError(f"{name}: CUDA_ERROR_UNKNOWN")

    def hold(self) -> None:
        """Copy nothing more until `go_on`."""
        self._goes.clear()

    def go_on(self) -> None:
        """End a `hold`."""
        self._goes.set()

    def allocate(self, size: Bytes, device: int = 0) -> int:
        fd = os.memfd_create("pdserve-fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._place(self._map(fd, size, fd)).address

    def pin(self, size: Bytes, beside: int) -> PinnedMemory:
        self.call("cuMemHostAlloc")
        memory = mmap.mmap(-1, size)
        address = _address(memory)
        self._place(_Memory(memory, address))
        return PinnedMemory(
            address, memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        )

    def unpin(self, memory: PinnedMemory) -> None:
        with self._lock:
            self._memories.pop(memory.address).map.close()

    def _place(self, memory: _Memory) -> _Memory:
        with self._lock:
            self._memories[memory.address] = memory
        return memory

    def free(self, address: int) -> None:
        with self._lock:
            memory = self._memories.pop(address)
        memory.close()
        os.close(memory.fd)

    def write(self, address: int, data: bytes) -> None:
        with self._lock:
            ctypes.memmove(self._check(address, len(data)).at(address), data, len(data))

    def read(self, address: int, size: Bytes) -> bytes:
        with self._lock:
            return ctypes.string_at(self._check(address, size).at(address), size)

    def release(self) -> None:
        """Nothing is kept."""

    def _check(self, address: int, size: Bytes) -> _Memory:
        for memory in self._memories.values():
            if memory.address <= address and address + size <= memory.address + len(memory.map):
                return memory
        self.broken = self.broken or f"an illegal address, {address:#x} with {size} bytes"
        raise CudaError(self.broken)

    # ------------------------------------------------------------------ pools of others

    def export(self, address: int, size: Bytes) -> CudaIpcExport:
        memory = self._check(address, size)
        handle = _HANDLE.pack(os.getpid(), memory.fd)
        return CudaIpcExport(self.process, self.device, handle, address - memory.address, address)

    def open(self, exported: CudaIpcExport, beside: int) -> int:
        if exported.device not in self.reachable:
            raise CudaError(f"no peer access to {exported.device.decode()}")
        if exported.process == self.process:
            return exported.address
        key = (exported.process, exported.handle)
        with self._lock:
            memory = self._theirs.get(key)
            if memory is None:
                process, fd = _HANDLE.unpack(exported.handle)
                own = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = self._place(self._map(own, os.fstat(own).st_size))
                finally:
                    os.close(own)
                self._theirs[key] = memory
            memory.opened += 1
        return memory.address + exported.offset

    def close(self, exported: CudaIpcExport, address: int, beside: int) -> None:
        if exported.process == self.process:
            return
        with self._lock:
            memory = self._memories[address - exported.offset]
            memory.opened -= 1
            if not memory.opened:
                del self._memories[memory.address]
                del self._theirs[exported.process, exported.handle]
                memory.close()

    # ------------------------------------------------------------------ the device

    def stream(self, beside: int) -> FakeCudaStream:
        self.call("cuStreamCreate")
        with self._lock:
            self._check(beside, 1)
            stream = FakeCudaStream(self)
            self._streams.append(stream)
        return stream

    def forget(self, stream: FakeCudaStream) -> None:
        with self._lock:
            self._streams.remove(stream)

    def work(self, runs: int) -> bool:
        """Do up to so many runs of any streams; False: there was nothing to do."""
        with self._lock:
            for _ in range(runs if self._goes.is_set() else 0):
                busy = [stream for stream in self._streams if stream.queued]
                if not busy:
                    return False
                self._do(*self.random.choice(busy).queued.popleft())
        return True

    def _do(self, to: int, from_: int, length: Bytes) -> None:
        if self.breaks_after is not None and self.copied >= self.breaks_after:
            self.broken = self.broken or "the device was told to break"
        if self.broken:
            return  # nothing runs on it any more
        try:
            target = self._check(to, length).at(to)
            source = self._check(from_, length).at(from_)
        except CudaError:
            return
        ctypes.memmove(target, source, length)
        self.copied += 1


class FakeCudaStream:
    """See `transfer.cuda.driver.CudaStream`."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.queued: deque[tuple[int, int, Bytes]] = deque()
        self._asked = 0

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        self._device.call("cuMemcpyAsync")
        with self._device._lock:
            self.queued.extend(zip(to, from_, lengths, strict=True))
            self._asked += len(lengths)
        self._device.work(self._device.random.choice((0, 0, 1, 5)))

    def mark(self) -> object:
        self._device.call("cuEventRecord")
        return self._asked

    def wait(self, mark: object) -> None:
        assert isinstance(mark, int)
        while self._asked - len(self.queued) < mark:
            self._device._goes.wait()
            self._device.work(1)
        self._device.call("cuEventSynchronize")
        if self._device.broken:
            raise CudaError(self._device.broken)

    def close(self) -> None:
        while self.queued:
            self._device._goes.wait()
            self._device.work(1)
        self._device.forget(self)


def _mapped(fd: int, size: Bytes, keep: int = -1) -> _Memory:
    memory = mmap.mmap(fd, size)
    return _Memory(memory, _address(memory), None, keep)


def _hidden(fd: int, size: Bytes, keep: int = -1) -> _Memory:
    """Memory of a device: its address may not be touched."""
    hidden = mmap.mmap(fd, size)
    address = _address(hidden)
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return _Memory(mmap.mmap(fd, size), address, hidden, keep)


def _address(memory: mmap.mmap) -> int:
    here = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(here)
    del here  # or the mapping could not be closed
    return address
