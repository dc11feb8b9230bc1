"""Whether and how RDMA is offered for a GPU's memory; played, since there is none here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.base import Region
from pdserve.transfer.cuda.driver import CudaError, DmaBufExport
from pdserve.transfer.rdma.device_memory import exported, unsupported_reason

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Bytes

(LAYOUT,) = layouts(2, 1)
DEVICE = Region(LAYOUT, 4, address=1 << 40)
HOST = Region(LAYOUT, 4, memoryview(bytearray(4)))


class Driver:
    """Remembers what was made ready, and exports descriptors of an empty file."""

    def __init__(self, why: str = "", no_dmabuf: str = "") -> None:
        self.ready: list[int] = []
        self.fds: list[int] = []
        self._why = why
        self._no_dmabuf = no_dmabuf

    def prepare_for_rdma(self, address: int) -> None:
        if self._why:
            raise CudaError(self._why)
        self.ready.append(address)

    def export_dmabuf(self, address: int, size: Bytes) -> DmaBufExport:
        assert (address, size) == (DEVICE.address, DEVICE.size)
        if self._no_dmabuf:
            raise CudaError(self._no_dmabuf)
        self.fds.append(os.memfd_create("played"))
        return DmaBufExport(self.fds[-1], 4096)

    @property
    def open(self) -> int:
        """Number of its descriptors that are open."""
        return sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in self.fds)


def absent() -> Driver:
    raise ImportError("No module named 'cuda'")


OLD = "GPU 0 exports no DMA-BUF"


def test_host_memory_needs_nothing(tmp_path: Path) -> None:
    assert unsupported_reason([HOST], tmp_path, absent) == ""
    with exported([HOST, HOST], absent) as buffers:
        assert buffers == [None, None]


def test_dmabuf_needs_no_kernel_module(tmp_path: Path) -> None:
    driver = Driver()
    assert unsupported_reason([HOST, DEVICE], tmp_path, lambda: driver) == ""
    assert driver.ready == [1 << 40]
    assert len(driver.fds) == 1
    assert driver.open == 0


def test_without_both_the_reasons_and_the_remedy_are_said(tmp_path: Path) -> None:
    why = unsupported_reason([HOST, DEVICE], tmp_path, lambda: Driver(no_dmabuf=OLD))
    assert f"device memory: {OLD}" in why
    assert "modprobe nvidia-peermem" in why


def test_with_the_kernel_module_dmabuf_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "nvidia_peermem").mkdir()
    driver = Driver(no_dmabuf=OLD)
    assert unsupported_reason([HOST, DEVICE], tmp_path, lambda: driver) == ""
    assert driver.ready == [1 << 40]


def test_memory_that_an_adapter_must_not_write_to_is_refused(tmp_path: Path) -> None:
    assert "out of order" in unsupported_reason(
        [DEVICE], tmp_path, lambda: Driver("writes are out of order")
    )
    assert "pdserve[cuda]" in unsupported_reason([DEVICE], tmp_path, absent)


def test_descriptors_are_open_while_pools_are_registered() -> None:
    driver = Driver()
    with exported([HOST, DEVICE], lambda: driver) as buffers:
        assert buffers == [None, DmaBufExport(driver.fds[0], 4096)]
        assert driver.open == 1
    assert driver.open == 0
    with exported([DEVICE], lambda: Driver(no_dmabuf=OLD)) as buffers:
        assert buffers == [None]


def test_without_a_driver_pools_have_no_dmabuf() -> None:
    def lost() -> Driver:
        raise RuntimeError("libcuda.so.1 cannot be found")

    for make in (absent, lost):
        with exported([HOST, DEVICE], make) as buffers:
            assert buffers == [None, None]
