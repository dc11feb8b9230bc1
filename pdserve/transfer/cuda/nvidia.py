"""Implements the CUDA driver port with cuda-python.

Every call uses the primary context of a device, as torch does. Calls release the GIL while they
wait, so threads may make them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import secrets
import sys
import threading
from array import array
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.transfer.cuda import kernels
from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport, DmaBufExport, PinnedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Bytes
    from pdserve.transfer.cuda.driver import CudaStream

__all__ = ["NvidiaDriver", "unavailable_reason"]

_log = logging.getLogger(__name__)

FEW: Final = 16
"""At most this many runs are copied with one command each."""
SHORT: Final[Bytes] = 64 * 1024
"""Bytes. More runs than `FEW` that are shorter on average go through one kernel."""
BATCH: Final = 32 * 1024
"""Most runs of one launch; their table takes 24 bytes per run on the device."""
STAGED: Final[Bytes] = 4 << 20
"""Bytes of pinned memory for each thread that reads or writes device memory from the host."""
_THREADS: Final = 128
_BLOCKS: Final = 4096
"""Thread blocks of one launch: more than any device runs at a time."""
_HANDLE: Final[Bytes] = 64
_PROCESS: Final = secrets.token_bytes(16)


def unavailable_reason() -> str | None:
    """Why this process cannot use CUDA; None: it can. Loads the driver, which may take seconds, and
    may hang if it is broken: call it in a process that can be killed."""
    if sys.platform != "linux":
        return f"memory of a GPU is not shared between processes on {sys.platform}"
    if not Path("/dev/nvidiactl").exists():
        if Path("/dev/kfd").exists():
            return "the GPUs here are AMD's: ROCm is not supported"
        return "no NVIDIA driver here"
    try:
        NvidiaDriver()
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}): pip install 'pdserve[cuda]'"
    except (CudaError, RuntimeError) as error:  # the second: how the bindings miss a library
        return str(error)
    return None


class _Device(NamedTuple):
    ordinal: int
    uuid: bytes
    context: Any
    architecture: str


class NvidiaDriver:
    """Makes the driver's calls through cuda-python; implements `driver.CudaDriver`."""

    def __init__(self) -> None:
        """Errors: `CudaError` if no device has unified addressing."""
        from cuda.bindings import driver as cuda

        self.cuda: Any = cuda
        self._devices: dict[int, _Device] = {}
        self._lock = threading.Lock()
        self.without_kernel = ""
        """Why many short runs cost a command each; empty: they do not, or none were met."""
        self._modules: dict[tuple[int, str], Any] = {}
        self._idle: dict[int, list[_Staging]] = {}
        """Unused staging buffers by device; as many as threads have read at a time."""
        self.asked("cuInit", 0)
        count = self.asked("cuDeviceGetCount")
        if not count:
            raise CudaError("the driver shows no GPU")
        self._uuids = {self._uuid(ordinal): ordinal for ordinal in range(count)}

    def asked(self, function: str, *arguments: Any) -> Any:
        """Make a driver call and return its result. Errors: `CudaError`."""
        code, *values = getattr(self.cuda, function)(*arguments)
        if code != self.cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{function}: {code.name}")
        return values[0] if len(values) == 1 else tuple(values)

    # ------------------------------------------------------------------ devices

    def beside(self, address: int) -> _Device:
        """The device that holds an address; its context becomes current in this thread."""
        attribute = self.cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return self.on(int(self.asked("cuPointerGetAttribute", attribute, address)))

    def on(self, ordinal: int) -> _Device:
        """The device of this ordinal; its context becomes current in this thread."""
        with self._lock:
            device = self._devices.get(ordinal)
            if device is None:
                device = self._devices[ordinal] = self._retained(ordinal)
        self.asked("cuCtxSetCurrent", device.context)
        return device

    def _retained(self, ordinal: int) -> _Device:
        handle = self.asked("cuDeviceGet", ordinal)
        attributes = self.cuda.CUdevice_attribute
        if not self._attribute(handle, attributes.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING):
            raise CudaError(f"GPU {ordinal} has no unified addressing")
        major = self._attribute(handle, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(handle, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        context = self.asked("cuDevicePrimaryCtxRetain", handle)
        return _Device(ordinal, self._uuid(ordinal), context, f"sm_{major}{minor}")

    def _attribute(self, handle: Any, attribute: Any) -> int:
        return int(self.asked("cuDeviceGetAttribute", attribute, handle))

    def _uuid(self, ordinal: int) -> bytes:
        handle = self.asked("cuDeviceGet", ordinal)
        return bytes(self.asked("cuDeviceGetUuid", handle).bytes)

    def kernel(self, ordinal: int, name: str, entry: str = "") -> Any:
        """An entry point of a kernel source, compiled once per device. An empty name means the only
        one."""
        device = self.on(ordinal)
        with self._lock:
            module = self._modules.get((ordinal, name))
            if module is None:
                code = kernels.compiled(name, device.architecture)
                module = self._modules[ordinal, name] = self.asked("cuModuleLoadData", code)
        return self.asked(
            "cuModuleGetFunction", module, (entry or kernels.KERNELS[name][0]).encode()
        )

    def launch(
        self,
        kernel: Any,
        stream: Any,
        grid: tuple[int, int],
        block: tuple[int, int],
        arguments: Sequence[Any],
    ) -> None:
        """Launch a kernel. `arguments` are ctypes objects; the driver copies them before this
        returns."""
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        shape = (*grid, 1, *block, 1)
        self.asked("cuLaunchKernel", kernel, *shape, 0, stream, ctypes.addressof(places), 0)

    # ------------------------------------------------------------------ pools

    def export(self, address: int, size: Bytes) -> CudaIpcExport:
        """Describe a pool so that another process can open it. Errors: `CudaError` if its
        allocator's memory cannot be exported."""
        device = self.beside(address)
        base, _ = self._allocation(address, size)
        try:
            handle = self.asked("cuIpcGetMemHandle", base)
        except CudaError as error:
            raise CudaError(
                f"{error}: the pool cannot be shared with other processes; it must be memory of "
                "cuMemAlloc or cudaMalloc, not of a virtual or stream-ordered allocator"
            ) from error
        plain = ctypes.string_at(handle.getPtr(), _HANDLE)
        return CudaIpcExport(_PROCESS, device.uuid, plain, address - base, address)

    def open(self, exported: CudaIpcExport, beside: int) -> int:
        """Map a peer's pool for the device that holds `beside`; returns its address here. Errors:
        `CudaError` if that GPU is not visible or has no peer access."""
        there = self._uuids.get(exported.device)
        if there is None:
            raise CudaError("the peer's GPU is not visible to this process")
        here = self.beside(beside)
        self._check_reach(here.ordinal, there)
        if exported.process == _PROCESS:
            self._enable(there, here.ordinal)
            return exported.address
        handle = self.cuda.CUipcMemHandle()
        if len(exported.handle) != _HANDLE:
            raise CudaError(f"a CUDA IPC handle has {_HANDLE} bytes, not {len(exported.handle)}")
        ctypes.memmove(handle.getPtr(), exported.handle, _HANDLE)
        flag = self.cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        base = self.asked("cuIpcOpenMemHandle", handle, flag.value)
        return int(base) + exported.offset

    def _check_reach(self, here: int, there: int) -> None:
        if here == there:
            return
        handles = [self.asked("cuDeviceGet", ordinal) for ordinal in (here, there)]
        if not self.asked("cuDeviceCanAccessPeer", *handles):
            raise CudaError(f"GPU {here} has no peer access to GPU {there}")

    def _enable(self, there: int, here: int) -> None:
        """Enable peer access between two devices of this process. Idempotent."""
        if here == there:
            return
        context = self.on(there).context
        self.on(here)
        code, *_ = self.cuda.cuCtxEnablePeerAccess(context, 0)
        results = self.cuda.CUresult
        if code not in (
            results.CUDA_SUCCESS,
            results.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
        ):
            raise CudaError(f"cuCtxEnablePeerAccess: {code.name}")

    def close(self, exported: CudaIpcExport, address: int, beside: int) -> None:
        """Unmap what `open` mapped. Errors: `CudaError`."""
        if exported.process != _PROCESS:
            self.beside(beside)
            self.asked("cuIpcCloseMemHandle", address - exported.offset)

    def allocate(self, size: Bytes, device: int = 0) -> int:
        """Allocate device memory that can be exported; returns its address. Errors: `CudaError`."""
        self.on(device)
        return int(self.asked("cuMemAlloc", size))

    def free(self, address: int) -> None:
        """Free what `allocate` returned. Errors: `CudaError`."""
        self.beside(address)
        self.asked("cuMemFree", address)

    def pin(self, size: Bytes, beside: int) -> PinnedMemory:
        """Allocate pinned host memory, which streams of any device reach at full speed. Errors:
        `CudaError`."""
        self.beside(beside)
        portable = self.cuda.CU_MEMHOSTALLOC_PORTABLE
        address = int(self.asked("cuMemHostAlloc", size, portable))
        return PinnedMemory(
            address, memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        )

    def unpin(self, memory: PinnedMemory) -> None:
        """Free what `pin` returned; no copy may be under way. Errors: `CudaError`."""
        self.on(next(iter(self._devices)))
        self.asked("cuMemFreeHost", memory.address)

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes from the host to device memory; returns when they are there. Errors:
        `CudaError`."""
        with self._staging(address) as staging:
            staging.write(address, data)

    def read(self, address: int, size: Bytes) -> bytes:
        """Copy bytes of device memory to the host, without waiting for other streams. Errors:
        `CudaError`."""
        with self._staging(address) as staging:
            return staging.read(address, size)

    @contextlib.contextmanager
    def _staging(self, beside: int) -> Iterator[_Staging]:
        """Staging memory that no other thread uses. After an error it is not used again."""
        device = self.beside(beside)
        with self._lock:
            idle = self._idle.setdefault(device.ordinal, [])
            staging = idle.pop() if idle else None
        staging = staging or _Staging(self, device)
        try:
            yield staging
        except BaseException:
            with contextlib.suppress(CudaError):
                staging.close()
            raise
        with self._lock:
            idle.append(staging)

    def release(self) -> None:
        """Free the pinned memory that `read` and `write` keep; neither may be running. Errors:
        `CudaError`, after all of it is freed."""
        with self._lock:
            idle, self._idle = self._idle, {}
        with contextlib.ExitStack() as closing:
            for staging in (one for each in idle.values() for one in each):
                closing.callback(staging.close)

    def prepare_for_rdma(self, address: int) -> None:
        """Let an adapter write to the allocation that holds this address: makes synchronous copies
        of it truly synchronous. Errors: `CudaError` if a kernel may read old bytes after the
        adapter's notification."""
        device = self.beside(address)
        handle = self.asked("cuDeviceGet", device.ordinal)
        attribute = self.cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        owner = self.cuda.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
        if self._attribute(handle, attribute) < int(owner):
            raise CudaError(
                f"GPU {device.ordinal} does not order an adapter's writes before its own reads "
                "(GPU_DIRECT_RDMA_WRITES_ORDERING)"
            )
        synchronous = self.cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        self.asked("cuPointerSetAttribute", True, synchronous, address)

    def export_dmabuf(self, address: int, size: Bytes) -> DmaBufExport:
        """Export the allocation that holds a pool as a DMA-BUF. Its pages are the host's: the
        kernel takes whole ones. Errors: `CudaError`; not every driver and allocator can."""
        device = self.beside(address)
        handle = self.asked("cuDeviceGet", device.ordinal)
        attribute = self.cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        if not self._attribute(handle, attribute):
            raise CudaError(
                f"GPU {device.ordinal} exports no DMA-BUF: that takes NVIDIA's open kernel "
                "modules, 515 or later"
            )
        begin, end = self._pages(address, size)
        kind = self.cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        fd = int(self.asked("cuMemGetHandleForAddressRange", begin, end - begin, kind, 0))
        return DmaBufExport(fd, address - begin)

    def _pages(self, address: int, size: Bytes) -> tuple[int, int]:
        """First and last address of the host's pages over the allocation that holds the pool."""
        base, whole = self._allocation(address, size)
        page = mmap.PAGESIZE
        return base // page * page, -(-(base + whole) // page) * page

    def _allocation(self, address: int, size: Bytes) -> tuple[int, Bytes]:
        base, whole = self.asked("cuMemGetAddressRange", address)
        if address - int(base) + size > whole:
            raise CudaError(f"the pool has {size} bytes, but its allocation only {whole}")
        return int(base), int(whole)

    def stream(self, beside: int) -> CudaStream:
        """Create a stream on the device that holds this address. Errors: `CudaError`."""
        return NvidiaStream(self, self.beside(beside))


class NvidiaStream:
    """A queue of copies on one device; implements `driver.CudaStream`. A thread that waits for an
    event sleeps instead of spinning."""

    def __init__(self, driver: NvidiaDriver, device: _Device) -> None:
        self._driver = driver
        self._device = device
        flags = driver.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = driver.asked("cuStreamCreate", flags.value)
        self._table = 0
        self._kernel: Any = None

    def copy(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        """Queue the copies: one command each, or one kernel for many short runs. Errors:
        `CudaError`; some copies may be under way then."""
        self._driver.on(self._device.ordinal)
        count = len(lengths)
        if count > FEW and sum(lengths) < count * SHORT and self._loaded():
            for first, last in pairwise([*range(0, count, BATCH), count]):
                self._launch(to[first:last], from_[first:last], lengths[first:last])
            return
        for there, here, length in zip(to, from_, lengths, strict=True):
            self._driver.asked("cuMemcpyAsync", there, here, length, self._stream)

    def _loaded(self) -> bool:
        """True if there is a kernel for many short runs; compiled at first need."""
        if not self._table and not self._driver.without_kernel:
            try:
                self._kernel = self._driver.kernel(self._device.ordinal, "copy_runs")
                self._table = int(self._driver.asked("cuMemAlloc", 3 * 8 * BATCH))
            except CudaError as error:
                self._driver.without_kernel = str(error)
                _log.warning(
                    "cuda: no kernel for many short runs; each one costs a copy command: %s", error
                )
        return bool(self._table)

    def _launch(self, to: array[int], from_: array[int], lengths: array[int]) -> None:
        """One launch. The table's memory is used again in the stream's order: the copy into it
        waits for the launch before; and pageable memory has been read when the call returns."""
        count = len(lengths)
        table = array("q", to)
        table += from_
        table += lengths
        driver = self._driver
        source, _ = table.buffer_info()
        driver.asked("cuMemcpyHtoDAsync", self._table, source, 24 * count, self._stream)
        columns = [ctypes.c_void_p(self._table + 8 * count * column) for column in range(3)]
        blocks = min(count, _BLOCKS)
        arguments = [*columns, ctypes.c_uint(count)]
        driver.launch(self._kernel, self._stream, (blocks, 1), (_THREADS, 1), arguments)

    def mark(self) -> object:
        """Record an event after everything queued so far."""
        self._driver.on(self._device.ordinal)
        events = self._driver.cuda.CUevent_flags
        flags = events.CU_EVENT_BLOCKING_SYNC.value | events.CU_EVENT_DISABLE_TIMING.value
        event = self._driver.asked("cuEventCreate", flags)
        self._driver.asked("cuEventRecord", event, self._stream)
        return event

    def wait(self, mark: object) -> None:
        """Wait for an event of `mark`, and destroy it. Errors: `CudaError`, also for copies that
        failed before it."""
        self._driver.on(self._device.ordinal)
        self._driver.asked("cuEventSynchronize", mark)
        self._driver.asked("cuEventDestroy", mark)

    def close(self) -> None:
        """Wait for the stream and destroy it. Errors: `CudaError`; the stream is gone all the
        same, with the memory of its table."""
        self._driver.on(self._device.ordinal)
        try:
            self._driver.asked("cuStreamSynchronize", self._stream)
        finally:
            self._destroy()

    def _destroy(self) -> None:
        """Free the table and the stream; neither is kept for the other's error."""
        table, self._table = self._table, 0
        try:
            if table:
                self._driver.asked("cuMemFree", table)
        finally:
            self._driver.asked("cuStreamDestroy", self._stream)


class _Staging:
    """Copies between host and device through pinned memory, in a stream of its own.

    A synchronous copy would go to the legacy default stream: it would wait for the kernels that
    torch has queued there, and hold up those behind it. For one thread at a time."""

    def __init__(self, driver: NvidiaDriver, device: _Device) -> None:
        self._driver = driver
        self._stream = NvidiaStream(driver, device)
        try:
            self._pinned = int(driver.asked("cuMemHostAlloc", STAGED, 0))
        except CudaError:
            self._stream.close()
            raise

    def read(self, address: int, size: Bytes) -> bytes:
        """Copy device memory to the host; its content must be complete."""
        pieces = []
        for begin in range(0, size, STAGED):
            length = min(STAGED, size - begin)
            self._copy(self._pinned, address + begin, length)
            pieces.append(ctypes.string_at(self._pinned, length))
        return b"".join(pieces)

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to device memory; returns when they are there."""
        for begin in range(0, len(data), STAGED):
            piece = data[begin : begin + STAGED]
            ctypes.memmove(self._pinned, piece, len(piece))
            self._copy(address + begin, self._pinned, len(piece))

    def _copy(self, to: int, from_: int, length: Bytes) -> None:
        self._stream.copy(array("q", [to]), array("q", [from_]), array("q", [length]))
        self._stream.wait(self._stream.mark())

    def close(self) -> None:
        """Free the memory; no copy may be under way."""
        try:
            self._stream.close()
        finally:
            self._driver.asked("cuMemFreeHost", self._pinned)
