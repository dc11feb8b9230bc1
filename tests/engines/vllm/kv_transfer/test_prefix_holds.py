"""Held blocks of vLLM's prefix cache, over a model of its pool's counts of references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve_engines.vllm.kv_transfer.prefix_holds import PrefixHolds

COUNT = 41


class Pool:
    """vLLM's pool, as far as holds touch it: a block with references is not free."""

    def __init__(self) -> None:
        self.num_gpu_blocks = COUNT
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(COUNT)]
        self.freed: list[int] = []

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed more often than held"
            self.freed.append(block.block_id)

    @property
    def used(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def holds(pool: Pool) -> PrefixHolds:
    manager = SimpleNamespace(block_pool=pool)
    scheduler = SimpleNamespace(kv_cache_manager=manager)
    return PrefixHolds(SimpleNamespace(scheduler=scheduler, request_block_hasher=None))


def test_held_blocks_are_used_until_they_are_released(pool: Pool, holds: PrefixHolds):
    first, second = holds.hold([1, 2, 3]), holds.hold([1, 2])
    assert (holds.held, pool.used) == (5, {1, 2, 3})
    holds.release(first)
    assert (holds.held, pool.used) == (2, {1, 2})
    assert pool.freed == [3, 2, 1], "the last block is evicted first"
    holds.release(second)
    assert (holds.held, pool.used) == (0, set())


def test_no_more_than_a_share_of_the_pool_is_held(pool: Pool, holds: PrefixHolds):
    assert holds.hold(list(range(1, 11)))
    assert holds.hold([11]) == []
    assert pool.used == set(range(1, 11))


def test_what_was_given_up_is_not_released_again(pool: Pool, holds: PrefixHolds):
    before = holds.hold([1, 2])
    shared = holds.hold([2, 3])
    assert holds.give_up() == 4
    assert (holds.held, pool.used) == (0, set())
    after = holds.hold([2])
    holds.release(before)  # it may take the newer reference along, and never one that is not ours
    holds.release(shared)
    holds.release(after)
    assert (holds.held, pool.used) == (0, set())
    assert holds.give_up() == 0
