"""Describes an executor's KV storage to the transports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.base import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.executor import ModelInfo
    from pdserve.kv.storage import BlockMemory

__all__ = ["layout_of", "layouts_of_ranks", "region_in_memory", "region_of_ranks"]


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


def layouts_of_ranks(layout: RankKvLayout, ranks: int) -> list[RankKvLayout]:
    """The layout of each rank's pool, where so many ranks divide the heads of a model."""
    return [replace(layout, tp=ranks, rank=rank) for rank in range(ranks)]


def region_of_ranks(layout: RankKvLayout, pools: Sequence[Region]) -> Region:
    """One region of the whole model's `layout` over the pools of all ranks, in order. A single pool
    is the region itself."""
    if len(pools) == 1:
        return pools[0]
    return Region(layout, pools[0].blocks, view=pools[0].view, ranks=tuple(pools))
