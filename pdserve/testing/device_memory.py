"""Reads and writes a pool in device memory for tests, in the style of `kv.storage.BlockMemory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.transfer.cuda.driver import CudaDriver

__all__ = ["DeviceMemory"]


class DeviceView:
    """A range of device memory that can be assigned as a whole, and compared."""

    def __init__(self, driver: CudaDriver, address: int, size: Bytes) -> None:
        self._driver = driver
        self._address = address
        self._size = size

    def __setitem__(self, all_: slice, data: bytes) -> None:
        if all_ != slice(None) or len(data) != self._size:
            raise ValueError("a view of device memory can only be assigned as a whole")
        self._driver.write(self._address, bytes(data))

    def __eq__(self, other: object) -> bool:
        return self._driver.read(self._address, self._size) == other

    __hash__ = None  # type: ignore[assignment]


class DeviceMemory:
    """A pool in device memory."""

    def __init__(self, driver: CudaDriver, blocks: int, block_bytes: Bytes) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self._driver = driver
        self.address = driver.allocate(blocks * block_bytes)

    def view(self, block: int | None = None) -> DeviceView:
        """A view of one block, or of all."""
        if block is None:
            return DeviceView(self._driver, self.address, self.blocks * self.block_bytes)
        address = self.address + block * self.block_bytes
        return DeviceView(self._driver, address, self.block_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._driver.free(self.address)
