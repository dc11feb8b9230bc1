"""A CUDA driver without a GPU: host memory stands for device memory, in one process or several.

Copies happen late: when a caller waits for them, or at a random earlier moment, from a random
stream; one stream keeps its order. So a test fails if code reports bytes before it has waited for
them, or frees memory while a copy is queued. A copy outside of mapped memory breaks the device for
good, as on a GPU; `breaks_after` does so on demand.
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

from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport

if TYPE_CHECKING:
    from array import array
    from random import Random

    from pdserve.ids import Bytes

__all__ = ["FakeCuda"]

_HANDLE: Final = struct.Struct("<II56x")
"""The process and its descriptor."""


@dataclass(slots=True)
class _Memory:
    map: mmap.mmap
    address: int
    fd: int = -1
    opened: int = 0
    """How often, of a peer's memory."""


class FakeCuda:
    """See above, and `transfer.cuda.driver.CudaDriver`. One is one process: a test may have two."""

    def __init__(self, random: Random, process: bytes = b"", device: bytes = b"gpu-0") -> None:
        self.random = random
        self.process = process or str(os.getpid()).encode()
        self.device = device
        self.reachable = {b"gpu-0", b"gpu-1"}
        """Devices of peers that this one has access to."""
        self.broken = ""
        self.breaks_after: int | None = None
        """Number of runs that are still copied before the device fails; None: no limit."""
        self.copied = 0
        self._lock = threading.RLock()
        self._memories: dict[int, _Memory] = {}
        self._theirs: dict[tuple[bytes, bytes], _Memory] = {}
        self._streams: list[FakeCudaStream] = []

    @property
    def mapped(self) -> int:
        """How many memories there are, its own and opened ones."""
        return len(self._memories)

    # ------------------------------------------------------------------ memory

    def allocate(self, size: Bytes, device: int = 0) -> int:
        fd = os.memfd_create("pdserve-fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._place(_mapped(fd, size, fd)).address

    def _place(self, memory: _Memory) -> _Memory:
        with self._lock:
            self._memories[memory.address] = memory
        return memory

    def free(self, address: int) -> None:
        with self._lock:
            memory = self._memories.pop(address)
        memory.map.close()
        os.close(memory.fd)

    def write(self, address: int, data: bytes) -> None:
        with self._lock:
            self._check(address, len(data))
            ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: Bytes) -> bytes:
        with self._lock:
            self._check(address, size)
            return ctypes.string_at(address, size)

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
                    memory = self._place(_mapped(own, os.fstat(own).st_size))
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
                memory.map.close()

    # ------------------------------------------------------------------ the device

    def stream(self, beside: int) -> FakeCudaStream:
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
            for _ in range(runs):
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
            self._check(to, length)
            self._check(from_, length)
        except CudaError:
            return
        ctypes.memmove(to, from_, length)
        self.copied += 1


class FakeCudaStream:
    """See `transfer.cuda.driver.CudaStream`."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.queued: deque[tuple[int, int, Bytes]] = deque()
        self._asked = 0

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        with self._device._lock:
            self.queued.extend(zip(to, from_, lengths, strict=True))
            self._asked += len(lengths)
        self._device.work(self._device.random.choice((0, 0, 1, 5)))

    def mark(self) -> object:
        return self._asked

    def wait(self, mark: object) -> None:
        assert isinstance(mark, int)
        while self._asked - len(self.queued) < mark:
            self._device.work(1)
        if self._device.broken:
            raise CudaError(self._device.broken)

    def close(self) -> None:
        while self.queued:
            self._device.work(1)
        self._device.forget(self)


def _mapped(fd: int, size: Bytes, keep: int = -1) -> _Memory:
    memory = mmap.mmap(fd, size)
    here = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(here)
    del here  # or the mapping could not be closed
    return _Memory(memory, address, keep)
