"""What a graph reads is what a step's own index tensors hold, whatever an earlier step has left."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape, ScheduledChunk
from pdserve_engines.torch.cuda.decode_plan import SEGMENT, list_items
from pdserve_engines.torch.cuda.graphs.static_inputs import Capacity, StaticInputs
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.models.forward_batch import ForwardBatch, make_batch
from tests.engines.torch.cuda.test_kernel_model import LLAMA
from tests.engines.torch.driver import sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 16
CONFIG = parse_config(LLAMA)
WINDOWS = (None, 45)


@pytest.fixture
def pool() -> Iterator[KvPool]:
    layout = KvBlockShape(CONFIG.num_layers, CONFIG.kv_heads, BLOCK, CONFIG.head_dim, 4)
    made = KvPool(layout, 80, torch.float32, torch.device("cpu"))
    yield made
    made.close()


def batch_of(lengths: list[int], chance: random.Random) -> ForwardBatch:
    chunks = []
    for row, length in enumerate(lengths):
        one = sequence(chance.choices(range(97), k=length), handle=row)
        one.blocks = chance.sample(range(80), -(-length // BLOCK))
        chunks.append(ScheduledChunk(one, length - 1, 1, samples=True))
    return make_batch(chunks, range(len(chunks)), BLOCK)


def test_each_row_reads_its_own_numbers(pool: KvPool, seed: int) -> None:
    chance = random.Random(seed)
    # Room for nine of the longest.
    inputs = StaticInputs(Capacity.of(9, 160, BLOCK, 600), WINDOWS, pool, CONFIG, 6)
    for _ in range(20):
        lengths = [chance.choice((1, 16, 17, SEGMENT, 500)) for _ in range(chance.randint(1, 9))]
        batch = batch_of(lengths, chance)
        rows = chance.randint(len(lengths), 9)
        assert inputs.fill(batch)
        step = inputs.step(rows)
        padding = rows - len(lengths)
        blocks = batch.blocks(BLOCK).tolist()
        assert step.tokens.tolist() == batch.tokens.tolist() + [0] * padding
        assert step.positions.tolist() == batch.positions.tolist() + [0] * padding
        assert step.blocks.tolist() == blocks + [-1] * padding
        assert step.rows.tolist() == list(range(rows))
        for window in WINDOWS:
            found = step.inputs[window]
            listed = list_items(np.array(lengths, np.int32), window)
            count = int(found.count)
            assert found.programs == 3  # 6 for the device, which has two KV heads
            assert found.items[:count].tolist() == listed.items.tolist()
            ends = listed.first_items.tolist()
            assert found.first_items.tolist() == ends + [count] * padding
            assert found.lengths[:rows].tolist() == lengths + [0] * padding
            for row, offset in enumerate(found.table_offsets[: len(lengths)].tolist()):
                own = batch.tables[batch.table_offsets[row] : batch.table_offsets[row + 1]]
                assert found.tables[offset : offset + len(own)].tolist() == own.tolist()


@pytest.mark.parametrize("capacity", [Capacity(2, 99, 99), Capacity(9, 3, 99), Capacity(9, 99, 62)])
def test_what_is_too_large_changes_nothing(pool: KvPool, capacity: Capacity) -> None:
    inputs = StaticInputs(capacity, WINDOWS, pool, CONFIG, 6)
    before = inputs._whole.clone()
    assert not inputs.fill(batch_of([300, 300, 400], random.Random(0)))
    assert torch.equal(inputs._whole, before)
    assert inputs.fill(batch_of([300], random.Random(0)))


def test_the_capacity_is_that_of_a_pool_whose_blocks_are_shared() -> None:
    """And no more than so many sequences can have."""
    assert Capacity.of(4, 100, BLOCK, 10**6) == Capacity(4, 3200 // SEGMENT + 8, 204)
    assert Capacity.of(2, 10**6, BLOCK, 512) == Capacity(2, 1024 // SEGMENT + 4, 66)
