"""What is asked of NVIDIA's driver, without one: the bindings only write it down."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.transfer.cuda import kernels, nvidia
from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport, DmaBufExport
from pdserve.transfer.cuda.nvidia import BATCH, FEW, SHORT, STAGED, NvidiaDriver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bindings are for Linux")


class Bindings:
    """`cuda.bindings.driver` on a machine with two GPUs; the second has the addresses from 2^40."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.real = driver
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Any] = {}
        self.tables: list[list[int]] = []
        self.answers: dict[str, Any] = {
            "cuDeviceGetCount": lambda: 2,
            "cuDeviceGet": lambda ordinal: ordinal,
            "cuDeviceGetUuid": lambda ordinal: SimpleNamespace(bytes=b"gpu-%d" % ordinal),
            "cuDeviceGetAttribute": lambda attribute, handle: 9,
            "cuDevicePrimaryCtxRetain": lambda ordinal: f"context {ordinal}",
            "cuPointerGetAttribute": lambda attribute, address: address >> 40,
            "cuMemGetAddressRange": lambda address: (address & ~0xFFFF, 1 << 16),
            "cuIpcGetMemHandle": self._handle,
            "cuIpcOpenMemHandle": lambda handle, flags: (1 << 39) + flags,
            "cuDeviceCanAccessPeer": lambda here, there: 1,
            "cuMemAlloc": lambda size: 1 << 20,
            "cuMemHostAlloc": lambda size, flags: 1 << 21,
            "cuMemcpyHtoDAsync": self._table,
        }

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)  # a name that the bindings lack fails here
        if not name.startswith("cu") or name.startswith("cuda"):
            return real

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.fails:
                return (self.fails[name],)
            ok = self.real.CUresult.CUDA_SUCCESS
            answer = self.answers.get(name, lambda *_: name)(*arguments)
            return (ok, *answer) if isinstance(answer, tuple) else (ok, answer)

        return call

    def _handle(self, base: int) -> Any:
        handle = self.real.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), base.to_bytes(8, "little") * 8, 64)
        return handle

    def _table(self, there: int, here: int, size: int, stream: object) -> None:
        plain = ctypes.string_at(here, size)
        self.tables.append(list(array("q", plain)))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def bindings(monkeypatch) -> Bindings:
    found = Bindings()
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", found)
    monkeypatch.setattr(kernels, "compiled", lambda name, architecture: b"code")
    return found


def test_every_name_is_one_of_the_bindings(bindings: Bindings) -> None:
    text = Path(nvidia.__file__).read_text(encoding="utf-8")
    text += Path(nvidia.__file__).with_name("kernels.py").read_text(encoding="utf-8")
    names = re.findall(r'asked\(\s*"(cu\w+)"|cuda\.(cu\w+|CU\w+)', text)
    assert len(names) > 20
    assert [
        name for pair in names for name in pair if name and not hasattr(bindings.real, name)
    ] == []


def test_a_pool_is_exported_with_its_allocation_and_opened_beside_ours(bindings: Bindings) -> None:
    driver = NvidiaDriver()
    address = (1 << 40) + 0x20100
    exported = driver.export(address, 0x100)
    assert exported.device == b"gpu-1"
    assert exported.offset == 0x100
    assert exported.handle == (address & ~0xFFFF).to_bytes(8, "little") * 8
    with pytest.raises(CudaError, match="65536"):
        driver.export(address, 1 << 16)
    theirs = CudaIpcExport(
        b"another", *(exported.device, exported.handle, exported.offset, address)
    )
    assert driver.open(theirs, 0x1000) == (1 << 39) + 1 + 0x100
    (handle, _) = bindings.named("cuIpcOpenMemHandle")[0]
    assert ctypes.string_at(handle.getPtr(), 64) == exported.handle
    assert bindings.named("cuCtxSetCurrent")[-1] == ("context 0",)
    driver.close(theirs, (1 << 39) + 1 + 0x100, 0x1000)
    assert bindings.named("cuIpcCloseMemHandle") == [((1 << 39) + 1,)]


def test_a_process_does_not_open_what_is_its_own(bindings: Bindings) -> None:
    driver = NvidiaDriver()
    address = (1 << 40) + 0x20000
    exported = driver.export(address, 1)
    assert driver.open(exported, 0x1000) == address
    assert bindings.named("cuCtxEnablePeerAccess") == [("context 1", 0)]
    driver.close(exported, address, 0x1000)
    assert not bindings.named("cuIpcOpenMemHandle") + bindings.named("cuIpcCloseMemHandle")


def test_what_cannot_be_reached_or_shared_is_said(bindings: Bindings) -> None:
    driver = NvidiaDriver()
    results = bindings.real.CUresult
    theirs = CudaIpcExport(b"another", b"gpu-1", bytes(64), 0, 0)
    with pytest.raises(CudaError, match="not visible"):
        driver.open(CudaIpcExport(b"another", b"gpu-2", bytes(64), 0, 0), 0x1000)
    with pytest.raises(CudaError, match="handle has 64 bytes, not 3"):
        driver.open(CudaIpcExport(b"another", b"gpu-1", b"abc", 0, 0), 0x1000)
    bindings.answers["cuDeviceCanAccessPeer"] = lambda *_: 0
    with pytest.raises(CudaError, match="GPU 0 has no peer access to GPU 1"):
        driver.open(theirs, 0x1000)
    bindings.fails["cuIpcGetMemHandle"] = results.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError, match=r"INVALID_VALUE.*cannot be shared"):
        driver.export(0x20000, 1)
    bindings.answers["cuDeviceGetCount"] = lambda: 0
    with pytest.raises(CudaError, match="no GPU"):
        NvidiaDriver()


def q(*values: int) -> array[int]:
    return array("q", values)


def test_few_or_long_runs_are_a_command_each(bindings: Bindings) -> None:
    stream = NvidiaDriver().stream(0x1000)
    stream.copy(q(1, 2), q(3, 4), q(5, 6))
    many = FEW + 1
    stream.copy(q(*range(many)), q(*range(many)), q(*[SHORT] * many))
    copies = bindings.named("cuMemcpyAsync")
    assert [copy[:3] for copy in copies[:2]] == [(1, 3, 5), (2, 4, 6)]
    assert len(copies) == 2 + many
    assert not bindings.named("cuLaunchKernel")


def test_many_short_runs_are_one_launch(bindings: Bindings) -> None:
    stream = NvidiaDriver().stream(0x1000)
    many = BATCH + 3
    stream.copy(q(*range(many)), q(*range(7, 7 + many)), q(*[64] * many))
    assert not bindings.named("cuMemcpyAsync")
    first, second = bindings.tables
    assert first[:BATCH] == list(range(BATCH))
    assert second == [*range(BATCH, many), *range(7 + BATCH, 7 + many), 64, 64, 64]
    (launch, last) = bindings.named("cuLaunchKernel")
    assert launch[1:7] == (4096, 1, 1, 128, 1, 1)
    assert last[1:7] == (3, 1, 1, 128, 1, 1)
    stream.close()
    assert bindings.named("cuMemFree") == [(1 << 20,)]


def test_without_the_kernel_short_runs_are_commands_and_it_is_said(
    bindings: Bindings, monkeypatch, caplog
) -> None:
    def no_compiler(name: str, architecture: str) -> bytes:
        raise CudaError("NVRTC cannot be loaded")

    monkeypatch.setattr(kernels, "compiled", no_compiler)
    driver = NvidiaDriver()
    for _ in range(2):
        stream = driver.stream(0x1000)
        stream.copy(q(*range(99)), q(*range(99)), q(*[8] * 99))
    assert len(bindings.named("cuMemcpyAsync")) == 198
    assert driver.without_kernel == "NVRTC cannot be loaded"
    assert caplog.text.count("each one costs a copy command") == 1


def test_a_mark_is_an_event_that_is_waited_for_and_destroyed(bindings: Bindings) -> None:
    stream = NvidiaDriver().stream(0x1000)
    stream.wait(stream.mark())
    names = [call[0] for call in bindings.calls if "Event" in call[0]]
    assert names == ["cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy"]
    bindings.fails["cuEventSynchronize"] = bindings.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.wait(stream.mark())


SYNCHRONOUS = {"cuMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpyDtoD", "cuMemsetD8"}
"""They go to the legacy default stream, which is the one torch computes in."""


def test_the_host_reads_and_writes_without_the_default_stream(bindings: Bindings) -> None:
    pinned = ctypes.create_string_buffer(STAGED)
    bindings.answers["cuMemHostAlloc"] = lambda size, flags: ctypes.addressof(pinned)
    bindings.answers["cuStreamCreate"] = lambda flags: f"stream {flags}"
    driver = NvidiaDriver()
    assert len(driver.read(0x1000, STAGED + 1)) == STAGED + 1
    driver.write(0x1000, b"abc")
    names = {call[0] for call in bindings.calls}
    assert not names & SYNCHRONOUS
    own = f"stream {bindings.real.CUstream_flags.CU_STREAM_NON_BLOCKING.value}"
    copies = bindings.named("cuMemcpyAsync")
    assert [copy[2:] for copy in copies] == [(STAGED, own), (1, own), (3, own)]
    assert [stream for _, stream in bindings.named("cuEventRecord")] == [own] * 3
    assert ("cuStreamSynchronize", 0) not in bindings.calls
    assert len(bindings.named("cuMemHostAlloc")) == 1, "it is kept for the next time"
    driver.release()
    assert len(bindings.named("cuMemFreeHost")) == len(bindings.named("cuStreamDestroy")) == 1


def test_a_copy_that_failed_takes_its_stream_with_it(bindings: Bindings) -> None:
    driver = NvidiaDriver()
    bindings.fails["cuEventSynchronize"] = bindings.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        driver.read(0x1000, 1)
    assert len(bindings.named("cuStreamDestroy")) == len(bindings.named("cuMemFreeHost")) == 1
    assert driver._idle == {0: []}


@pytest.mark.parametrize("failing", ["cuStreamSynchronize", "cuMemFree"])
def test_a_stream_that_cannot_be_waited_for_is_destroyed(bindings: Bindings, failing: str) -> None:
    """And its table is freed."""
    stream = NvidiaDriver().stream(0x1000)
    many = FEW + 1
    stream.copy(q(*range(many)), q(*range(many)), q(*[1] * many))
    bindings.fails[failing] = bindings.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        stream.close()
    assert len(bindings.named("cuMemFree")) == len(bindings.named("cuStreamDestroy")) == 1


def test_a_stream_that_cannot_be_waited_for_keeps_no_memory(bindings: Bindings) -> None:
    """Nor does that of another device."""
    pinned = ctypes.create_string_buffer(STAGED)
    bindings.answers["cuMemHostAlloc"] = lambda size, flags: ctypes.addressof(pinned)
    driver = NvidiaDriver()
    for address in (0x1000, (1 << 40) + 0x1000):
        driver.write(address, b"abc")
    bindings.fails["cuStreamSynchronize"] = bindings.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        driver.release()
    assert len(bindings.named("cuStreamDestroy")) == len(bindings.named("cuMemFreeHost")) == 2


def test_pinned_memory_is_for_every_device_and_has_a_view(bindings: Bindings) -> None:
    buffer = (ctypes.c_char * 64)()
    bindings.answers["cuMemHostAlloc"] = lambda size, flags: ctypes.addressof(buffer)
    driver = NvidiaDriver()
    memory = driver.pin(64, 1 << 40)
    assert bindings.named("cuMemHostAlloc") == [(64, bindings.real.CU_MEMHOSTALLOC_PORTABLE)]
    assert bindings.named("cuCtxSetCurrent") == [("context 1",)]
    memory.view[3:5] = b"ab"
    assert buffer.raw[:6] == b"\0\0\0ab\0"
    driver.unpin(memory)
    assert bindings.named("cuMemFreeHost") == [(memory.address,)]
    bindings.fails["cuMemHostAlloc"] = bindings.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.pin(64, 1 << 40)


def test_memory_is_made_ready_for_an_adapter_or_the_reason_is_said(bindings: Bindings) -> None:
    driver = NvidiaDriver()
    with pytest.raises(CudaError, match="GPU 1 does not order"):
        driver.prepare_for_rdma(1 << 40)
    assert not bindings.named("cuPointerSetAttribute")
    bindings.answers["cuDeviceGetAttribute"] = lambda attribute, handle: 100
    driver.prepare_for_rdma(1 << 40)
    ((value, attribute, address),) = bindings.named("cuPointerSetAttribute")
    assert (value, attribute.name, address) == (True, "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS", 1 << 40)


def test_a_pool_is_exported_as_a_dmabuf_of_whole_pages(bindings: Bindings) -> None:
    base, whole, page = (1 << 40) + 512, 10_000, mmap.PAGESIZE
    bindings.answers["cuMemGetAddressRange"] = lambda address: (base, whole)
    bindings.answers["cuMemGetHandleForAddressRange"] = lambda *_: 77
    driver = NvidiaDriver()
    assert driver.export_dmabuf(base + 100, 9_900) == DmaBufExport(77, 612)
    ((begin, size, kind, flags),) = bindings.named("cuMemGetHandleForAddressRange")
    assert (begin, size, flags) == (1 << 40, 3 * page, 0)
    assert kind.name == "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"
    with pytest.raises(CudaError, match="9901 bytes, but its allocation only 10000"):
        driver.export_dmabuf(base + 100, 9_901)


def test_a_driver_without_dmabuf_is_named(bindings: Bindings) -> None:
    bindings.answers["cuDeviceGetAttribute"] = lambda attribute, handle: (
        0 if "DMA_BUF" in attribute.name else 9
    )
    with pytest.raises(CudaError, match=r"GPU 1 exports no DMA-BUF: .*open kernel modules"):
        NvidiaDriver().export_dmabuf(1 << 40, 1)
    assert not bindings.named("cuMemGetHandleForAddressRange")
