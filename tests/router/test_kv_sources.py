"""Where a worker may fetch KV from: what is offered, in which order, and what never is."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.tiers import KvSource, LaneLoad
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.kv_sources import (
    MOST_SOURCES,
    KvHolder,
    count_copies,
    kv_sources,
    most_copies,
)
from pdserve.router.policies import random as random_policy
from pdserve.router.policies.base import WorkerKv
from pdserve.router.policies.least_loaded import choose
from tests.router.policies.support import worker
from tests.router.prefix_index.support import Pool, block, names
from tests.router.support import facts, life, load, route

if TYPE_CHECKING:
    from pdserve.messages.routing import RouteDecision, RouteRequest

TCP = WorkerKv(host="h1", compat_hash="same", transfers=frozenset({"tcp"}))
BLOCKS = 20


def holder(node: str, blocks: int, occupancy: float = 0.0, **kv: Any) -> KvHolder:
    found = WorkerKv(**{"compat_hash": "same", "transfers": frozenset({"tcp"}), **kv})
    return KvHolder(life(node), blocks, blocks // 2, found, occupancy)


def nodes(own_blocks: int, *holders: KvHolder, kv: WorkerKv = TCP) -> list[str]:
    return [source.node for source in kv_sources(worker("me", kv=kv), own_blocks, holders)]


# ---------------------------------------------------------------------- the order


def test_the_longest_come_first_and_only_those_that_have_more():
    assert nodes(4, holder("a", 4), holder("b", 9), holder("c", 5)) == ["b", "c"]


def test_no_more_than_three():
    many = [holder(f"w{blocks}", blocks) for blocks in range(9)]
    assert nodes(0, *many) == ["w8", "w7", "w6"]
    assert len(nodes(0, *many)) == MOST_SOURCES


def test_of_equals_the_same_host_comes_first_then_the_least_loaded():
    equals = [holder("a", 5, 0.9), holder("b", 5, 0.1), holder("c", 5, 2.0, host="h1")]
    assert nodes(0, *equals) == ["c", "b", "a"]
    assert nodes(0, holder("far", 6, 2.0), *equals) == ["far", "c", "b"]
    unknown = WorkerKv(compat_hash="same", transfers=frozenset({"tcp"}))
    assert nodes(0, *equals, kv=unknown) == ["b", "a", "c"]


def test_what_cannot_be_used_or_sent_is_not_offered():
    assert nodes(0, holder("me", 9)) == []
    assert nodes(0, holder("a", 9, compat_hash="other")) == []
    assert nodes(0, holder("a", 9, transfers=frozenset({"rdma"}))) == []
    assert nodes(0, holder("a", 9, transfers=frozenset({"rdma", "tcp"}))) == ["a"]
    assert nodes(0, holder("a", 9), kv=WorkerKv(compat_hash="same")) == []


def test_a_source_says_whose_blocks_and_how_many_are_on_the_device():
    (source,) = kv_sources(worker("me", kv=TCP), 0, [holder("a", 9)])
    assert source == KvSource(NodeId("a"), 1, 9, 4)


# ---------------------------------------------------------------------- copies


def test_auto_is_half_of_the_workers_and_at_least_two():
    assert [most_copies(0, workers) for workers in (1, 4, 5, 8)] == [2, 2, 2, 4]
    assert [most_copies(setting, 100) for setting in (1, 7)] == [1, 7]


def test_a_worker_counts_as_a_copy_if_all_its_tiers_together_have_the_blocks():
    a, b, c, d = map(NodeId, "abcd")
    overlaps, lower = {a: 9, b: 3, c: 9}, {b: (5, 9), c: (9, 12), d: (0, 4)}
    assert [count_copies(blocks, overlaps, lower) for blocks in (4, 9, 10)] == [4, 3, 1]


def test_each_source_says_whether_what_it_has_may_be_kept():
    found = kv_sources(worker("me", kv=TCP), 0, [holder("a", 9), holder("b", 5)], lambda n: n > 5)
    assert [(one.node, one.retain) for one in found] == [("a", True), ("b", False)]


# ---------------------------------------------------------------------- of a decision


class World:
    """A router core whose workers have pools that a test fills."""

    def __init__(self, *listed: str, policy: Any = choose, seed: int = 1) -> None:
        config = RouterConfig(hold_work=0, predict_ttl=5.0)
        self.core = RouterCore(config, policy, Random(seed))
        self.pools: dict[str, Pool] = {}
        self.now = 0.0
        for node in listed:
            self.come(node)

    def come(self, node: str, epoch: int = 1, **changes: Any) -> None:
        self.core.worker(self.now, facts(node, epoch=epoch, kv=TCP, **changes))
        self.pools[node] = Pool(self.core.index, node, epoch)

    def tell(self, node: str, **changes: Any) -> None:
        epoch = self.pools[node].life.epoch
        self.core.worker(self.now, facts(node, epoch=epoch, kv=TCP, **changes))

    def request(self, *excluded: str, length: int = BLOCKS) -> RouteRequest:
        return replace(
            route("m", *excluded),
            prompt_tokens=32 * length + 1,
            names=names(*range(1, length + 1)),
            block_size=32,
        )

    def ask(self, *excluded: str) -> RouteDecision:
        answer = self.core.offer(self.now, life("f"), self.request(*excluded), lambda _: None)
        assert isinstance(answer, PlacedRequest)
        self.core.check()
        return answer.routed

    def sources(self, *excluded: str) -> list[tuple[str, int, int]]:
        return [(s.node, s.blocks, s.device_blocks) for s in self.ask(*excluded).kv_sources]

    def only(self, node: str) -> list[tuple[str, int, int]]:
        """The sources of a request that can go to this worker alone."""
        return self.sources(*(other for other in self.pools if other != node))


def store(pool: Pool, count: int, tier: str = "device", start: int = 1) -> None:
    pool.stored(*range(start, start + count), tier=tier, parent=block(start - 1))


def test_blocks_of_all_tiers_count_at_either_end():
    world = World("a", "b")
    world.core.load(life("a"), load(7))  # the next request goes to b
    store(world.pools["a"], 2)
    store(world.pools["a"], 3, "host", 3)
    store(world.pools["a"], 4, "disk", 6)
    store(world.pools["b"], 8)
    assert world.sources() == [("a", 9, 2)]
    store(world.pools["b"], 1, "disk", 9)
    assert world.sources() == []


def test_what_was_only_sent_there_is_no_source():
    """Its blocks are not computed yet."""
    world = World("a", "b")
    first = world.ask().worker
    world.core.load(life(first), load(8))
    assert world.sources() == []
    (other,) = world.pools.keys() - {first}
    world.now = 10.0  # what was sent is forgotten
    store(world.pools[first], BLOCKS)
    world.core.load(life(first), load(8))
    found = world.ask()
    assert (found.worker, [one.node for one in found.kv_sources]) == (other, [first])


def test_a_draining_worker_still_gives_and_one_in_doubt_does_not():
    world = World("a", "b", "c", "d", "e")
    for node, count in (("b", 4), ("c", 5), ("d", 6), ("e", 7)):
        store(world.pools[node], count)
    for node in "bcde":
        world.core.load(life(node), load(8))
    assert [node for node, _, _ in world.sources()] == ["e", "d", "c"]
    world.now += 10.0
    world.tell("e", draining=True)
    world.core.load(life("e"), load(8, ready=False))
    world.tell("d", suspect=True)
    world.tell("c", reachable=False)
    assert [node for node, _, _ in world.sources()] == ["e", "b"]
    world.now += 10.0
    world.core.load(life("b"), load(ready=False))
    world.core.gone(world.now, life("e"))
    assert world.sources() == []


def test_a_prefill_worker_gives_what_it_has():
    world = World("a")
    world.come("p", prefill=True)
    store(world.pools["p"], 6)
    assert world.sources() == [("p", 6, 6)]


def test_a_worker_that_came_back_is_named_by_its_new_life():
    world = World("a", "b")
    store(world.pools["b"], 5)
    world.core.load(life("b"), load(8))
    world.come("b", epoch=2)
    world.core.load(life("b", 2), load(8))
    assert world.sources() == []
    store(world.pools["b"], 4)
    world.now += 10.0
    (source,) = world.ask().kv_sources
    assert (source.node, source.epoch, source.blocks) == ("b", 2, 4)


def test_a_preview_tells_the_same_as_the_decision():
    world = World("a", "b")
    store(world.pools["b"], 5)
    world.core.load(life("b"), load(8))
    preview = world.core.explain(world.now, world.request())
    assert [one.node for one in preview.kv_sources] == ["b"]
    assert preview.kv_sources == world.ask().kv_sources


@dataclass
class Truth:
    """What a worker is, for the oracle."""

    epoch: int = 1
    tiers: dict[str, set[int]] = field(default_factory=dict)
    ready: bool = True
    draining: bool = False
    doubtful: bool = False

    def leading(self) -> int:
        held = set().union(*self.tiers.values())
        return next((n for n in range(BLOCKS) if n + 1 not in held), BLOCKS)


def _change(random: Random, world: World, truth: dict[str, Truth], node: str) -> None:
    """One random change of a worker."""
    one, pool = truth[node], world.pools[node]
    tier = random.choice(("device", "host", "disk"))
    numbers = range(start := random.randint(1, BLOCKS), random.randint(start, BLOCKS) + 1)
    match random.randrange(6):
        case 0 | 1 | 2:
            pool.stored(*numbers, tier=tier, parent=block(start - 1))
            one.tiers.setdefault(tier, set()).update(numbers)
        case 3:
            pool.removed(*numbers, tier=tier)
            one.tiers.setdefault(tier, set()).difference_update(numbers)
        case 4:
            one.draining, one.doubtful = random.random() < 0.2, random.random() < 0.2
            one.ready = random.random() < 0.8
            world.tell(node, draining=one.draining, suspect=one.doubtful)
            lanes = (LaneLoad("fetch", 0, 1e9, 0.001),) if random.random() < 0.5 else ()
            report = load(random.randrange(9), ready=one.ready, lanes=lanes)
            world.core.load(NodeLife(NodeId(node), one.epoch), report)
        case _:
            if random.random() < 0.2:
                truth[node] = Truth(epoch=one.epoch + 1)
                world.come(node, epoch=one.epoch + 1)


@pytest.mark.parametrize("number", range(6))
def test_sources_of_any_cluster(number: int, seed: int):
    """Against the plain rule: others that may be asked and have more, the longest first."""
    random, listed, seen = Random(seed + number), "abcdefg", 0
    world = World(*listed, policy=random_policy.choose, seed=number)
    truth = {node: Truth() for node in listed}
    for _ in range(400):
        world.now += 6.0  # what was sent is forgotten
        for _ in range(3):
            _change(random, world, truth, random.choice(listed))
        excluded = random.sample(listed, random.randrange(3))
        if not any(
            one.ready and not one.draining for node, one in truth.items() if node not in excluded
        ):
            continue
        routed = world.ask(*excluded)
        own = truth[routed.worker].leading()
        wanted = {
            node: one.leading()
            for node, one in truth.items()
            if node not in (routed.worker, *excluded)
            and not one.doubtful
            and (one.ready or one.draining)
            and one.leading() > own
        }
        found = {source.node: source.blocks for source in routed.kv_sources}
        assert found.items() <= wanted.items()
        assert sorted(wanted.values(), reverse=True)[:MOST_SOURCES] == list(found.values())
        assert all(source.epoch == truth[source.node].epoch for source in routed.kv_sources)
        seen += len(found)
    assert seen > 50
