"""Allocates host memory for the blocks of a pool, and exports it to other processes.

One mapping holds all blocks, block-major: block i is the bytes `[i * block_bytes, (i + 1) *
block_bytes)`. On Linux it is a sealed memfd: a peer that gets the descriptor maps the same bytes
and cannot meet a truncation. Elsewhere it is anonymous memory, which cannot be exported; this is
logged, `backing` shows it, and `export` raises.

It does not know who uses which block. An executor (or a tier) owns and writes it. The shm transfer
backend passes the export to peers.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["BlockMemory", "MemoryExport", "attach"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryExport:
    """What another process needs to map the blocks. The exporter keeps the descriptor."""

    fd: int
    size: Bytes
    block_bytes: Bytes
    layout: tuple[int, ...]
    """Shape of one block, such as `(layers, 2, heads, tokens, dim)`."""
    itemsize: Bytes


class BlockMemory:
    """Zeroed memory of `num_blocks` blocks; the kernel allocates a page when it is first
    touched."""

    def __init__(self, num_blocks: int, layout: tuple[int, ...], itemsize: Bytes = 1) -> None:
        """`layout` is the shape of a block in items. Errors: `ConfigError` if there is not enough
        memory, ValueError for an empty size."""
        self.num_blocks = num_blocks
        self.layout = layout
        self.itemsize = itemsize
        self.block_bytes: Bytes = math.prod(layout) * itemsize
        self.size: Bytes = num_blocks * self.block_bytes
        if self.size <= 0:
            raise ValueError("block memory cannot be empty")
        self._fd = _sealed_memfd(self.size)
        try:
            mapping = mmap.mmap(-1 if self._fd is None else self._fd, self.size)
        except OSError as error:
            self._close_fd()
            raise _too_much(self.size, error) from error
        self._map: mmap.mmap | None = mapping
        self._all: memoryview | None = memoryview(mapping)

    @property
    def backing(self) -> str:
        """`memfd`, or `anonymous` where there is no memfd."""
        return "anonymous" if self._fd is None else "memfd"

    def view(self, block: int | None = None) -> memoryview:
        """Writable bytes of one block, or of all: for `torch.frombuffer`, `recv_into`, tests.

        Errors: ValueError after `close`, IndexError for a block that does not exist.
        """
        if self._all is None:
            raise ValueError("the block memory is closed")
        if block is None:
            return self._all[:]
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"there is no block {block}")
        return self._all[block * self.block_bytes : (block + 1) * self.block_bytes]

    def copy(self, source: int, destination: int) -> None:
        """Copy one block over another."""
        self.view(destination)[:] = self.view(source)

    def export(self) -> MemoryExport:
        """What another process needs to map the memory (`attach`). Errors: `ConfigError` without
        memfd."""
        if self._fd is None:
            raise ConfigError("anonymous memory cannot be exported to another process")
        return MemoryExport(self._fd, self.size, self.block_bytes, self.layout, self.itemsize)

    def close(self) -> None:
        """Close the descriptor and the mapping. Views that are still held (a tensor) keep the
        mapping alive until they are gone. Idempotent."""
        if self._all is None:
            return
        self._all.release()
        self._all = None
        self._close_fd()
        mapping, self._map = self._map, None
        try:
            assert mapping is not None
            mapping.close()
        except BufferError:
            _log.debug(
                "views of the block memory are still held; its pages are freed with the last one"
            )

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def attach(export: MemoryExport) -> mmap.mmap:
    """Map an exported memory in this process; `export.fd` is a descriptor of this process."""
    return mmap.mmap(export.fd, export.size)


def _sealed_memfd(size: Bytes) -> int | None:
    """A memfd of fixed size; None, with a warning, where the system has none."""
    try:
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        _log.warning(
            "this system has no memfd (%s): KV blocks cannot be shared between processes", error
        )
        return None
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise _too_much(size, error) from error
    return fd


def _too_much(size: Bytes, error: OSError) -> ConfigError:
    return ConfigError(
        f"KV memory of {size} bytes cannot be allocated ({error.strerror}): lower --kv-memory"
    )
