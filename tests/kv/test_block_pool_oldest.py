"""Tests what the cleaner of lower tiers reads of a block pool."""

from pdserve.kv.block_pool import BlockPool


def test_oldest_lists_what_eviction_takes_next() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.reserve(3)
    assert blocks is not None
    pool.commit_run(blocks, [b"a", b"b", b"c"], b"root")
    assert pool.oldest(5) == []
    pool.release(blocks)
    assert [name for _, name in pool.oldest(2)] == [b"c", b"b"]
    assert pool.oldest(5)[2] == (blocks[0], b"a")
    assert pool.parent(blocks[1]) == b"a"
    pool.reserve(2)
    assert [name for _, name in pool.oldest(5)] == [b"b", b"a"]


def test_a_generation_grows_when_content_may_change() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.reserve(1) or []
    pool.commit(block, b"a", b"root")
    before = pool.generation(block)
    pool.release((block,))
    pool.acquire((block,))
    pool.release((block,))
    assert pool.generation(block) == before
    pool.reserve(2)
    assert pool.generation(block) == before + 1
    pool.release((0, 1))
    pool.unname()
    assert pool.generation(block) == before + 2
