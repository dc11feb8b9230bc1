"""The copies between a pool and the arena of lower tiers, on the CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.kv.storage import BlockMemory
from pdserve_engines.torch.tier_copier import TorchTierCopier

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_out_and_come_back_to_other_places(device: str, dtype: torch.dtype) -> None:
    pool = torch.randn(6, 2, 2, 3, 4, 8).to(dtype).to(device)
    before = pool.clone()
    arena = BlockMemory(4, (pool[0].numel() * pool.element_size(),))
    copier = TorchTierCopier(pool, arena)
    copier.copy_out([5, 0, 3], [1, 3, 0])
    pool.zero_()
    copier.copy_in([3, 1], [2, 4])
    assert torch.equal(pool[2], before[0])
    assert torch.equal(pool[4], before[5])
    assert not pool[[0, 1, 3, 5]].any()
    frame = torch.frombuffer(bytearray(arena.view(0)), dtype=dtype)
    assert torch.equal(frame.view(before[3].shape), before[3].cpu())
    copier.close()
    copier.close()
    arena.close()
