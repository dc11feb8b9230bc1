"""A send queue never overflows, forgets nothing, and ends each chain once."""

from __future__ import annotations

from array import array
from collections import deque
from random import Random

import pytest

from pdserve.transfer.block_mapping import RegionCopy
from pdserve.transfer.copy_plan import CopyRuns
from pdserve.transfer.path_base import DeliveryKey
from pdserve.transfer.rdma.send_queue import RailRegions, SendQueue
from pdserve.transfer.rdma.verbs_path import WorkRequestChain
from pdserve.transfer.rdma.work_requests import SendTablePure, region_slices

SIZE = 10_000
REGIONS = RailRegions([region_slices(0, SIZE, (1,))] * 2, [region_slices(0, 4_000, (2, 3, 4))] * 2)


def chain(random: Random, part: int) -> WorkRequestChain:
    """Of some moves with some runs, or of none."""
    moves = []
    for _ in range(random.randrange(4)):
        lengths = [random.randrange(1, 50) for _ in range(random.randrange(1, 30))]
        here, there = (array("q", [random.randrange(SIZE - 50) for _ in lengths]) for _ in "12")
        runs = CopyRuns(here, there, array("q", lengths))
        moves.append(RegionCopy(random.randrange(2), random.randrange(2), runs))
    return WorkRequestChain(tuple(moves), part, DeliveryKey(0, 1, part))


class World:
    """A device that completes in order, whenever asked."""

    def __init__(self, depth: int) -> None:
        self.queue = SendQueue(depth, REGIONS)
        self.table = SendTablePure(depth)
        self.words: list[int] = []
        self.sizes: list[int] = []
        self.under_way: deque[int] = deque()
        self.ended: dict[DeliveryKey, bool] = {}

    def pump(self) -> None:
        first = self.queue.posted + 1
        count = self.queue.fill(self.table)
        for at in range(count):
            _, opcode, _, pieces, _, length, _, _, _, word = self.table.row(at)
            self.sizes.append(length if pieces else 0)
            if opcode:
                self.words.append(word)
            asks = (first + at) % self.queue.every == 0 or at + 1 == count
            self.under_way.append(first + at if asks else 0)
        assert len(self.under_way) <= self.queue.depth

    def complete(self, count: int) -> None:
        for _ in range(min(count, len(self.under_way))):
            number = self.under_way.popleft()
            if number:
                for ended in self.queue.complete(number):
                    assert ended.key not in self.ended
                    self.ended[ended.key] = ended.whole


@pytest.mark.parametrize("round", range(10))
def test_all_is_posted_once_within_the_depth(round: int, seed: int) -> None:
    random = Random(seed + round)
    world = World(random.choice((2, 3, 8, 64)))
    chains = [chain(random, part) for part in range(40)]
    given_up: set[DeliveryKey] = set()
    for one in chains:
        world.queue.push(one)
        world.pump()
        world.complete(random.randrange(40))
        if random.random() < 0.2:
            key = random.choice(chains[: one.key.part + 1]).key
            if world.queue.give_up(key):
                given_up.add(key)
            world.pump()
    for _ in range(100_000):
        if world.queue.idle:
            break
        world.complete(random.randrange(1, 10))
        world.pump()
    assert world.queue.idle
    assert set(world.ended) | given_up == {one.key for one in chains}
    assert not set(world.ended) & given_up
    whole = [key.part for key, good in world.ended.items() if good]
    assert world.words == whole, "who ends well has been notified, in order, and nobody else"
    if not given_up and all(world.ended.values()):
        assert sum(world.sizes) == sum(m.runs.size for c in chains for m in c.moves)


def test_a_chain_that_has_not_begun_is_simply_gone() -> None:
    world = World(4)
    long = CopyRuns(array("q", range(9)), array("q", range(9)), array("q", [1]) * 9)
    world.queue.push(WorkRequestChain((RegionCopy(0, 0, long),), 0, DeliveryKey(0, 1, 0)))
    world.pump()
    world.queue.push(WorkRequestChain((RegionCopy(0, 0, long),), 1, DeliveryKey(0, 1, 1)))
    assert world.queue.give_up(DeliveryKey(0, 1, 1))
    assert not world.queue.give_up(DeliveryKey(0, 1, 0))
    assert world.queue.key_at(1) == DeliveryKey(0, 1, 0)
    world.pump()
    assert not world.ended
    world.complete(4)
    world.pump()
    world.complete(4)
    assert world.ended == {DeliveryKey(0, 1, 0): False}
    assert world.words == []
    assert world.sizes == [1, 1, 1, 1, 0], "an empty write follows, to be waited for"
    assert world.queue.key_at(1) is None


def test_a_queue_that_is_cleared_is_idle() -> None:
    world = World(4)
    world.queue.push(chain(Random(1), 0))
    world.pump()
    world.queue.clear()
    assert world.queue.idle
    with pytest.raises(ValueError, match="two entries"):
        SendQueue(1, REGIONS)
