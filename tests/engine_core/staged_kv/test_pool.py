"""Staging memory: mapped by other processes, and only while it is what was meant; or brought by an
engine, for its own process."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

from pdserve.engine_core.staged_kv.pool import StagingPool, host_frames, open_staging
from pdserve.errors import EngineError
from pdserve.messages.transfer import RankKvLayout

LAYOUT = RankKvLayout(content="c", layers=2, heads=4, tokens=4, dim=8, itemsize=2)

CHILD = """
import pickle, sys
from pdserve.engine_core.staged_kv.pool import open_staging
handle = pickle.loads(bytes.fromhex(sys.argv[1]))
memory = open_staging(handle)
assert memory[:4] == b"here"
memory[-4:] = b"back"
"""


@pytest.fixture
def staging():
    pool = StagingPool(LAYOUT, 6)
    yield pool
    pool.close()


def test_a_child_process_maps_the_same_bytes(staging: StagingPool):
    assert staging.region.view is not None
    staging.region.view[:4] = b"here"
    words = pickle.dumps(staging.handle()).hex()
    subprocess.run([sys.executable, "-c", CHILD, words], check=True)
    assert bytes(staging.region.view[-4:]) == b"back"


def test_blocks_hold_all_heads_of_all_layers(staging: StagingPool):
    assert staging.block_bytes == 2 * 2 * 4 * 4 * 8 * 2
    assert staging.region.size == 6 * staging.block_bytes
    assert staging.region.fd is not None
    assert staging.blocks.counts().free == 6


def test_other_memory_is_not_taken_for_it(staging: StagingPool):
    other = StagingPool(LAYOUT, 6)
    wrong = dataclasses.replace(staging.handle(), fd=other.handle().fd)
    with pytest.raises(EngineError, match="not the staging memory"):
        open_staging(wrong)
    other.close()
    with pytest.raises(EngineError, match="cannot be opened"):
        open_staging(wrong)


def test_closing_twice_is_allowed(staging: StagingPool):
    staging.close()


def test_frames_of_a_tier_lie_behind_the_staging_blocks():
    pool = StagingPool(LAYOUT, 6, frames=4)
    frames, size = pool.frames(), pool.block_bytes
    assert frames is not None
    assert pool.region.view is not None
    assert (frames.first, frames.count, frames.shared) == (6, 4, True)
    assert pool.blocks.num_blocks == 6
    assert pool.handle() == frames.handle
    assert pool.region.blocks == pool.handle().blocks == 10
    frames.view(3)[:4] = b"here"
    assert bytes(pool.region.view[9 * size : 9 * size + 4]) == b"here"
    with pytest.raises(IndexError):
        frames.view(4)
    frames.close()
    assert bytes(pool.region.view[9 * size : 9 * size + 4]) == b"here"
    pool.close()


def test_a_pool_without_frames_has_none(staging: StagingPool):
    assert staging.frames() is None


def test_frames_without_staging_blocks_have_a_memory_of_their_own():
    frames = host_frames(LAYOUT, 5)
    assert (frames.first, frames.count, frames.shared) == (0, 5, False)
    with open_staging(frames.handle) as memory:
        frames.view(4)[-4:] = b"last"
        assert memory[-4:] == b"last"
    frames.close()
    with pytest.raises(EngineError, match="cannot be opened"):
        open_staging(frames.handle)


class Brought:
    """Memory of an engine's device."""

    local, address = 3, 0x7000

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_memory_that_the_engine_brings_is_of_its_own_process():
    memory = Brought()
    pool = StagingPool(LAYOUT, 6, memory)
    assert (pool.region.address, pool.region.view, pool.region.fd) == (0x7000, None, None)
    assert pool.region.size == pool.handle().size == 6 * pool.block_bytes
    assert pool.in_device
    assert pool.handle().local == 3
    with pytest.raises(EngineError, match="only be used in the engine process"):
        open_staging(pool.handle())
    pool.close()
    assert memory.closed == 1


def test_host_memory_has_no_number(staging: StagingPool):
    assert not staging.in_device
    assert staging.handle().local == 0
