"""Whether RDMA is offered for a GPU's memory; played, since there is none here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.base import Region
from pdserve.transfer.cuda.driver import CudaError
from pdserve.transfer.rdma.device_memory import unsupported_reason

if TYPE_CHECKING:
    from pathlib import Path

(LAYOUT,) = layouts(2, 1)
DEVICE = Region(LAYOUT, 4, address=1 << 40)
HOST = Region(LAYOUT, 4, memoryview(bytearray(4)))


class Driver:
    """Remembers what was made ready."""

    def __init__(self, why: str = "") -> None:
        self.ready: list[int] = []
        self._why = why

    def prepare_for_rdma(self, address: int) -> None:
        if self._why:
            raise CudaError(self._why)
        self.ready.append(address)


def absent() -> Driver:
    raise ImportError("No module named 'cuda'")


def test_host_memory_needs_nothing(tmp_path: Path) -> None:
    assert unsupported_reason([HOST], tmp_path, absent) == ""


def test_without_its_kernel_module_the_reason_and_the_remedy_are_said(tmp_path: Path) -> None:
    why = unsupported_reason([HOST, DEVICE], tmp_path, Driver)
    assert "device memory" in why
    assert "modprobe nvidia-peermem" in why


def test_with_it_the_pool_is_made_ready_or_the_device_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "nvidia_peermem").mkdir()
    driver = Driver()
    assert unsupported_reason([HOST, DEVICE], tmp_path, lambda: driver) == ""
    assert driver.ready == [1 << 40]
    assert "out of order" in unsupported_reason(
        [DEVICE], tmp_path, lambda: Driver("writes are out of order")
    )
    assert "pdserve[cuda]" in unsupported_reason([DEVICE], tmp_path, absent)
