"""Topics between nodes that fail: what arrives, what it costs, and that nothing is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.net.timers import Timers
from pdserve.runtime.topics.config import LogConfig, TopicsConfig
from pdserve.runtime.topics.messages import LOG, STATE, Resume, Subscribe
from pdserve.runtime.topics.replicated_set import Delta, SetView
from pdserve.runtime.topics.service import Topics
from pdserve.testing import virtual_time
from pdserve.wire.codec import encode
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.runtime.topics.wires import digest_of
from tests.runtime.topics.world import CONFIG, world
from tests.support.net_support import RecordingStreamSink, send_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.runtime.topics.replicated_set import SetLog
    from tests.runtime.topics.world import Party, World

B = NodeId("b")


def number_bytes(number: int) -> bytes:
    return b"%d" % number


class Follower:
    """Views of one set by node; each life's view is checked to end empty, and once."""

    def __init__(self, party: Party, name: str = "set") -> None:
        self.views: dict[NodeId, SetView] = {}
        self.gone: list[tuple[NodeId, int]] = []
        self.subscription = party.topics.subscribe_log(name, self.make, self.on_gone)

    def make(self, member) -> SetView:
        assert member.node not in self.views
        self.views[member.node] = SetView()
        return self.views[member.node]

    def on_gone(self, member) -> None:
        assert not self.views.pop(member.node).items
        assert (member.node, member.epoch) not in self.gone
        self.gone.append((member.node, member.epoch))

    def level(self, node: NodeId, source: SetLog) -> bool:
        """Has all that was flushed, and knows it."""
        following = self.subscription.get(node)
        if following is None or not following.reader.live:
            return False
        view = self.views[node]
        return view.items == source.items and view.digest() == source.digest()


# ---------------------------------------------------------------------- states


@virtually
async def test_a_slow_subscriber_gets_the_latest_value_only() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        topic = b.topics.publish_state("load", number_bytes)
        heard: list[int] = []
        a.topics.subscribe_state("load", int, lambda member, value: heard.append(value))
        w.introduce()
        topic.set(-1)
        await w.until(lambda: heard == [-1])
        w.net.pause("a")
        for number in range(1000):
            topic.set(number)
            await asyncio.sleep(0.001)
        w.net.resume("a")
        await w.until(lambda: heard[-1] == 999)
        assert heard == [-1, 0, 999]  # one was on its way


@virtually
async def test_an_unchanged_value_is_not_sent() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        topic = b.topics.publish_state("load", bytes)
        heard: list[bytes] = []
        a.topics.subscribe_state("load", bytes, lambda member, value: heard.append(value))
        w.introduce()
        for _ in range(10):
            topic.set(b"same")
            await asyncio.sleep(0.1)
        assert heard == [b"same"]
        assert b.topics.stats()["published/load"] == {"subscribers": 1, "values": 1}


@virtually
async def test_values_keep_their_distance() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        topic = b.topics.publish_state("load", bytes, interval=1.0)
        heard: list[tuple[float, bytes]] = []
        a.topics.subscribe_state("load", bytes, lambda m, v: heard.append((a.now(), v)))
        w.introduce()
        for number in range(50):
            topic.set(b"%d" % number)
            await asyncio.sleep(0.1)
        await w.until(lambda: heard[-1][1] == b"49")
        times = [when for when, _ in heard]
        assert all(later - sooner >= 0.99 for sooner, later in pairwise(times))
        assert 5 <= len(heard) <= 8


# ---------------------------------------------------------------------- logs


@virtually
async def test_a_set_is_followed() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source = b.topics.publish_set("set")
        source.put(b"before", b"1")
        source.flush()
        follower = Follower(a)
        w.introduce()
        await w.until(lambda: follower.level(B, source))
        source.put(b"after", b"2")
        source.drop(b"before")
        source.flush()
        await w.until(lambda: follower.views[B].items == {b"after": b"2"})
        source.put(b"nobody flushes")
        await w.until(lambda: b"nobody flushes" in follower.views[B].items)
        counters = follower.subscription.stats()
        assert (counters["snapshots"], counters["gaps"], counters["divergences"]) == (1, 0, 0)


@virtually
async def test_a_lost_link_costs_a_replay_not_a_snapshot() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source, follower = b.topics.publish_set("set"), Follower(a)
        w.introduce()
        await w.until(lambda: follower.level(B, source))
        for number in range(100):
            source.put(b"%d" % number)
            source.flush()
            if number == 50:
                w.net.reset("a", "b")
            await asyncio.sleep(0.01)
        await w.until(lambda: follower.level(B, source))
        counters = follower.subscription.stats()
        assert (counters["snapshots"], counters["replays"]) == (1, 1)
        assert counters["events"] == 100


@virtually
async def test_a_slow_reader_is_told_and_starts_over() -> None:
    async with world() as w:
        a, b, c = await w.add("a"), await w.add("b"), await w.add("c")
        source = b.topics.publish_set("set")
        slow, fast = Follower(a), Follower(c)
        w.introduce()
        await w.until(lambda: slow.level(B, source) and fast.level(B, source))
        w.net.set_conditions("b", "a", bandwidth=20_000, segment=2000)
        for number in range(600):
            source.put(b"%d" % (number % 50), b"x" * 200 + b"%d" % number)
            source.flush()
            await asyncio.sleep(0.002)
        w.net.set_conditions("b", "a", bandwidth=0)
        await w.until(lambda: slow.level(B, source))
        assert slow.subscription.stats()["lagged"] >= 1
        assert slow.subscription.stats()["gaps"] == 0
        assert fast.subscription.stats()["lagged"] == 0
        assert fast.subscription.stats()["events"] == 600
        ring = b.topics.stats()["published/set"]
        assert ring["ring_bytes"] <= CONFIG.log.ring_bytes
        assert ring["snapshots_under_way"] == 0


@virtually
async def test_a_big_set_under_change_is_taken_over() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source = b.topics.publish_set("set")
        for number in range(3000):
            source.put(b"%d" % number, b"x" * 100)
        source.flush()
        w.net.set_conditions("b", "a", bandwidth=200_000)
        follower = Follower(a)
        w.introduce()
        for number in range(200):
            source.put(b"%d" % number, b"y")
            source.drop(b"%d" % (number + 1000))
            source.flush()
            await asyncio.sleep(0.02)
        await w.until(lambda: follower.level(B, source))
        assert follower.subscription.stats()["snapshots"] == 1
        assert follower.subscription.stats()["lagged"] == 0


@virtually
async def test_a_view_that_went_wrong_is_found_and_mended() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source, follower = b.topics.publish_set("set"), Follower(a)
        source.put(b"true")
        w.introduce()
        await w.until(lambda: follower.level(B, source) and bool(source.items))
        follower.views[B].apply(encode(Delta(False, {b"false": b""})))
        await w.until(lambda: follower.level(B, source), timeout=2.0)
        assert follower.subscription.stats()["divergences"] == 1


@virtually
async def test_a_view_that_went_wrong_while_the_log_rests_is_found_by_a_recheck() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source, follower = b.topics.publish_set("set"), Follower(a)
        source.put(b"true")
        w.introduce()
        await w.until(lambda: follower.level(B, source) and bool(source.items))
        await asyncio.sleep(40.0)
        follower.subscription.recheck()
        follower.views[B].apply(encode(Delta(False, {b"false": b""})))
        await asyncio.sleep(2.0)
        assert not follower.level(B, source)
        follower.subscription.recheck()
        follower.subscription.recheck()
        await w.until(lambda: follower.level(B, source), timeout=1.0)
        follower.subscription.recheck()
        counters = follower.subscription.stats()
        assert (counters["divergences"], counters["snapshots"]) == (1, 2)


@virtually
async def test_a_restart_drops_all_of_the_old_life() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source, follower = b.topics.publish_set("set"), Follower(a)
        source.put(b"old")
        w.introduce()
        await w.until(lambda: follower.level(B, source) and bool(source.items))
        await w.crash("b")
        b = await w.add("b", epoch=2)
        source = b.topics.publish_set("set")
        source.put(b"new")
        w.introduce()
        assert follower.gone == [(B, 1)]
        assert not follower.views[B].items
        await w.until(lambda: follower.level(B, source) and bool(source.items))
        assert follower.views[B].items == {b"new": b""}


@virtually
async def test_a_log_published_anew_in_the_same_life() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        source, follower = b.topics.publish_set("set"), Follower(a)
        for number in range(5):
            source.put(b"%d" % number)
            source.flush()
        w.introduce()
        await w.until(lambda: follower.level(B, source))
        b.topics.withdraw("set")
        source = b.topics.publish_set("set")  # before anybody's card could say that it went
        for number in range(9):
            source.put(b"%d" % (number + 3))
            source.flush()
        await w.until(lambda: follower.level(B, source))
        assert follower.subscription.stats()["epochs"] == 1
        assert follower.gone == []


@virtually
async def test_persistent_divergence_does_not_run_hot() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")

        class Liar:
            def snapshot(self):
                return iter(())

            def digest(self) -> int:
                return 1

        b.topics.publish_log("set", Liar())
        follower = Follower(a)
        w.introduce()
        await asyncio.sleep(120)
        counters = follower.subscription.stats()
        assert 10 <= counters["divergences"] <= 120
        assert counters["divergences"] == counters["snapshots"]


@virtually
async def test_a_source_that_fails_harms_only_its_readers() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")

        class Broken:
            def snapshot(self):
                raise RuntimeError("a bug")

            def digest(self) -> int:
                return 0

        topic = b.topics.publish_log("set", Broken())
        follower = Follower(a)
        w.introduce()
        await asyncio.sleep(10)
        topic.append(b"goes on")
        assert follower.subscription.stats()["snapshots"] == 0
        assert b.topics.stats()["published/set"]["subscribers"] == 0


# ---------------------------------------------------------------------- bounds and manners


@virtually
async def test_more_subscribers_than_allowed_are_refused() -> None:
    async with world(config=replace(CONFIG, subscribers=1)) as w:
        a, b, c = await w.add("a"), await w.add("b"), await w.add("c")
        source = b.topics.publish_set("set")
        first = Follower(a)
        w.introduce()
        await w.until(lambda: first.level(B, source))
        second = Follower(c)
        await asyncio.sleep(10)
        assert not second.level(B, source)
        first.subscription.close()
        await w.until(lambda: second.level(B, source))


@virtually
async def test_one_name_is_one_topic() -> None:
    async with world() as w:
        a = await w.add("a")
        a.topics.publish_state("x", bytes)
        with pytest.raises(ValueError, match="already"):
            a.topics.publish_set("x")
        assert a.topics.names == ("x",)


@pytest.mark.parametrize(
    ("method", "body"),
    [
        (STATE, b"garbage"),
        (LOG, encode(Subscribe("set"))),
        (LOG, encode(Subscribe("unknown", Resume(1)))),
        (STATE, encode(Subscribe("set"))),
    ],
)
def test_bad_subscribers_are_refused(method: int, body: bytes) -> None:
    async def main() -> None:
        async with world() as w:
            a, b = await w.add("a"), await w.add("b")
            b.topics.publish_set("set")
            w.introduce()
            link = await a.link(B, timeout=5.0)
            sink = RecordingStreamSink()
            link.open_stream(method, body, sink, window=100)
            assert await sink.end() is not None
            assert b.topics.stats()["published/set"]["subscribers"] == 0

    virtual_time.run(main())


@virtually
async def test_a_subscriber_that_talks_nonsense_is_dropped() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_set("set")
        b.topics.publish_state("load", bytes)
        w.introduce()
        link = await a.link(B, timeout=5.0)
        for method, body in (
            (LOG, encode(Subscribe("set", Resume(1)))),
            (STATE, encode(Subscribe("load"))),
        ):
            sink = RecordingStreamSink()
            stream = link.open_stream(method, body, sink, window=100_000)
            await send_item(stream, b"nonsense", timeout=5.0)
            assert await sink.end() is not None
        assert b.topics.stats()["published/set"]["subscribers"] == 0


@virtually
async def test_on_real_nodes() -> None:
    async with cluster() as c:
        a, b = await c.add("a"), await c.add("b")
        timers = Timers(c.loop)
        topics = {node.id: Topics(node, timers) for node in (a, b)}
        views: list[SetView] = []
        gone: list[NodeId] = []

        def make(member) -> SetView:
            views.append(SetView())
            return views[-1]

        topics[a.id].subscribe_log("set", make, lambda member: gone.append(member.node))
        source = topics[b.id].publish_set("set")
        b.publish_card(NodeCard(topics=topics[b.id].names), {})
        source.put(b"key", b"value")
        await c.until(lambda: bool(views) and views[0].items == {b"key": b"value"})
        await c.crash("b")
        await c.until(lambda: gone == [B])
        assert not views[0].items
        for one in topics.values():
            one.close()
        timers.close()


# ---------------------------------------------------------------------- everything at once

SECONDS = 30.0
"""Of virtual time under faults."""


class Chaos:
    """Three publishers of a set and a state, who all follow each other, on a bad network."""

    def __init__(self, w: World, rng: random.Random) -> None:
        self.w = w
        self.random = rng
        self.epochs = dict.fromkeys("abc", 1)
        self.sources: dict[str, SetLog] = {}
        self.set_load: dict[str, Callable[[int], None]] = {}
        self.followers: dict[str, Follower] = {}
        self.heard: dict[tuple[str, str], int] = {}
        self.serial = 0

    async def start(self, name: str) -> None:
        party = await self.w.add(name, self.epochs[name])
        self.sources[name] = party.topics.publish_set("set")
        load = party.topics.publish_state("load", number_bytes)
        self.set_load[name] = load.set
        self.followers[name] = Follower(party)

        def on_value(member, value) -> None:
            key = name, f"{member.node}/{member.epoch}"
            assert value > self.heard.get(key, -1), "values went back"
            self.heard[key] = value

        party.topics.subscribe_state("load", int, on_value)

    def work(self) -> None:
        for name, source in self.sources.items():
            for _ in range(self.random.choice((0, 1, 3))):
                self.serial += 1
                key = b"%d" % self.random.randrange(40)
                if self.random.random() < 0.3:
                    source.drop(key)
                else:
                    source.put(key, b"%d" % self.serial + b"." * self.random.choice((0, 300)))
                if self.random.random() < 0.02:
                    source.clear()
                if self.random.random() < 0.7:
                    source.flush()
            self.serial += 1
            self.set_load[name](self.serial)

    async def harm(self) -> None:
        one, other = self.random.sample("abc", 2)
        net = self.w.net
        what = self.random.choice(
            ("reset", "reset", "inside", "partition", "pause", "slow", "restart", "rest")
        )
        if what == "reset":
            net.reset(one, other)
            net.reset(other, one)
        elif what == "inside":
            net.reset_after(one, other, self.random.randrange(2000))
        elif what == "partition":
            net.partition(one, other, one_way=self.random.random() < 0.5)
        elif what == "pause":
            net.pause(one)
        elif what == "slow":
            net.set_conditions(one, other, bandwidth=self.random.choice((500, 5000)))
        elif what == "restart":
            net.resume(one)
            await self.w.crash(one)
            self.epochs[one] += 1
            await self.start(one)
            self.w.introduce()
        for _ in range(self.random.choice((5, 50))):
            self.work()
            await asyncio.sleep(self.random.uniform(0, 0.05))
        if self.random.random() < 0.7:
            self.mend()

    def mend(self) -> None:
        self.w.net.heal()
        self.w.net.set_conditions(bandwidth=0)
        for name in "abc":
            self.w.net.resume(name)

    def level(self) -> bool:
        for one in "abc":
            for other in "abc":
                if one != other and not self.followers[one].level(
                    NodeId(other), self.sources[other]
                ):
                    return False
        return True

    async def run(self) -> None:
        for name in "abc":
            await self.start(name)
        self.w.introduce()
        end = self.w.loop.time() + SECONDS
        while self.w.loop.time() < end:
            await self.harm()
        self.mend()
        for source in self.sources.values():
            source.flush()
        await self.w.until(self.level, timeout=120.0)
        latest = {name: self.serial for name in "abc"}
        for name in "abc":
            self.set_load[name](self.serial + 1)
        await self.w.until(
            lambda: all(
                self.heard.get((one, f"{other}/{self.epochs[other]}")) == latest[other] + 1
                for one in "abc"
                for other in "abc"
                if one != other
            )
        )
        for name, follower in self.followers.items():
            for view in follower.views.values():
                assert view.digest() == digest_of(view.items)
            counters = self.w.parties[name].topics.stats()["followed/set"]
            assert counters["divergences"] == counters["gaps"] == 0


def course(seed: int) -> None:
    async def main() -> None:
        config = TopicsConfig(log=LogConfig(ring_bytes=8_000, ring_events=60, healthy=5.0))
        async with world(seed, config) as w:
            await Chaos(w, random.Random(seed)).run()

    try:
        virtual_time.run(main())
    except BaseException as error:
        error.add_note(f"course({seed})")
        raise


@pytest.mark.timeout(1800)
def test_all_agree_after_any_faults(seed: int, long: bool) -> None:
    for number in range(40 if long else 3):
        course(seed + number)
