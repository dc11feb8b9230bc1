"""Memory of pools that the driver allocates. The device is played by the CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.transfer.cuda import nvidia
from pdserve.transfer.cuda.driver import CudaError
from pdserve_engines.torch import device_memory
from pdserve_engines.torch.device_memory import DriverMemory, pool_memory

CPU = torch.device("cpu")


class PlayedDriver:
    """Allocates memory that is not zero."""

    def __init__(self, error: str = "") -> None:
        self.held: dict[int, Any] = {}
        self._error = error

    def allocate(self, size: int, device: int) -> int:
        if self._error:
            raise CudaError(self._error)
        memory = (ctypes.c_uint8 * size)(*[255] * size)
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.held[address]


def test_memory_is_zeroed_shared_and_given_back_once() -> None:
    driver: Any = PlayedDriver()
    memory = DriverMemory(4096, CPU, driver)
    assert memory.bytes.shape == (4096,)
    assert not memory.bytes.any()
    memory.bytes[100] = 3
    assert driver.held[memory.address][100] == 3
    memory.close()
    memory.close()
    assert not driver.held


def test_memory_that_cannot_be_viewed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no view")

    monkeypatch.setattr(device_memory, "bytes_at", fail)
    driver: Any = PlayedDriver()
    with pytest.raises(RuntimeError, match="no view"):
        DriverMemory(64, CPU, driver)
    assert not driver.held


def test_too_little_memory_is_said_with_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PlayedDriver("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(device_memory, "_driver_of", lambda device: driver)
    with pytest.raises(ConfigError, match=r"no room for .* of KV.*lower --kv-memory"):
        pool_memory(1 << 20, CPU)


def test_where_no_driver_can_be_used_the_pool_allocates_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvidia, "unavailable_reason", lambda: "no NVIDIA driver here")
    assert pool_memory(64, CPU) is None
    assert pool_memory(64, torch.device("cuda", 0)) is None


_EXPORTS = """
import torch
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve_engines.torch.device_memory import pool_memory
device = torch.device("cuda", 0)
torch.zeros(1, device=device)
before = torch.cuda.mem_get_info(device)[0]
memory = pool_memory(64 << 20, device)
memory.bytes[5] = 9
torch.cuda.synchronize()
driver = NvidiaDriver()
driver.export(memory.address, 64 << 20)
assert driver.read(memory.address, 8) == bytes([0, 0, 0, 0, 0, 9, 0, 0])
memory.close()
assert before - torch.cuda.mem_get_info(device)[0] < 8 << 20
print("exported")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pool_can_be_exported_whatever_torchs_allocator_is_told() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _EXPORTS],
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.endswith("exported\n"), ended.stderr
