"""Allocates staging memory: KV blocks between an engine's own cache and the transports.

An engine that schedules itself keeps KV in a layout of its own, divided among rank processes. Peers
never see that cache. They read and write staging blocks, which hold all heads in the layout of
transfers, `[layer][k|v][head][token][dim]`. The engine's ranks copy their heads between their cache
and the staging blocks, so two workers may have different tensor-parallel sizes.

The engine process owns the memory. A rank process maps it by `open_staging`. Who uses which block
is decided elsewhere (`StagedAdmission`, `StagedSender`).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine_core.kv_transfer.kv_region import region_in_memory
from pdserve.errors import ConfigError, EngineError
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.storage import BlockMemory
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RankKvLayout

__all__ = ["StagingHandle", "StagingPool", "open_staging"]


@dataclass(frozen=True, slots=True)
class StagingHandle:
    """What a rank process needs to map the staging memory of its engine process."""

    pid: int
    """The engine process."""
    fd: int
    """The memory's descriptor in that process."""
    inode: int
    """Identifies the memory: a process id or descriptor may mean something else by now."""
    size: Bytes
    blocks: int
    layout: RankKvLayout


class StagingPool:
    """The staging blocks of one engine: their memory, and which of them are free."""

    def __init__(self, layout: RankKvLayout, blocks: int) -> None:
        """Raises `ConfigError` if the memory cannot be allocated or not be shared."""
        shape = (layout.layers, 2, layout.heads, layout.tokens, layout.dim)
        self.layout = layout
        self.memory = BlockMemory(blocks, shape, layout.itemsize)
        if self.memory.backing != "memfd":
            self.memory.close()
            raise ConfigError("staging KV needs memory that processes can share (memfd)")
        self.blocks = BlockPool(blocks, layout.tokens)
        self.region = region_in_memory(layout, self.memory)

    @property
    def block_bytes(self) -> Bytes:
        """Bytes of one block, with all heads and layers."""
        return block_bytes(self.layout)

    def handle(self) -> StagingHandle:
        """What rank processes need to map the memory, while this process lives."""
        export = self.memory.export()
        inode = os.fstat(export.fd).st_ino
        return StagingHandle(
            os.getpid(), export.fd, inode, export.size, self.memory.num_blocks, self.layout
        )

    def close(self) -> None:
        """Free the memory; mappings of rank processes stay valid. Idempotent."""
        if self.region.view is not None:
            self.region.view.release()
        self.memory.close()


def open_staging(handle: StagingHandle) -> mmap.mmap:
    """Map the staging memory in this process. Raises `EngineError` if it is not there any more.

    Ranks are children of the engine process and end with it, so opening its descriptor by path is
    safe; the inode shows that it is the memory that was meant.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"staging memory {path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (handle.inode, handle.size):
            raise EngineError(f"{path} is not the staging memory of the engine process")
        return mmap.mmap(fd, handle.size)
    finally:
        os.close(fd)
