"""Pools that one process allocates and another computes with. The device is played by the CPU."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.transfer.cuda import nvidia
from pdserve.transfer.cuda.driver import CudaError, CudaIpcExport
from pdserve_engines.torch import device_memory
from pdserve_engines.torch.tensor_parallel.device_pools import RankDevicePool, cuda_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
EXPORT = CudaIpcExport(b"p", b"d", b"h", 0, 1)


class PlayedDriver:
    """What `RankDevicePool` uses of a driver."""

    def __init__(self, error: str = "") -> None:
        self.asked: list[tuple[int, int]] = []
        self.held: dict[int, Any] = {}
        self._error = error

    def allocate(self, size: int, device: int) -> int:
        memory = (ctypes.c_uint8 * size)(*[7] * size)
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.held[address]

    def export(self, address: int, size: int) -> CudaIpcExport:
        if self._error:
            raise CudaError(self._error)
        self.asked.append((address, size))
        return EXPORT


def test_a_rank_gets_the_memory_of_its_own_pool() -> None:
    driver: Any = PlayedDriver()
    pool = RankDevicePool(4096, CPU, driver)
    assert driver.asked == [(pool.address, 4096)]
    assert pool.export == EXPORT
    assert not any(driver.held[pool.address])
    pool.close()
    pool.close()
    assert not driver.held


def test_memory_that_cannot_be_exported_is_refused_with_the_reason() -> None:
    driver: Any = PlayedDriver("no such allocator")
    with pytest.raises(ConfigError, match=r"cpu has no room .*no such allocator.*--kv-memory"):
        RankDevicePool(4096, CPU, driver)
    assert not driver.held


def test_the_threads_current_gpu_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver makes the GPU of the pool current, as its calls need it."""
    current = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index or 0
        yield
        current[0] = before

    class Entering(PlayedDriver):
        def allocate(self, size: int, device: int) -> int:
            current[0] = device
            return super().allocate(size, device)

        def export(self, address: int, size: int) -> CudaIpcExport:
            current[0] = 1
            return super().export(address, size)

        def free(self, address: int) -> None:
            current[0] = 1
            super().free(address)

    whole = device_memory.bytes_at
    monkeypatch.setattr(device_memory, "bytes_at", lambda at, size, _: whole(at, size, CPU))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    driver: Any = Entering()
    pool = RankDevicePool(64, torch.device("cuda", 1), driver)
    assert current == [0]
    pool.close()
    assert current == [0]
    assert not driver.held


def test_what_is_missing_for_ranks_on_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "unavailable_reason", lambda: "no NVIDIA driver here")
    with pytest.raises(ConfigError, match=r"--tp on GPUs .* CUDA IPC: no NVIDIA driver here"):
        cuda_driver()
