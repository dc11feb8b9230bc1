"""The order of eviction, and the queue that keeps it, against sorting."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.kv.tiers.eviction import EvictionOrder, EvictionQueue


def test_earlier_turns_make_a_block_younger_up_to_a_bound() -> None:
    order = EvictionOrder(turn_bonus=60.0, turn_cap=4)
    scores = [order.score(100.0, turns) for turns in (1, 2, 5, 6, 99)]
    assert scores == [100.0, 160.0, 340.0, 340.0, 340.0]


def test_without_a_bonus_only_the_last_use_counts() -> None:
    assert EvictionOrder(turn_bonus=0.0).score(7.0, 5) == 7.0


@pytest.mark.parametrize("part", range(4))
def test_the_queue_is_a_sorted_dictionary(seed: int, part: int) -> None:
    random, queue = Random(seed + part), EvictionQueue()
    truth: dict[bytes, tuple[int, float, int]] = {}
    names = [bytes([i]) for i in range(40)]
    for number in range(1500):
        name = random.choice(names)
        if random.random() < 0.6:
            # Few different numbers, so that a name often gets a key that it had before.
            truth[name] = (random.randint(0, 1), float(random.randint(0, 3)), random.randint(0, 2))
            queue.put(name, truth[name])
        else:
            queue.remove(name)
            truth.pop(name, None)
        if number % 5 == 0:
            count = random.randint(0, 12)
            wanted = sorted(truth, key=lambda name: (truth[name], name))
            assert queue.first(count) == wanted[:count]
            assert queue.first(count) == wanted[:count], "looking changes nothing"
        assert len(queue) == len(truth)
        assert (name in queue) == (name in truth)
    queue.clear()
    assert queue.first(3) == []


def test_stale_entries_are_bounded() -> None:
    queue = EvictionQueue()
    for number in range(10_000):
        queue.put(bytes([number % 10]), (1, float(number), number))
    assert len(queue._heap) <= 2 * 10 + 65
    assert queue.first(1) == [bytes([0])]
