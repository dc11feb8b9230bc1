"""The block pool: single rules by example, all of them together against a naive model."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.kv.block_pool import BlockPool
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from tests.support.pools import hash_of
from tests.support.seeds import is_long

ROOT = b"root"


def name(path: tuple[int, ...]) -> bytes:
    """Hash of the block at the end of `path`; the empty path is the root."""
    return hashlib.sha256(repr(path).encode()).digest()[:16] if path else ROOT


def fill(pool: BlockPool, path: tuple[int, ...]) -> list[int]:
    """Hold and commit a chain of fresh blocks (or the ones that are there already)."""
    shared = pool.match([name(path[: i + 1]) for i in range(len(path))])
    fresh = pool.reserve(len(path) - len(shared), shared=shared)
    assert fresh is not None
    blocks = shared + fresh
    for i in range(len(shared), len(path)):
        blocks[i] = pool.commit(blocks[i], name(path[: i + 1]), name(path[:i]))
    return blocks


def test_a_fresh_pool_hands_out_contiguous_blocks():
    pool = BlockPool(8, 4)
    assert pool.reserve(3) == [0, 1, 2]
    assert pool.reserve(2) == [3, 4]
    assert pool.available == 3


def test_reserving_too_much_changes_nothing():
    pool = BlockPool(4, 4)
    pool.release(fill(pool, (1, 2)))
    pool.drain_events()
    shared = pool.match([name((1,)), name((1, 2))])
    assert pool.reserve(3, shared=shared) is None
    assert pool.reserve(2, shared=shared, spare=1) is None
    assert pool.counts().cached == 2
    assert pool.drain_events() == []
    assert pool.reserve(2, shared=shared) is not None


def test_released_blocks_stay_valid_until_they_are_needed():
    pool = BlockPool(4, 4)
    blocks = fill(pool, (1, 2, 3))
    pool.release(blocks)
    assert pool.counts().cached == 3
    assert pool.match([name((1,)), name((1, 2)), name((1, 9))]) == blocks[:2]


def test_a_chain_is_evicted_from_its_tail():
    pool = BlockPool(3, 4)
    pool.release(fill(pool, (1, 2, 3)))
    pool.drain_events()
    pool.reserve(1)
    assert pool.drain_events() == [BlockRemoved(hashes=[name((1, 2, 3))])]
    pool.reserve(1)
    assert pool.drain_events() == [BlockRemoved(hashes=[name((1, 2))])]


def test_the_older_chain_goes_whole_before_the_newer_one_is_touched():
    pool = BlockPool(4, 4)
    pool.release(fill(pool, (1, 1)))
    pool.release(fill(pool, (2, 2)))
    assert pool.match([name((1,))])  # looking does not refresh, only using does
    pool.reserve(2)
    assert pool.match([name((1,))]) == []
    assert len(pool.match([name((2,)), name((2, 2))])) == 2


def test_using_a_prefix_refreshes_it():
    pool = BlockPool(4, 4)
    pool.release(fill(pool, (1, 1)))
    pool.release(fill(pool, (2, 2)))
    pool.release(fill(pool, (1, 1)))
    pool.reserve(2)
    assert pool.match([name((2,))]) == []
    assert len(pool.match([name((1,)), name((1, 1))])) == 2


def test_equal_content_is_mapped_once():
    pool = BlockPool(4, 4)
    first, second = pool.reserve(1), pool.reserve(1)
    assert first
    assert second
    assert pool.commit(first[0], name((1,)), ROOT) == first[0]
    assert pool.commit(second[0], name((1,)), ROOT) == first[0]
    assert pool.references(first[0]) == 2
    assert pool.counts().free == 3


def test_a_cached_twin_is_woken_by_a_commit():
    pool = BlockPool(4, 4)
    (old,) = fill(pool, (1,))
    pool.release([old])
    new = pool.reserve(1)
    assert new
    assert pool.commit(new[0], name((1,)), ROOT) == old
    assert pool.references(old) == 1
    pool.check()


def test_runs_of_a_chain_become_one_event():
    pool = BlockPool(8, 4)
    fill(pool, (1, 2, 3))
    fill(pool, (1, 2, 4))
    assert pool.drain_events() == [
        BlockStored(hashes=[name((1,)), name((1, 2)), name((1, 2, 3))], parent=ROOT),
        BlockStored(hashes=[name((1, 2, 4))], parent=name((1, 2))),
    ]


def test_clearing_says_so_only_when_nothing_named_is_left():
    pool = BlockPool(8, 4)
    held = fill(pool, (1,))
    pool.release(fill(pool, (2,)))
    pool.drain_events()
    assert pool.clear() == 1
    assert pool.drain_events() == [BlockRemoved(hashes=[name((2,))])]
    pool.release(held)
    assert pool.clear() == 1
    assert pool.drain_events() == [PoolCleared()]
    assert pool.counts().free == 8


def test_quarantined_blocks_are_nobodys_until_the_peer_is_fenced():
    pool = BlockPool(2, 4)
    blocks = pool.reserve(2)
    assert blocks
    pool.quarantine(blocks)
    assert pool.counts().quarantined == 2
    assert pool.reserve(1) is None
    before = pool.releases
    pool.unquarantine(blocks[:1])
    assert pool.releases > before
    assert pool.reserve(1) == blocks[:1]
    with pytest.raises(ValueError, match="not quarantined"):
        pool.unquarantine(blocks[:1])


def test_the_tier_is_in_every_event():
    pool = BlockPool(1, 4, tier="host")
    pool.release(fill(pool, (1,)))
    pool.reserve(1)
    assert {event.tier for event in pool.drain_events()} == {"host"}


def test_misuse_is_refused_before_anything_changes():
    pool = BlockPool(4, 4)
    held = pool.reserve(1)
    assert held
    for misuse in (
        lambda: pool.release([held[0], 3]),
        lambda: pool.acquire([held[0], 3]),
        lambda: pool.commit(3, name((1,)), ROOT),
        lambda: pool.quarantine([held[0], 3]),
    ):
        with pytest.raises(ValueError, match="block 3"):
            misuse()
    assert pool.references(held[0]) == 1
    pool.commit(held[0], name((1,)), ROOT)
    with pytest.raises(ValueError, match="committed before"):
        pool.commit(held[0], name((2,)), ROOT)
    with pytest.raises(ValueError, match="shared, has a hash"):
        pool.quarantine(held)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 4)


@pytest.mark.parametrize("damage", ["lost", "doubled", "named", "aged"])
def test_check_finds_damage(damage: str):
    pool = BlockPool(6, 4)
    pool.release(fill(pool, (1, 2)))
    pool.check()
    match damage:
        case "lost":
            pool._free.pop()
        case "doubled":
            pool._free.append(pool._free[0])
        case "named":
            pool._by_hash[b"x"] = 0
        case "aged":
            pool._cached.move_to_end(next(iter(pool._cached)))
    with pytest.raises(AssertionError):
        pool.check()


# ------------------------------------------------------------------ against a naive model


@dataclass(eq=False)
class Holder:
    """A sequence: its path of labels, the blocks it holds, how many of them are committed."""

    path: tuple[int, ...]
    blocks: list[int]
    committed: int


@dataclass
class Model:
    """The same rules, slowly: nothing is indexed, eviction searches for the oldest leaf."""

    named: dict[tuple[int, ...], int] = field(default_factory=dict)
    age: dict[tuple[int, ...], int] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    clock: int = 0

    def references(self) -> Counter[int]:
        return Counter(block for holder in self.holders for block in holder.blocks)

    def cached(self) -> set[tuple[int, ...]]:
        held = self.references()
        return {path for path, block in self.named.items() if not held[block]}

    def evict(self, count: int) -> set[bytes]:
        gone = set()
        for _ in range(count):
            cached = self.cached()
            leaves = [p for p in cached if not any(q[:-1] == p for q in self.named)]
            victim = min(leaves, key=lambda path: self.age[path])
            del self.named[victim]
            gone.add(name(victim))
        return gone

    def let_go(self, holder: Holder) -> None:
        """The tail goes first."""
        for length in range(holder.committed, 0, -1):
            self.clock += 1
            self.age[holder.path[:length]] = self.clock
        self.holders.remove(holder)


labels = st.integers(0, 2)
paths = st.lists(labels, min_size=1, max_size=5).map(tuple)


class PoolMachine(RuleBasedStateMachine):
    """Random histories; after each step both sides agree in everything that can be seen."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE, 4)
        self.model = Model()
        self.index: set[bytes] = set()

    def free(self) -> int:
        model = self.model
        used = len(+model.references())
        return self.SIZE - used - len(model.cached()) - len(model.quarantined)

    @rule(path=paths, extra=st.integers(0, 2), spare=st.integers(0, 3))
    def admit(self, path: tuple[int, ...], extra: int, spare: int) -> None:
        expected = 0
        while expected < len(path) and path[: expected + 1] in self.model.named:
            expected += 1
        shared = self.pool.match([name(path[: i + 1]) for i in range(len(path))])
        assert shared == [self.model.named[path[: i + 1]] for i in range(expected)]
        waking = sum(path[: i + 1] in self.model.cached() for i in range(expected))
        need = len(path) - expected + extra
        fits = need + spare <= self.free() + len(self.model.cached()) - waking
        short = max(0, need - self.free())
        self.pool_events()
        fresh = self.pool.reserve(need, shared=shared, spare=spare)
        assert (fresh is not None) == fits
        if fresh is None:
            return
        self.model.holders.append(Holder(path, shared, expected))
        gone = self.model.evict(short)
        removed = [e for e in self.pool_events() if isinstance(e, BlockRemoved)]
        assert {h for event in removed for h in event.hashes} == gone
        self.model.holders[-1].blocks = shared + fresh

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        index = holder.committed
        if index == len(holder.path):
            return
        path = holder.path[: index + 1]
        block = holder.blocks[index]
        expected = self.model.named.get(path, block)
        assert self.pool.commit(block, name(path), name(path[:-1])) == expected
        holder.blocks[index] = expected
        holder.committed += 1
        self.model.named[path] = expected

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def commit_run(self, data: st.DataObject) -> None:
        """What single commits would do; some of the blocks may have their names."""
        holder = data.draw(st.sampled_from(self.model.holders))
        first = data.draw(st.integers(0, holder.committed))
        end = data.draw(st.integers(first, len(holder.path)))
        paths = [holder.path[: index + 1] for index in range(first, end)]
        expected = [
            self.model.named.get(path, block)
            for path, block in zip(paths, holder.blocks[first:end], strict=True)
        ]
        names = [name(path) for path in paths]
        used = self.pool.commit_run(holder.blocks[first:end], names, name(holder.path[:first]))
        assert used == expected
        holder.blocks[first:end] = used
        holder.committed = max(holder.committed, end)
        self.model.named |= dict(zip(paths, used, strict=True))

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        self.pool.acquire(holder.blocks[: holder.committed])
        path = holder.path[: holder.committed]
        self.model.holders.append(Holder(path, holder.blocks[: len(path)], len(path)))

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        before = self.pool.releases
        self.pool.release(holder.blocks)
        assert self.pool.releases > before
        self.model.let_go(holder)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def quarantine_the_unfilled(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        unfilled = holder.blocks[holder.committed :]
        self.pool.quarantine(unfilled)
        self.pool.release(holder.blocks[: holder.committed])
        self.model.let_go(holder)
        self.model.quarantined += unfilled

    @rule(count=st.integers(0, 3))
    def unquarantine(self, count: int) -> None:
        self.pool.unquarantine(self.model.quarantined[:count])
        del self.model.quarantined[:count]

    @rule()
    def clear(self) -> None:
        cached = self.model.cached()
        assert self.pool.clear() == len(cached)
        for path in cached:
            del self.model.named[path]

    def pool_events(self) -> list[KvEvent]:
        """Drain, and keep an index as a subscriber would."""
        events = self.pool.drain_events()
        for event in events:
            match event:
                case BlockStored():
                    assert event.parent == ROOT or event.parent in self.index
                    assert not self.index & set(event.hashes)
                    self.index |= set(event.hashes)
                case BlockRemoved():
                    assert set(event.hashes) <= self.index
                    self.index -= set(event.hashes)
                case PoolCleared():
                    self.index.clear()
        return events

    @invariant()
    def both_sides_agree(self) -> None:
        self.pool.check()
        self.pool_events()
        counts, held = self.pool.counts(), self.model.references()
        assert counts.used == len(+held)
        assert counts.cached == len(self.model.cached())
        assert counts.quarantined == len(self.model.quarantined)
        assert counts.free == self.free()
        assert all(self.pool.references(block) == held[block] for block in range(self.SIZE))
        assert self.index == {name(path) for path in self.model.named}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=2000 if is_long() else 60, stateful_step_count=40, deadline=None
)


def test_another_holder_goes_on_from_a_block_that_has_lost_its_name():
    pool = BlockPool(8, 4)
    chain = fill(pool, (1,))
    other = fill(pool, (1, 2))
    pool.disown(chain)
    pool.release(chain)
    again = fill(pool, (1,))
    assert again != chain
    pool.release(again)
    pool.check()
    pool.release(other)
    pool.check()
    assert pool.match([name((1,)), name((1, 2))]) == [again[0], other[1]]


def test_blocks_that_are_not_to_be_trusted_lose_their_names():
    pool = BlockPool(8, 4)
    chain = fill(pool, (1, 2, 3))
    other = fill(pool, (1, 2, 4))
    assert other[:2] == chain[:2]
    pool.drain_events()
    pool.disown(chain)
    assert [hash_of(pool, block) is None for block in chain] == [True, True, True]
    removed = [name((1,)), name((1, 2)), name((1, 2, 3))]
    assert pool.drain_events() == [BlockRemoved(hashes=removed)]
    pool.release(chain)
    pool.check()
    assert pool.match(removed) == []
    assert hash_of(pool, other[2]) is not None, "it follows them, and is the other holder's"
    pool.disown(other)
    pool.release(other)
    pool.check()
    assert pool.counts().free == 8
    pool.disown([])
    assert pool.match([name((1,))]) == []


def test_dropping_frees_cached_blocks_and_tells_it():
    pool = BlockPool(4, 16)
    blocks = pool.reserve(3) or []
    pool.commit_run(blocks, [b"a", b"b", b"c"], b"root")
    pool.release(blocks)
    pool.acquire(blocks[:1])
    pool.drain_events()
    assert pool.drop({b"a", b"b", b"c", b"unknown"}) == 2
    assert pool.drain_events() == [BlockRemoved(hashes=[b"c", b"b"])]
    assert pool.names() == {b"a": b"root"}
    assert pool.drop({b"b"}) == 0
    assert not pool.drain_events()
    pool.release(blocks[:1])
    assert pool.counts().free == 3
    assert pool.counts().cached == 1


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


# ---------------------------------------------------------------------- early eviction


def chain(pool: BlockPool, name: str, count: int, before: list[int] | None = None) -> list[int]:
    """Blocks of one chain, held: those before it, and fresh ones."""
    shared = before or []
    fresh = pool.reserve(count, shared=shared)
    assert fresh is not None
    parent = pool.name(shared[-1]) if shared else b"root"
    assert parent is not None
    pool.commit_run(fresh, [f"{name}{i}".encode() for i in range(count)], parent)
    return [*shared, *fresh]


def order(pool: BlockPool) -> list[str]:
    return [name.decode() for _, name in pool.oldest(99)]


def test_blocks_that_are_released_early_go_first_and_the_leaf_before_all():
    pool = BlockPool(16, 4)
    pool.release(chain(pool, "old", 2))
    blocks = chain(pool, "hot", 3)
    pool.release_early([*blocks, *(pool.reserve(1) or [])])
    assert order(pool) == ["hot2", "hot1", "hot0", "old1", "old0"]
    pool.check()


def test_what_another_chain_continues_is_kept_as_usual():
    pool = BlockPool(16, 4)
    hot = chain(pool, "hot", 3)
    other = chain(pool, "own", 1, hot[:2])
    pool.release(chain(pool, "old", 1))
    pool.release_early(hot)
    assert order(pool) == ["hot2", "old0"]
    pool.release(other)
    assert order(pool) == ["hot2", "old0", "own0", "hot1", "hot0"]
    pool.check()


def test_what_another_holder_has_is_released_by_the_last_one():
    pool = BlockPool(16, 4)
    pool.release(chain(pool, "old", 1))
    hot = chain(pool, "hot", 2)
    pool.acquire(hot)
    pool.release_early(hot)
    assert order(pool) == ["old0"]
    pool.release_early(hot)
    assert order(pool) == ["hot1", "hot0", "old0"]
    pool.check()


def test_random_early_releases_keep_leaves_first(seed: int):
    rng, pool = Random(seed), BlockPool(40, 4)
    held: list[list[int]] = []
    for number in range(600):
        if held and (rng.random() < 0.5 or pool.available < 5):
            blocks = held.pop(rng.randrange(len(held)))
            (pool.release_early if rng.random() < 0.5 else pool.release)(blocks)
        else:
            near = rng.choice(held)[: rng.randint(0, 3)] if held else []
            held.append(chain(pool, f"c{number}-", rng.randint(1, 4), near))
        pool.check()
