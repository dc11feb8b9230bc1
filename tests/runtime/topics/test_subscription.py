"""Whom a node follows: members that publish, through lost links, once per life."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise

from pdserve.errors import DialRefused
from pdserve.ids import NodeId
from pdserve.runtime.topics.messages import STATE
from pdserve.runtime.topics.replicated_set import SetView
from tests.net.world import virtually
from tests.runtime.topics.world import world
from tests.support.actors import accepting
from tests.support.net_support import RecordingStreamSink

A, B = NodeId("a"), NodeId("b")


class Values:
    """What a subscriber of a state hears."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.gone: list[int] = []

    def on_value(self, member, value) -> None:
        assert member.epoch not in self.gone
        self.heard.append(value)

    def on_gone(self, member) -> None:
        self.gone.append(member.epoch)


def heard(values: Values, value: bytes) -> bool:
    return value in values.heard


@virtually
async def test_follows_whoever_publishes() -> None:
    async with world() as w:
        a, b, c = await w.add("a"), await w.add("b"), await w.add("c")
        b.topics.publish_state("load", bytes).set(b"1")
        values = Values()
        followed = a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        w.introduce()
        await w.until(lambda: values.heard == [b"1"])
        assert followed.get(B) is not None
        assert followed.get(c.id) is None
        assert a.endpoint.link(c.id) is None


@virtually
async def test_members_that_were_there_before_are_followed() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes).set(b"1")
        w.introduce()
        values = Values()
        a.topics.subscribe_state("load", bytes, values.on_value)
        await w.until(lambda: values.heard == [b"1"])


@virtually
async def test_a_topic_may_come_and_go() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        values = Values()
        followed = a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        w.introduce()
        assert followed.get(B) is None
        topic = b.topics.publish_state("load", bytes)
        w.introduce()
        topic.set(b"1")
        await w.until(lambda: values.heard == [b"1"])
        b.topics.withdraw("load")
        w.introduce()
        assert values.gone == [1]
        assert followed.get(B) is None
        await w.until(lambda: w.streams() == 0)


@virtually
async def test_gone_is_told_once_per_life() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes).set(b"old")
        values = Values()
        followed = a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        w.introduce()
        await w.until(lambda: values.heard == [b"old"])
        await w.crash("b")
        b = await w.add("b", epoch=2)
        b.topics.publish_state("load", bytes).set(b"new")
        w.introduce()
        assert values.gone == [1]
        await w.until(lambda: values.heard == [b"old", b"new"])
        followed.close()
        followed.close()
        assert values.gone == [1, 2]


@virtually
async def test_another_life_at_the_address_is_not_followed() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes).set(b"old")
        values = Values()
        a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        w.introduce()
        await w.until(lambda: values.heard == [b"old"])
        await w.crash("b")
        b = await w.add("b", epoch=2)
        b.topics.publish_state("load", bytes).set(b"new")
        await asyncio.sleep(20)
        assert values.heard == [b"old"]  # nobody has said yet that the first life is over
        w.introduce()
        await w.until(lambda: values.heard == [b"old", b"new"])


@virtually
async def test_comes_back_after_every_kind_of_loss() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        topic = b.topics.publish_state("load", bytes)
        values = Values()
        followed = a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        w.introduce()
        for value, harm in ((b"0", "reset"), (b"1", "partition"), (b"2", "abort"), (b"3", "reset")):
            topic.set(value)
            await w.until(partial(heard, values, value))
            if harm == "partition":
                w.net.partition("a", "b")
                await asyncio.sleep(10)
                w.net.heal()
            else:
                if harm == "abort":
                    (await a.link(B, timeout=1.0)).abort()
                w.net.reset("a", "b")
                w.net.reset("b", "a")
                await asyncio.sleep(1)
        topic.set(b"end")
        await w.until(lambda: values.heard[-1] == b"end")
        assert values.gone == []
        assert followed.stats()["streams"] >= 4
        assert values.heard == [b"0", b"1", b"2", b"3", b"end"]


@virtually
async def test_gone_while_dialling() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_log("log", _Nothing())
        views: list[SetView] = []
        gone: list[NodeId] = []

        def make(member):
            views.append(SetView())
            return views[-1]

        a.topics.subscribe_log("log", make, lambda member: gone.append(member.node))
        w.net.partition("a", "b")
        w.introduce()
        await asyncio.sleep(0.5)
        a.lose(B)
        assert gone == [B]
        w.net.heal()
        await asyncio.sleep(10)
        assert len(views) == 1
        assert w.streams() == 0


@virtually
async def test_backs_off_with_jitter_while_nobody_listens() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes)
        card = b.card
        await w.crash("b")
        dials = []

        async def link(node, *, timeout):
            dials.append(a.now())
            raise DialRefused("nobody listens")

        a.link = link  # type: ignore[method-assign]
        b.topics = type("Topics", (), {"names": card.topics})()
        a.topics.subscribe_state("load", bytes, lambda member, value: None)
        a.meet(b)
        await asyncio.sleep(60)
        assert 60 / 5.1 <= len(dials) <= 600
        assert len({round(later - sooner, 3) for sooner, later in pairwise(dials)}) > 5


@virtually
async def test_a_reader_that_fails_is_tried_again() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        topic = b.topics.publish_state("load", bytes)
        heard: list[bytes] = []

        def on_value(member, value) -> None:
            heard.append(value)
            if len(heard) == 1:
                raise RuntimeError("a bug")

        a.topics.subscribe_state("load", bytes, on_value)
        w.introduce()
        topic.set(b"1")
        await w.until(lambda: heard == [b"1"])
        await asyncio.sleep(10)
        topic.set(b"2")
        await w.until(lambda: heard[-1] == b"2")


@virtually
async def test_gone_while_waiting_to_try_again() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        values = Values()
        b.topics.publish_state("load", bytes).set(b"1")
        w.introduce()
        b.topics.withdraw("load")  # the card still names it
        followed = a.topics.subscribe_state("load", bytes, values.on_value, values.on_gone)
        await asyncio.sleep(5)
        a.lose(B)
        tried = followed.stats()["streams"]
        assert tried > 1
        await asyncio.sleep(20)
        assert followed.stats()["streams"] == tried
        assert (values.heard, values.gone) == ([], [1])


@virtually
async def test_a_subscription_may_close_itself() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes).set(b"1")
        gone: list[NodeId] = []

        def on_value(member, value) -> None:
            followed.close()
            raise RuntimeError("a bug")

        followed = a.topics.subscribe_state("load", bytes, on_value, lambda m: gone.append(m.node))
        w.introduce()
        await w.until(lambda: gone == [B])
        await asyncio.sleep(10)
        assert w.streams() == 0
        assert followed.stats()["streams"] == 1


@virtually
async def test_a_publisher_that_ends_is_asked_again() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")

        def opened(stream, body) -> None:
            stream.accept(RecordingStreamSink())
            stream.end()

        b.topics.publish_state("load", bytes)
        b.host(accepting(STATE, opened))
        followed = a.topics.subscribe_state("load", bytes, lambda member, value: None)
        w.introduce()
        await w.until(lambda: followed.stats()["streams"] >= 3)


@virtually
async def test_a_reader_is_live_only_with_a_stream() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_log("log", _Nothing())
        followed = a.topics.subscribe_log("log", lambda member: SetView())
        w.introduce()
        following = followed.get(B)
        assert following is not None
        await w.until(lambda: following.reader.live)
        w.net.partition("a", "b")
        await w.until(lambda: not following.reader.live)
        w.net.heal()
        await w.until(lambda: following.reader.live)
        b.topics.close()
        assert b.topics.stats() == {}
        await w.until(lambda: not following.reader.live)
        assert a.topics.stats()["followed/log"]["members"] == 1


@virtually
async def test_news_of_a_member_reach_its_follower() -> None:
    async with world() as w:
        a, b = await w.add("a"), await w.add("b")
        b.topics.publish_state("load", bytes)
        followed = a.topics.subscribe_state("load", bytes, lambda member, value: None)
        w.introduce()
        b.topics.publish_state("more", bytes)
        a.meet(b)
        following = followed.get(B)
        assert following is not None
        assert following.member == a.members[B]


@virtually
async def test_one_failing_owner_does_not_keep_the_other_members() -> None:
    async with world() as w:
        a, b, c = await w.add("a"), await w.add("b"), await w.add("c")
        gone: list[NodeId] = []

        def on_gone(member) -> None:
            gone.append(member.node)
            raise RuntimeError("a bug")

        for party in (b, c):
            party.topics.publish_state("load", bytes)
        followed = a.topics.subscribe_state("load", bytes, lambda member, value: None, on_gone)
        w.introduce()
        await w.until(lambda: followed.stats()["open"] == 2)
        followed.close()
        assert sorted(gone) == [B, c.id]


class _Nothing:
    def snapshot(self):
        return iter(())

    def digest(self) -> int:
        return 0
