"""Decisions where workers have tiers below the device, and fetch from each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace as replaced

from pdserve.ids import NodeId
from pdserve.messages.request import FirstTokenStats
from pdserve.messages.tiers import LaneLoad
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.predictor import Predictor
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies.base import WorkerKv
from pdserve.router.policies.random import choose as anyone
from pdserve.router.policies.ttft import Ttft
from tests.router.prefix_index.support import Pool, names
from tests.router.support import booked, facts, life, load, route
from tests.support.records import replace

if TYPE_CHECKING:
    from pdserve.router.bookings import Booking
    from pdserve.router.policies.base import Policy

MODEL = LatencyModel(0.01, 1e-4, 1e-9, 0.01, 1e-4, 1e-8, fitted=True)
KV = WorkerKv("h", "k", frozenset({"tcp"}), 4_000_000)
LANES = (
    LaneLoad("h2d", 0, 20e9, 0.0001),
    LaneLoad("disk_read", 0, 2e9, 0.001),
    LaneLoad("fetch", 0, 5e9, 0.002),
)
BLOCK = 32


class Known(Predictor):
    """Knows the time of everything."""

    def model(self, name: str) -> LatencyModel:
        return MODEL


@dataclass
class Answer:
    booking: Booking
    worker: str
    overlap: int
    predicted: float
    sources: list[str]


class World:
    """A core with workers whose prompts take their time."""

    def __init__(
        self,
        *listed: str,
        kv: WorkerKv = KV,
        lanes: tuple[LaneLoad, ...] = LANES,
        tolerance: float = 0.0,
        policy: Policy | None = None,
    ):
        self.now, self.lanes = 10.0, lanes
        config = RouterConfig(hold_work=0, predict_ttl=1.0)
        policy = policy or Ttft(explore=0, tolerance=tolerance)
        clock = lambda: self.now  # noqa: E731
        self.core = RouterCore(config, policy, Random(1), clock=clock, predictor=Known())
        self.pools: dict[str, Pool] = {}
        for node in listed:
            self.core.worker(self.now, facts(node, kv=kv))
            self.pools[node] = Pool(self.core.index, node)
            self.report(node)

    def report(self, node: str, lanes: tuple[LaneLoad, ...] | None = None) -> None:
        lanes = self.lanes if lanes is None else lanes
        self.core.load(life(node), load(max_sequences=256, lanes=lanes), self.now)

    def has(self, node: str, group: int, count: int, tier: str = "device", start: int = 0) -> None:
        first = 1000 * group + start
        self.pools[node].stored(*range(first + 1, first + count + 1), tier=tier)

    def request(self, group: int = 1, blocks: int = 250, tail: int = 0, **fields: Any) -> Any:
        """`tail`: number of the first of ten last blocks that are its own."""
        first = 1000 * group + 1
        listed = names(*range(first, first + blocks))
        if tail:
            listed = listed[:-80] + names(*range(tail, tail + 10))
        fields = {
            "prompt_tokens": blocks * BLOCK + 5,
            "names": listed,
            "block_size": BLOCK,
        } | fields
        return replaced(route(), **fields)

    def ask(self, group: int = 1, blocks: int = 250, **fields: Any) -> Answer:
        request = self.request(group, blocks, **fields)
        answer = self.core.offer(self.now, life("f"), request, lambda _: None)
        assert isinstance(answer, PlacedRequest)
        self.core.check()
        routed = answer.routed
        assert routed.predicted_ttft is not None
        sources = [source.node for source in routed.kv_sources]
        return Answer(
            answer.booking, routed.worker, routed.overlap_blocks, routed.predicted_ttft, sources
        )


def whole(cached: int = 0, blocks: int = 250) -> float:
    return MODEL.prefill(blocks * BLOCK + 5, cached * BLOCK)


# ---------------------------------------------------------------------- where to


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prompt_goes_to_the_tier_that_has_its_prefix(tier: str):
    world = World("a", "b", "c", lanes=LANES[:2])
    world.has("b", 1, 200, tier)
    found = world.ask()
    assert (found.worker, found.overlap) == ("b", 200)
    assert whole(200) < found.predicted < whole()


def test_the_device_is_better_than_the_host_and_the_host_than_the_disk():
    for tiers, best in (
        (("disk", "host"), "b"),
        (("host", "device"), "b"),
        (("disk", "device"), "b"),
    ):
        world = World("a", "b", lanes=LANES[:2])
        for node, tier in zip("ab", tiers, strict=True):
            world.has(node, 1, 200, tier)
        assert world.ask().worker == best


def test_a_tier_that_takes_longer_than_to_compute_attracts_nothing():
    slow = (LaneLoad("h2d", 0, 20e9), LaneLoad("disk_read", 0, 1e8))
    world = World("a", "b", lanes=slow, tolerance=0.02)
    world.has("b", 1, 200, "disk")
    placed: Counter[str] = Counter()
    for _ in range(20):
        found = world.ask()
        placed[found.worker] += 1
        assert found.booking.cached_tokens == 0
        world.core.bookings.release(found.booking.id)
        world.now += 5.0
    assert min(placed.values()) >= 3


def test_what_a_tier_saves_is_no_work_but_its_way_up_is_bytes():
    world = World("a", lanes=LANES[:2])
    world.has("a", 1, 100)
    world.has("a", 1, 60, "host", 100)
    world.has("a", 1, 40, "disk", 160)
    found = world.ask()
    assert found.booking.cached_tokens == 200 * BLOCK
    assert found.booking.work == round(1e6 * whole(200))
    assert dict(found.booking.lanes) == {"h2d": 400_000_000, "disk_read": 160_000_000}


def test_another_workers_prefix_is_fetched_where_the_queue_is_shorter():
    world = World("a", "b")
    world.has("b", 1, 240)
    world.core.bookings.peer_up(life("r"))
    world.core.bookings.peer_placed(life("r"), booked(5, life("b"), prompt_tokens=30_000))
    found = world.ask()
    assert (found.worker, found.sources, found.overlap) == ("a", ["b"], 0)
    assert found.booking.cached_tokens == 240 * BLOCK
    assert dict(found.booking.lanes) == {"fetch": 960_000_000}
    assert found.predicted == pytest.approx(0.002 + 0.96 / 5 + whole(240))


# ---------------------------------------------------------------------- many at once


def test_bytes_of_a_decision_count_for_the_next_one_at_once():
    world = World("a", lanes=LANES[:2])
    world.has("a", 1, 200, "host")
    world.has("a", 2, 200, "host")
    first, second = world.ask(1), world.ask(2)
    alone = 0.8 / 20
    assert second.predicted - first.predicted >= min(alone, whole(200)) * 0.5
    (view,) = world.core.pool.view(world.now, "m").sound
    assert view.kv.lanes["h2d"].backlog == 1_600_000_000
    for answer in (first, second):
        world.core.holds(world.now, life("a"), answer.booking.id, None)
    world.report("a", (LaneLoad("h2d", 700, 20e9),))
    (view,) = world.core.pool.view(world.now, "m").sound
    assert view.kv.lanes["h2d"].backlog == 700
    assert set(view.kv.lanes) == {"h2d"}


def test_a_new_worker_that_could_fetch_all_does_not_get_all():
    """Prompts of many conversations, each of which another worker has."""
    world = World("a", "b", "c", "new")
    for group in range(60):
        world.has("abc"[group % 3], group, 240)
    placed: Counter[str] = Counter()
    for group in range(60):
        placed[world.ask(group).worker] += 1
        world.now += 0.005
    assert 1 <= placed["new"] <= 20, placed


def test_one_host_tier_does_not_get_everything_either():
    """All prompts begin with what one worker has on its host."""
    world = World(*"abcd", lanes=LANES[:2])
    world.has("a", 1, 240, "host")
    placed = Counter(world.ask(1, tail=10_000 + 10 * n).worker for n in range(120))
    assert placed["a"] < 60, placed
    assert len(placed) == 4


# ---------------------------------------------------------------------- without tiers


@pytest.mark.parametrize("policy", [Ttft(), anyone])
def test_decisions_without_lanes_are_those_of_workers_that_move_nothing(policy: Policy, seed: int):
    """Of two clusters with the same history, one says by which backends its workers move KV. Then
    requests get sources, and nothing else changes."""
    random, sourced = Random(seed), 0
    with_kv = World(*"abcd", lanes=(), policy=policy)
    without = World(*"abcd", kv=WorkerKv(), lanes=(), policy=policy)
    for _ in range(150):
        group, blocks, node = random.randrange(4), random.randint(1, 300), random.choice("abcd")
        gap = random.random() * 0.05
        answers = []
        for world in (with_kv, without):
            world.now += gap
            if world.now % 0.3 < 0.15:
                world.has(node, group, blocks)
            answers.append(world.ask(group, blocks))
        one, other = answers
        sourced += bool(one.sources)
        assert replace(one, sources=[]) == replace(other, sources=[])
        assert other.sources == []
        for world, answer in zip((with_kv, without), answers, strict=True):
            if group < 2:
                world.core.holds(
                    world.now,
                    answer.booking.worker,
                    answer.booking.id,
                    FirstTokenStats(0, 0.0, 0.1, 0.1),
                )
    assert sourced > 10 or policy is not anyone


# ---------------------------------------------------------------------- explained


def test_a_preview_shows_blocks_by_source_and_seconds_of_each_worker():
    world = World("a", "b", "c")
    world.has("a", 1, 100)
    world.has("a", 1, 50, "host", 100)
    world.has("b", 1, 220)
    preview = world.core.explain(world.now, world.request())
    shown = {one.worker: one for one in preview.candidates}
    assert shown[NodeId("a")].sources == {"device": 100, "host": 50, "peer": 70}
    assert shown[NodeId("b")].sources == {"device": 220}
    assert shown[NodeId("c")].sources == {"peer": 220}
    terms = shown[NodeId("c")].terms
    assert terms["onboard"] > 0.0
    assert terms["prefill"] == pytest.approx(whole(220))
    assert preview.worker == "b"
    assert preview.kv_sources == ()
    without = World("a", lanes=())
    without.has("a", 1, 7)
    assert without.core.explain(10.0, without.request()).candidates[0].sources == {"device": 7}


# ---------------------------------------------------------------------- stale reports


def streams(world: World, node: str, running: int, age: float = 0.0) -> None:
    """A worker's report: so many streams, of 2,000 tokens each, some time ago."""
    world.core.load(
        life(node),
        load(running, max_sequences=256, lanes=LANES, kv_tokens=2000 * running),
        world.now - age,
    )


@pytest.mark.parametrize("age", [0.0, 0.3, 2.0])
def test_the_next_turn_goes_where_the_last_one_was_though_the_report_still_has_it(age: float):
    """The turn's stream is counted at the owner, and an idle neighbour could fetch in 2 ms."""
    near = (*LANES[:2], LaneLoad("fetch", 0, 1e12, 0.002))
    world = World("a", "b", lanes=near)
    world.has("b", 1, 40)
    streams(world, "b", 1, age)
    assert world.ask(1, 41).worker == "b"


def test_an_owner_that_is_busy_by_its_bookings_is_left_all_the_same():
    world = World("a", "b")
    world.has("b", 1, 240)
    streams(world, "b", 1)
    world.core.bookings.peer_up(life("r"))
    world.core.bookings.peer_placed(life("r"), booked(5, life("b"), prompt_tokens=30_000))
    assert world.ask().worker == "a"


def test_the_older_a_report_is_the_more_a_fetch_has_to_gain():
    terms = []
    for age in (0.0, 1.0, 5.0, 500.0):
        world = World("a", "b")
        world.has("b", 1, 200)
        streams(world, "b", 8, age)
        preview = world.core.explain(world.now, world.request())
        (found,) = [one.terms["fetch"] for one in preview.candidates if one.worker == "a"]
        terms.append(found)
    assert 0.01 < terms[0] < terms[1] < terms[2] <= terms[3]
    world = World("a", "b")
    world.has("b", 1, 200)
    preview = world.core.explain(world.now, world.request())
    idle = [one.terms["fetch"] for one in preview.candidates if one.worker == "a"]
    assert idle == [0.01], "the report of an idle owner overstates nothing"


# ---------------------------------------------------------------------- copies


def test_copies_follow_demand_up_to_a_bound():
    """Bursts of requests for one prefix: the workers beyond the bound are told to let go of it."""
    world, kept = World(*"abcdef"), {"a"}
    world.has("a", 1, 240)
    let_go = 0
    for _ in range(300):
        request = world.request(1)
        answer = world.core.offer(world.now, life("f"), request, lambda _: None)
        assert isinstance(answer, PlacedRequest)
        routed = answer.routed
        for source in routed.kv_sources:
            if source.retain and routed.worker not in kept:
                kept.add(routed.worker)
                world.has(routed.worker, 1, 240)
            let_go += not source.retain
        world.now += 0.001
    assert len(kept) == 3, kept
    assert let_go > 0, "the load was too low to say anything"
    numbers = world.core.numbers
    assert numbers.copies_kept == 2
    assert numbers.copies_let_go >= 1


def test_without_a_shortage_of_workers_that_have_it_they_are_preferred():
    placed: list[set[str]] = []
    for copies in (1, 2):
        world = World(*"abcd")
        for node in "ab"[:copies]:
            world.has(node, 1, 240)
        found = set()
        for _ in range(12):
            answer = world.ask()
            found.add(answer.worker)
            world.core.bookings.release(answer.booking.id)
            world.now += 10.0
        placed.append(found)
    assert placed == [{"a"}, {"a", "b"}]


def test_a_conversation_that_only_one_worker_has_is_moved_with_all_of_it():
    world = World(*"abcd")
    for node in "abc":
        world.has(node, 1, 100)
    world.has("a", 1, 140, start=100)
    preview = world.core._sources(
        request := world.request(),
        state := world.core._state(world.now, request),
        next(view for view in state.workers if view.node == "d"),
    )
    assert [(one.node, one.blocks, one.retain) for one in preview] == [
        ("a", 240, True),
        ("b", 100, False),
        ("c", 100, False),
    ]
