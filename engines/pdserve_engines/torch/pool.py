"""The KV pool as a tensor: `[block][layer][k|v][head][token][dim]`, one contiguous run per block.

On the CPU it views `BlockMemory`, which other processes can map. It knows which bytes a block has,
never whose they are: that is the block pool's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.kv.storage import BlockMemory

if TYPE_CHECKING:
    from pdserve.engine.executor import KvLayout


class KvPool:
    """Storage of `num_blocks` blocks, zeroed. Errors: `ConfigError` if memory is short."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory: BlockMemory | None = None
        """What peers may map; None on devices other than the CPU."""
        block = (layout.num_layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        if device.type == "cpu":
            self.memory = BlockMemory(num_blocks, block, layout.itemsize)
            self.tensor = torch.frombuffer(self.memory.view(), dtype=dtype).view(-1, *block)
        else:
            self.tensor = torch.zeros((num_blocks, *block), dtype=dtype, device=device)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), as if all sources were read first."""
        if not copies:
            return
        sources, destinations = zip(*copies, strict=True)
        index = torch.tensor([sources, destinations], device=self.tensor.device)
        self.tensor[index[1]] = self.tensor[index[0]]

    def close(self) -> None:
        """Give the memory back, once nothing views it any more. Idempotent."""
        self.tensor = torch.empty(0)
        if self.memory is not None:
            self.memory.close()
            self.memory = None
