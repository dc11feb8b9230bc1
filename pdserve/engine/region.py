"""An executor's KV storage as transfers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.transfer import KvLayout
from pdserve.transfer.base import Region

if TYPE_CHECKING:
    from pdserve.engine.executor import ModelInfo
    from pdserve.kv.storage import BlockMemory

__all__ = ["layout_of", "region_in_memory"]


def layout_of(info: ModelInfo) -> KvLayout:
    """What the blocks of a loaded model hold; whoever has the same `compat_hash` may exchange them.
    One rank holds all heads."""
    layout = info.layout
    return KvLayout(
        content=info.compat_hash,
        layers=layout.num_layers,
        heads=layout.kv_heads,
        tokens=layout.block_size,
        dim=layout.head_dim,
        itemsize=layout.itemsize,
    )


def region_in_memory(layout: KvLayout, memory: BlockMemory) -> Region:
    """A pool in host memory; mappable by others where there is a descriptor."""
    fd = memory.export().fd if memory.backing == "memfd" else None
    return Region(layout, memory.num_blocks, view=memory.view(), fd=fd)
