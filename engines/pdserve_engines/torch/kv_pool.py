"""Holds the KV pool as a tensor `[block][layer][k|v][head][token][dim]`, block after block.

On the CPU it views `BlockMemory`, which other processes can map. It knows where a block's bytes
are; the block pool knows who uses a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.kv.storage import BlockMemory
from pdserve_engines.torch.fp8_kv import FP8
from pdserve_engines.torch.kv_budget import out_of_memory

if TYPE_CHECKING:
    from pdserve.engine_core.executor import KvBlockShape
    from pdserve_engines.torch.model_loader.kv_scales import KvScales


class KvPool:
    """Storage of `num_blocks` zeroed blocks. Raises `ConfigError` if memory is short."""

    def __init__(
        self,
        layout: KvBlockShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KvScales = (),
        memory: torch.Tensor | None = None,
    ) -> None:
        """`scales`: what an FP8 pool's keys and values are multiplied by. `memory`: zeroed bytes on
        the device, of which the pool is made; the caller frees them after `close`."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory: BlockMemory | None = None
        """Host memory that peers may map; None on devices other than the CPU."""
        block = (layout.num_layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        if memory is not None:
            self.tensor = memory.view(dtype).view(num_blocks, *block)
        elif device.type == "cpu":
            self.memory = BlockMemory(num_blocks, block, layout.itemsize)
            self.tensor = torch.frombuffer(self.memory.view(), dtype=dtype).view(-1, *block)
        else:
            try:
                self.tensor = torch.zeros((num_blocks, *block), dtype=dtype, device=device)
            except torch.cuda.OutOfMemoryError as error:
                wanted = num_blocks * layout.block_bytes
                raise out_of_memory("KV", wanted, device) from error
        self.is_fp8 = dtype == FP8
        self._scales = scales
        # Few of torch's operations take FP8, and for what is only moved bytes do as well.
        self._moved = self.tensor.view(torch.uint8) if self.is_fp8 else self.tensor
        self.heads = self._from_each_layer(layout.block_size * layout.head_dim)
        """By layer: rows of (block, layer, k|v, head), the first one in that layer's keys. So an
        index made for layer 0 finds the same place in every layer. Bytes if the pool is FP8."""
        self.tokens = self._from_each_layer(layout.head_dim)
        """The same with rows of (block, layer, k|v, head, token)."""

    def _from_each_layer(self, row: int) -> list[torch.Tensor]:
        """`row`: elements of a row."""
        layout, rows = self.layout, self._moved.view(-1, row)
        size = 2 * layout.kv_heads * layout.block_size * layout.head_dim // row
        return [rows[layer * size :] for layer in range(layout.num_layers)]

    def scales(self, layer: int) -> tuple[float, float]:
        """What the layer's stored keys and values are multiplied by."""
        return self._scales[layer] if self._scales else (1.0, 1.0)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero these blocks."""
        self._moved.index_fill_(0, blocks, 0)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), as if all sources were read first."""
        if not copies:
            return
        sources, destinations = zip(*copies, strict=True)
        index = torch.tensor([sources, destinations], device=self.tensor.device)
        self._moved[index[1]] = self._moved[index[0]]

    def close(self) -> None:
        """Free the memory, once nothing views it any more. Idempotent."""
        self.tensor = self._moved = torch.empty(0)
        self.heads, self.tokens = [], []
        if self.memory is not None:
            self.memory.close()
            self.memory = None
