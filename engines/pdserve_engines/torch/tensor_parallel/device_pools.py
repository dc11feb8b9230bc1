"""Allocates the KV pools of all ranks on their GPUs, in the process of rank 0.

Each rank maps its own pool by CUDA IPC and computes with it. The memory stays rank 0's, which moves
the KV of all ranks: it could open another process's memory, but not export it again to a peer, or
register it with an adapter. It never ran on GPUs so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.transfer.cuda.driver import CudaError
from pdserve_engines.torch.device_memory import DriverMemory, bytes_at, keeping_current

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.transfer.cuda.driver import CudaDriver, CudaIpcExport

__all__ = ["OpenedPool", "RankDevicePool", "cuda_driver"]


def cuda_driver() -> CudaDriver:
    """The driver of this process. Raises `ConfigError`, with what is missing."""
    from pdserve.transfer.cuda import nvidia  # loads the driver

    if (reason := nvidia.unavailable_reason()) is not None:
        raise ConfigError(f"--tp on GPUs shares pools among processes by CUDA IPC: {reason}")
    return nvidia.NvidiaDriver()


class RankDevicePool:
    """Zeroed memory for a rank's pool, which its process maps by `export`."""

    def __init__(self, size: Bytes, device: torch.device, driver: CudaDriver) -> None:
        """Raises `ConfigError` if the memory is short or cannot be exported."""
        self._memory: DriverMemory | None = None
        try:
            self._memory = DriverMemory(size, device, driver)
            self.address = self._memory.address
            """Its address in this process."""
            with keeping_current(device):
                self.export: CudaIpcExport = driver.export(self.address, size)
        except CudaError as error:
            self.close()
            raise ConfigError(
                f"{device} has no room for a rank's KV ({error}); lower --kv-memory"
            ) from error

    def close(self) -> None:
        """Free the memory, which its rank no longer maps. Idempotent."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class OpenedPool:
    """A rank's pool, mapped in the rank's own process."""

    def __init__(self, exported: CudaIpcExport, size: Bytes, device: torch.device) -> None:
        """Raises `ConfigError` and `CudaError`."""
        self._driver, self._exported = cuda_driver(), exported
        self._beside = torch.empty(1, device=device)
        self._address = self._driver.open(exported, self._beside.data_ptr())
        self.memory = bytes_at(self._address, size, device)
        """All bytes, as a tensor."""

    def close(self) -> None:
        """Unmap the memory; nothing may compute with it any more. Idempotent."""
        if self._address:
            self.memory = torch.empty(0, dtype=torch.uint8)
            self._driver.close(self._exported, self._address, self._beside.data_ptr())
            self._address = 0
