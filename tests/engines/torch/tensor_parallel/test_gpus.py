"""Ranks on GPUs against one rank: two on one GPU over gloo, and a GPU each over NCCL.

Real processes; skipped where there are no GPUs."""

from __future__ import annotations

import random

import pytest
import torch

from pdserve.engine_core.kv_transfer.kv_region import layouts_of_ranks
from tests.engines.torch.checkpoints import VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded

GPUS = torch.cuda.device_count()
OUTPUTS = 12
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not GPUS, reason="no CUDA device"),
]


def generate(device: str, ranks: int) -> list[list[int]]:
    executor = loaded(
        checkpoint("llama")[0],
        device=device,
        dtype="float32",
        kv_memory=64 << 20,
        tensor_parallel=ranks,
        options={"kernels": "torch"},
    )
    try:
        driver = Driver(executor)
        prompts = [random.Random(n).choices(range(VOCAB), k=n) for n in (1, 9, 40)]
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.finish(sequences, 1, chunk=7)
        sequences.append(driver.fork(sequences[-1], 1))
        driver.finish(sequences, OUTPUTS, chunk=7)
        if ranks > 1:
            check_region(executor.region(), ranks)
        return [sequence.output for sequence in sequences]
    finally:
        executor.close()


def check_region(region, ranks: int) -> None:
    """Each rank's pool has an address of its own, for this process to move."""
    assert [pool.layout for pool in region.pools] == layouts_of_ranks(region.layout, ranks)
    assert len({pool.address for pool in region.pools} - {0}) == ranks


def test_two_ranks_on_one_gpu_generate_what_one_does() -> None:
    assert generate("cuda:0", 2) == generate("cuda:0", 1)


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs two GPUs")
def test_a_gpu_for_each_rank_generates_what_one_does() -> None:
    assert generate("cuda", 2) == generate("cuda:0", 1)
