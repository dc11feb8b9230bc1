"""The views of the pool by layer: an index made for layer 0 finds its place in each of them."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape
from pdserve_engines.torch.kv_pool import KvPool

LAYOUT = KvBlockShape(num_layers=3, kv_heads=2, head_dim=8, block_size=4, itemsize=4)
BLOCKS = 5


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
@pytest.mark.parametrize("part", [0, 1])
def test_every_head_and_token_is_found_from_its_layer(layer: int, part: int) -> None:
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, torch.device("cpu"))
    torch.arange(pool.tensor.numel(), out=pool.tensor.view(-1))
    heads = LAYOUT.num_layers * 2 * LAYOUT.kv_heads
    for block in range(BLOCKS):
        for head in range(LAYOUT.kv_heads):
            row = block * heads + part * LAYOUT.kv_heads + head
            stored = pool.tensor[block, layer, part, head]
            assert torch.equal(pool.heads[layer][row], stored.reshape(-1))
            first = row * LAYOUT.block_size
            assert torch.equal(pool.tokens[layer][first : first + LAYOUT.block_size], stored)
    pool.close()


def test_a_closed_pool_keeps_no_view() -> None:
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, torch.device("cpu"))
    pool.close()
    assert pool.heads == pool.tokens == []
