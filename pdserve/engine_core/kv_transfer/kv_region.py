"""Describes an executor's KV storage to the transports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.base import Region

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ModelInfo
    from pdserve.kv.storage import BlockMemory

__all__ = ["layout_of", "region_in_memory"]


def layout_of(info: ModelInfo) -> RankKvLayout:
    """The KV layout of a loaded model; workers with the same `compat_hash` may exchange blocks. One
    rank holds all heads."""
    layout = info.layout
    return RankKvLayout(
        content=info.compat_hash,
        layers=layout.num_layers,
        heads=layout.kv_heads,
        tokens=layout.block_size,
        dim=layout.head_dim,
        itemsize=layout.itemsize,
    )


def region_in_memory(layout: RankKvLayout, memory: BlockMemory) -> Region:
    """The region of a pool in host memory; with a file descriptor, other processes can map it."""
    fd = memory.export().fd if memory.backing == "memfd" else None
    return Region(layout, memory.num_blocks, view=memory.view(), fd=fd)
