"""A batch against its definition, and tokens that only the device knows."""

from __future__ import annotations

import random

import numpy as np
import torch

from pdserve.engine_core.executor import ScheduledChunk
from pdserve_engines.torch.models.forward_batch import make_batch
from tests.engines.torch.driver import sequence

BLOCK = 4


def chunk_of(length: int, start: int, count: int, first_block: int) -> ScheduledChunk:
    one = sequence([100 * first_block + place for place in range(length)])
    one.blocks = list(range(first_block, first_block + -(-length // BLOCK)))
    return ScheduledChunk(one, start, count, start + count == length)


def test_chunks_are_laid_end_to_end(seed: int) -> None:
    draw = random.Random(seed)
    chunks = []
    for number in range(9):
        length = draw.randrange(1, 30)
        start = draw.choice([0, length - 1, draw.randrange(length)])
        chunks.append(chunk_of(length, start, draw.randrange(1, length - start + 1), 10 * number))
    batch = make_batch(chunks, [0, 2], BLOCK)
    assert batch.rows.tolist() == [0, 2]
    for at, chunk in enumerate(chunks):
        start, end = chunk.start, chunk.start + chunk.count
        mine = slice(*batch.offsets[at : at + 2].tolist())
        table = batch.tables[slice(*batch.table_offsets[at : at + 2].tolist())]
        assert batch.starts[at] == start
        assert batch.tokens[mine].tolist() == chunk.sequence.tokens[start:end].tolist()
        assert batch.positions[mine].tolist() == list(range(start, end))
        assert table.tolist() == chunk.sequence.blocks[: -(-end // BLOCK)]
    assert {array.dtype for array in batch.arrays} == {np.dtype(np.int32)}


def test_unknown_tokens_come_from_the_result_before() -> None:
    """In another order than there, some rows left out, and a row without a token."""
    chunks = [chunk_of(9, 3, 4, 0), chunk_of(5, 5, 1, 10), chunk_of(6, 6, 1, 20)]
    chunks[1].token_from, chunks[2].token_from = 2, 0
    before = torch.tensor([-1, 77, 88])
    batch = make_batch(chunks, range(6), BLOCK, before)
    assert batch.tokens.tolist() == [3, 4, 5, 6, 0, 0]
    on_device = torch.from_numpy(batch.tokens)
    assert batch.fill(on_device).tolist() == [3, 4, 5, 6, 88, 0]
    assert batch.known.tokens.tolist() == [3, 4, 5, 6, 88, 0]
    assert batch.tokens.tolist() == [3, 4, 5, 6, 0, 0]


def test_a_batch_whose_tokens_are_known_is_not_copied() -> None:
    batch = make_batch([chunk_of(9, 3, 4, 0)], [3], BLOCK)
    tokens = torch.from_numpy(batch.tokens)
    assert batch.fill(tokens) is tokens
    assert batch.known is batch
