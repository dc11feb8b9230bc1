"""The memory of own decisions: how long, how much, and for whom."""

from __future__ import annotations

from pdserve.ids import NodeId
from pdserve.router.prefix_index.radix_tree import Tree
from pdserve.router.prefix_index.recent_routes import RecentRoutes
from pdserve.router.prefix_index.worker_slots import WorkerSlots
from tests.router.prefix_index.support import life, names

A, B = NodeId("a"), NodeId("b")


class Kept:
    def __init__(self, *, ttl: float = 8.0, parts: int = 4, most: int = 100) -> None:
        self.tree, self.slots = Tree(10_000), WorkerSlots()
        self.memory = RecentRoutes(self.tree, self.slots, ttl=ttl, parts=parts, most=most)

    def note(self, now: float, node: str, *numbers: int) -> None:
        self.memory.note(now, life(node), names(*numbers))

    def found(self, now: float, *numbers: int) -> dict[NodeId, int]:
        self.memory.expire(now)
        return self.tree.match_as(names(*numbers), self.slots.shown)


def test_each_worker_has_its_own() -> None:
    kept = Kept()
    kept.note(0.0, "a", 1, 2, 3)
    kept.note(0.0, "b", 1, 2)
    kept.note(0.0, "b", 7)
    assert kept.found(0.0, 1, 2, 3) == {A: 3, B: 2}
    assert kept.memory.blocks(life("b")) == 3
    assert kept.memory.noted == 3


def test_it_ends_after_its_time_and_not_long_before() -> None:
    kept = Kept(ttl=8.0, parts=4)
    for second in range(40):
        kept.note(float(second), "a", second)
        now = second + 0.5
        for sent in range(second + 1):
            age = now - sent
            found = kept.found(now, sent) == {A: 1}
            assert found or age > 6.0
            assert not found or age < 8.0


def test_what_is_sent_again_stays() -> None:
    kept = Kept(ttl=8.0)
    for second in range(30):
        kept.note(float(second), "a", 1)
    assert kept.found(30.0, 1) == {A: 1}


def test_the_oldest_goes_when_there_is_no_room() -> None:
    kept = Kept(ttl=1000.0, parts=4, most=40)
    for number in range(100):
        kept.note(0.0, "a", number)
        kept.note(0.0, "a", 0)
    assert kept.found(0.0, 0) == {A: 1}, "used all the time"
    assert kept.found(0.0, 99) == {A: 1}
    assert kept.found(0.0, 5) == {}
    held = [n for n in range(100) if kept.found(0.0, n)]
    assert 25 <= len(held) <= 40
    kept.memory.reclaim(10)
    assert kept.tree.counters.worker_blocks <= 44


def test_memory_comes_back() -> None:
    kept = Kept(ttl=8.0)
    for node in "abcdef":
        kept.note(0.0, node, 1, 2, 3)
    assert kept.found(8.0, 1) == {}
    kept.memory.reclaim(2)
    assert kept.memory.slots == len(kept.slots) == 4
    kept.memory.reclaim(100)
    assert kept.memory.slots == len(kept.slots) == len(kept.tree) == 0


def test_a_worker_is_forgotten() -> None:
    kept = Kept()
    kept.note(0.0, "a", 1, 2)
    kept.note(3.0, "a", 1, 2, 3)
    kept.note(3.0, "b", 1)
    kept.memory.forget(life("a"))
    assert kept.found(3.0, 1, 2) == {B: 1}
    assert kept.memory.blocks(life("a")) == 0
    assert len(kept.slots) == 1


def test_single_blocks_are_forgotten_in_every_part() -> None:
    kept = Kept()
    kept.note(0.0, "a", 1, 2)
    kept.note(3.0, "a", 1, 2, 3)
    kept.memory.removed(life("a"), names(2))
    assert kept.found(3.0, 1, 2, 3) == {A: 1}


def test_slots_are_used_again() -> None:
    slots = WorkerSlots()
    first, _ = slots.take(A), slots.take()
    assert slots.shown == {first: A}
    slots.give(first)
    assert slots.shown == {}
    assert slots.take(B) == first
    assert len(slots) == 2


def test_a_worker_may_have_several_slots_that_count() -> None:
    slots = WorkerSlots()
    main, more = slots.take(), slots.take(A)
    slots.show(main, A)
    assert slots.node(main) == slots.node(more) == A
    slots.hide(main)
    assert slots.shown == {more: A}
    assert slots.node(main) is None
