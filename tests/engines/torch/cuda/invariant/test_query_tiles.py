"""Chunks in tiles of queries."""

from __future__ import annotations

import random

from pdserve.engine_core.executor import ScheduledChunk
from pdserve_engines.torch.cuda.invariant.query_tiles import list_tiles
from pdserve_engines.torch.models.forward_batch import make_batch
from tests.engines.torch.driver import sequence

BLOCK = 16


def chunk(start: int, count: int) -> ScheduledChunk:
    made = sequence([1] * (start + count))
    made.blocks = list(range(-(-(start + count) // BLOCK)))
    return ScheduledChunk(made, start, count, samples=False)


def test_decodes_are_tiles_of_one_query_and_chunks_are_divided() -> None:
    batch = make_batch([chunk(40, 1), chunk(0, 9), chunk(3, 4), chunk(0, 1)], [], BLOCK)
    tiles = list_tiles(batch, 4)
    assert tiles.rows.tolist() == [0, 1, 5, 9, 10, 14]
    assert tiles.counts.tolist() == [1, 4, 4, 1, 4, 1]
    assert tiles.ends.tolist() == [41, 4, 8, 9, 7, 1]
    assert tiles.table_offsets.tolist() == [0, 3, 3, 3, 4, 5]


def test_every_row_is_in_one_tile_with_its_position(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        chunks = [chunk(chance.randint(0, 50), chance.randint(1, 30)) for _ in range(5)]
        batch, most = make_batch(chunks, [], BLOCK), chance.randint(1, 16)
        tiles = list_tiles(batch, most)
        rows: list[int] = []
        positions: list[int] = []
        for row, end, count in zip(tiles.rows, tiles.ends, tiles.counts, strict=True):
            assert 1 <= count <= most
            rows += range(row, row + count)
            positions += range(end - count, end)
        assert rows == list(range(len(batch.tokens)))
        assert positions == batch.positions.tolist()
