"""Allocates KV pools on GPUs so that other processes can always be given them.

What torch's allocator returns cannot be exported by CUDA IPC where a user has set
`expandable_segments:True`, and may be a part of what it allocated for something else. So pools come
from the driver. Where this process cannot use the driver directly, no transfer takes GPU memory
either, and torch allocates. It never ran on a GPU so far.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pdserve.transfer.cuda.driver import CudaError
from pdserve_engines.torch.kv_budget import out_of_memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pdserve.ids import Bytes
    from pdserve.transfer.cuda.driver import CudaDriver

__all__ = ["DriverMemory", "bytes_at", "keeping_current", "pool_memory"]


def pool_memory(size: Bytes, device: torch.device) -> DriverMemory | None:
    """Memory for a pool, which can be exported; None: the pool allocates its own. Raises
    `ConfigError` if the device has too little memory."""
    if (driver := _driver_of(device)) is None:
        return None
    try:
        return DriverMemory(size, device, driver)
    except CudaError as error:
        raise out_of_memory("KV", size, device) from error


def _driver_of(device: torch.device) -> CudaDriver | None:
    """None: it is no GPU, or this process cannot use its driver."""
    if device.type != "cuda":
        return None
    from pdserve.transfer.cuda import nvidia  # loads the driver

    return nvidia.NvidiaDriver() if nvidia.unavailable_reason() is None else None


class DriverMemory:
    """Zeroed memory of one device."""

    def __init__(self, size: Bytes, device: torch.device, driver: CudaDriver) -> None:
        """Raises `CudaError` if the device has too little memory."""
        self._driver, self._device = driver, device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later is not free for the driver
        with keeping_current(device):
            self.address = driver.allocate(size, device.index or 0)
            try:
                self.bytes = bytes_at(self.address, size, device)
                self.bytes.zero_()
            except BaseException:  # an interrupt, too, leaves nobody who would free it
                self.close()
                raise

    def close(self) -> None:
        """Free the memory, which nothing views or maps any more. Idempotent."""
        if self.address:
            self.bytes = torch.empty(0, dtype=torch.uint8)
            with keeping_current(self._device):
                self._driver.free(self.address)
            self.address = 0


def bytes_at(address: int, size: Bytes, device: torch.device) -> torch.Tensor:
    """A view of memory that torch did not allocate; `cpu` for a device that is played."""
    if device.type == "cpu":
        view = (ctypes.c_uint8 * size).from_address(address)
        return torch.frombuffer(view, dtype=torch.uint8)
    return torch.as_tensor(_Mapped(address, size), device=device)


def keeping_current(device: torch.device) -> AbstractContextManager[object]:
    """The thread's current GPU is the same after the block, which is about `device`: the driver
    makes the GPU of an address current, and the thread may compute on another one afterwards."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Mapped:
    """Tells torch about memory that it did not allocate."""

    def __init__(self, address: int, size: Bytes) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
