"""Allocates staging memory: KV blocks between an engine's own cache and the transports.

An engine that schedules itself keeps KV in a layout of its own, divided among rank processes. Peers
never see that cache. They read and write staging blocks, which hold all heads in the layout of
transfers, `[layer][k|v][head][token][dim]`. The engine's ranks copy their heads between their cache
and the staging blocks, so two workers may have different tensor-parallel sizes.

    host memory      of the engine process; a rank process maps it by `open_staging`
    other memory     of a device, say: the engine brings it, and its ranks, which compute in the
                     engine process, find it by `StagingHandle.local`

The frames of a host tier can be in the same memory, behind the staging blocks. Then transports
reach both, and ranks copy from both in one step. Who uses which block is decided elsewhere
(`StagedAdmission`, `StagedSender`, the tier).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.engine_core.kv_transfer.kv_region import region_in_memory
from pdserve.errors import ConfigError, EngineError
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.storage import BlockMemory
from pdserve.transfer.base import Region
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RankKvLayout

__all__ = [
    "HostFrames",
    "StagingHandle",
    "StagingMemory",
    "StagingPool",
    "host_frames",
    "open_staging",
]


@dataclass(frozen=True, slots=True)
class StagingHandle:
    """What a rank needs to reach the staging memory of its engine process."""

    pid: int
    """The engine process."""
    fd: int
    """The memory's descriptor in that process; -1: it has none."""
    inode: int
    """Identifies the memory: a process id or descriptor may mean something else by now."""
    size: Bytes
    blocks: int
    layout: RankKvLayout
    local: int = 0
    """Number of memory that only the engine process itself can use; its engine knows what it
    stands for. 0: host memory, which `open_staging` maps."""


class StagingMemory(Protocol):
    """Memory that an engine brings for staging blocks, without a view in this process."""

    @property
    def local(self) -> int:
        """Its number for ranks in this process; not 0."""
        ...

    @property
    def address(self) -> int:
        """Where its first block begins, as `Region.address`."""
        ...

    def close(self) -> None:
        """Free it. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class HostFrames:
    """The frames of a host tier: blocks of one memory, from `first` on."""

    memory: BlockMemory
    region: Region
    """The whole memory as transports see it."""
    handle: StagingHandle
    """What ranks need to map it."""
    first: int
    """The block of the memory that is frame 0."""
    count: int
    shared: bool
    """Whether staging blocks are in the same memory, which their pool closes."""

    def view(self, frame: int) -> memoryview:
        """The bytes of one frame."""
        return self.memory.view(self.first + frame)

    def close(self) -> None:
        """Free the memory, unless staging blocks are in it, too."""
        if not self.shared:
            assert self.region.view is not None
            self.region.view.release()
            self.memory.close()


class StagingPool:
    """The staging blocks of one engine: their memory, and which of them are free."""

    def __init__(
        self,
        layout: RankKvLayout,
        blocks: int,
        memory: StagingMemory | None = None,
        *,
        frames: int = 0,
    ) -> None:
        """`memory`: what holds the blocks, without gaps; None: host memory, in which `frames`
        frames of a host tier follow. The pool closes it. Raises `ConfigError` if host memory cannot
        be allocated or not be shared."""
        self.layout = layout
        self.blocks = BlockPool(blocks, layout.tokens)
        self._local = 0 if memory is None else memory.local
        self._memory: StagingMemory | BlockMemory
        if memory is None:
            self._memory = host = _shared_memory(layout, blocks + frames)
            self.region = region_in_memory(layout, host)
        else:
            assert not frames, "frames are in host memory"
            self._memory = memory
            self.region = Region(layout, blocks, address=memory.address)

    @property
    def in_device(self) -> bool:
        """Return whether the blocks are in memory that the engine has brought."""
        return self._local != 0

    @property
    def block_bytes(self) -> Bytes:
        """Bytes of one block, with all heads and layers."""
        return block_bytes(self.layout)

    def handle(self) -> StagingHandle:
        """What ranks need to reach the memory, while this process lives."""
        fd = self.region.fd
        return StagingHandle(
            os.getpid(),
            -1 if fd is None else fd,
            0 if fd is None else os.fstat(fd).st_ino,
            self.region.size,
            self.region.blocks,
            self.layout,
            self._local,
        )

    def frames(self) -> HostFrames | None:
        """The frames behind the staging blocks; None: there are none."""
        first, memory = self.blocks.num_blocks, self._memory
        if not isinstance(memory, BlockMemory) or memory.num_blocks == first:
            return None
        count = memory.num_blocks - first
        return HostFrames(memory, self.region, self.handle(), first, count, shared=True)

    def close(self) -> None:
        """Free the memory; mappings of rank processes stay valid. Idempotent."""
        if self.region.view is not None:
            self.region.view.release()
        self._memory.close()


def host_frames(layout: RankKvLayout, count: int) -> HostFrames:
    """Allocate frames in a memory of their own. Raises `ConfigError` if they cannot be allocated or
    shared."""
    memory = _shared_memory(layout, count)
    fd = memory.export().fd
    handle = StagingHandle(os.getpid(), fd, os.fstat(fd).st_ino, memory.size, count, layout)
    region = region_in_memory(layout, memory)
    return HostFrames(memory, region, handle, 0, count, shared=False)


def _shared_memory(layout: RankKvLayout, blocks: int) -> BlockMemory:
    shape = (layout.layers, 2, layout.heads, layout.tokens, layout.dim)
    memory = BlockMemory(blocks, shape, layout.itemsize)
    if memory.backing != "memfd":
        memory.close()
        raise ConfigError("staging KV needs memory that processes can share (memfd)")
    return memory


def open_staging(handle: StagingHandle) -> mmap.mmap:
    """Map staging memory of the host in this process. Raises `EngineError` if it is not there any
    more, or is none of the host.

    Ranks are children of the engine process and end with it, so opening its descriptor by path is
    safe; the inode shows that it is the memory that was meant.
    """
    if handle.local:
        raise EngineError("this staging memory can only be used in the engine process itself")
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
