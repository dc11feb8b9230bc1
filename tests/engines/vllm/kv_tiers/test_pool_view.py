"""What is read of vLLM's pool: which blocks are evicted next, and whether they are still there."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from pdserve_engines.vllm.kv_tiers.pool_view import PoolView


class Pool:
    """vLLM's `BlockPool`, with its list of unused blocks."""

    def __init__(self, count: int) -> None:
        self.num_gpu_blocks = count
        self.blocks = [
            SimpleNamespace(block_id=number, block_hash=None, next_free_block=None)
            for number in range(count)
        ]
        self.cached_block_hash_to_block: dict[Any, Any] = {}
        self.free_block_queue = SimpleNamespace(
            fake_free_list_head=SimpleNamespace(next_free_block=None)
        )
        self._end = SimpleNamespace(block_id=-1, next_free_block=None)
        self._unused: list[int] = []
        self.unused(*range(1, count))

    def unused(self, *blocks: int) -> None:
        """These are unused, in order of their eviction."""
        self._unused = [*blocks]
        before: Any = self.free_block_queue.fake_free_list_head
        for number in blocks:
            before.next_free_block = self.blocks[number]
            before = self.blocks[number]
        before.next_free_block = self._end

    def get_num_free_blocks(self) -> int:
        return len(self._unused)

    def hold(self, block: int, key: Any) -> None:
        old = self.blocks[block].block_hash
        self.cached_block_hash_to_block.pop(old, None)
        self.blocks[block].block_hash = key
        if key is not None:
            self.cached_block_hash_to_block[key] = block


def name(number: int) -> bytes:
    return bytes([number]) * 16


def chain(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def test_a_request_that_ends_tells_what_its_blocks_hold() -> None:
    pool = Pool(8)
    view = PoolView(pool, 16)
    for block in (3, 4):
        pool.hold(block, f"key {block}")
    assert view.left([3, 4, 5], chain(1, 2, 3), b"root") == 2
    assert view.match(chain(1, 2, 3)) == [3, 4]
    assert (view.parent(3), view.parent(4)) == (b"root", name(1))
    pool.unused(1, 4, 5, 3)
    assert view.free == 2
    assert view.oldest(5) == [(4, name(2)), (3, name(1))]
    assert view.oldest(1) == [(4, name(2))]
    assert view.num_blocks == 7


def test_a_block_that_vllm_has_given_away_is_not_there() -> None:
    pool = Pool(8)
    view = PoolView(pool, 16)
    pool.hold(3, "a")
    view.left([3], chain(1), b"root")
    assert view.holds([3])
    pool.hold(3, "b")
    assert not view.holds([3])
    assert view.match(chain(1)) == []
    assert view.oldest(8) == []
    view.left([3], chain(2), b"root")
    assert view.match(chain(1)) == []
    assert view.match(chain(2)) == [3]


def test_a_copy_of_a_block_takes_its_place() -> None:
    pool = Pool(8)
    view = PoolView(pool, 16)
    for block in (3, 4):
        pool.hold(block, "same")
        view.left([block], chain(1), b"root")
    pool.hold(3, "other")
    view.left([3], chain(2), b"root")
    assert view.match(chain(1)) == [4]
    before = view.generation(4)
    view.clear()
    assert view.match(chain(1)) == []
    assert view.generation(4) != before


def test_what_is_known_is_bounded_by_the_pool(seed: int) -> None:
    rng, pool = random.Random(seed), Pool(9)
    view = PoolView(pool, 16)
    for number in range(200):
        block = rng.randrange(1, 9)
        pool.hold(block, number)
        view.left([block], [number.to_bytes(16, "big")], b"root")
        assert view.match([number.to_bytes(16, "big")]) == [block]
        assert len(view._known) == len(view._places) <= 8
