"""The views of the pool by layer: an index made for layer 0 finds its place in each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape
from pdserve_engines.torch.fp8_kv import FP8
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


def test_an_fp8_pool_is_moved_as_bytes() -> None:
    layout = replace(LAYOUT, itemsize=1)
    pool = KvPool(layout, BLOCKS, FP8, torch.device("cpu"), ((2.0, 3.0),) * 3)
    assert pool.memory is not None
    assert pool.memory.block_bytes == layout.block_bytes == LAYOUT.block_bytes // 4
    pool.heads[0].copy_(torch.arange(pool.heads[0].numel()).view_as(pool.heads[0]) % 120)
    before = pool.tensor.view(torch.uint8).clone()
    pool.copy([(1, 0), (0, 1)])
    pool.clear(torch.tensor([3]))
    moved = pool.tensor.view(torch.uint8)
    assert torch.equal(moved[[0, 1, 2, 4]], before[[1, 0, 2, 4]])
    assert not moved[3].any()
    assert pool.scales(2) == (2.0, 3.0)
    pool.close()
