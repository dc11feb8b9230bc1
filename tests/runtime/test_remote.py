"""Actors of other nodes: the same promises over links that break and nodes that die."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.errors import (
    ActorFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    LinkLost,
    NoActor,
    Overloaded,
    PdserveError,
    ProtocolError,
)
from pdserve.ids import NodeId
from pdserve.runtime.actors import Actors, LocalRef
from pdserve.runtime.mailbox import Policy
from pdserve.runtime.ref import ActorRef, Address, Contract
from pdserve.runtime.remote import RemoteActors
from pdserve.testing import virtual_time
from tests.net.world import virtually
from tests.runtime.actors import (
    BOOK,
    OTHER,
    Add,
    Book,
    Count,
    Crash,
    Get,
    Message,
    Refuse,
    Sleep,
    Total,
)
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.runtime.node import Node
    from pdserve.runtime.ref import Terminated
    from tests.runtime.cluster import Cluster

T = 10.0


class Two:
    """Actors on the nodes `a` and `b`."""

    def __init__(self, nodes: Cluster, a: Node, b: Node) -> None:
        self.nodes = nodes
        self.a, self.b = a, b
        self.at_a, self.at_b = Actors(a), Actors(b)
        self.remote_a = RemoteActors(a, self.at_a)
        self.remote_b = RemoteActors(b, self.at_b)

    async def book(self, book: Book | None = None, name: str = "book") -> ActorRef:
        """An actor at `b`, seen from `a`."""
        cell = await self.at_b.start(book or Book(), name, timeout=T)
        return self.remote_a.ref(BOOK, cell.ref.address)

    def at(self, name: str) -> ActorRef:
        return self.remote_a.ref(BOOK, Address(self.b.id, self.b.epoch, name))

    async def quiet(self) -> None:
        """Nothing is under way between the two."""
        link = self.a.link_nowait(self.b.id)
        back = self.b.link_nowait(self.a.id)
        assert link is not None
        assert back is not None

        def over() -> bool:
            states = [link.statistics(), back.statistics()]
            return all(s.pending == s.serving == s.streams == s.granted == 0 for s in states)

        await self.nodes.until(over)


@asynccontextmanager
async def two() -> AsyncIterator[Two]:
    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        made = Two(nodes, a, b)
        yield made
    assert made.remote_a.watches == 0
    assert len(made.at_a) == len(made.at_b) == 0


# ---------------------------------------------------------------------- ask and tell


@virtually
async def test_tell_and_ask() -> None:
    async with two() as t:
        ref = await t.book()
        await ref.connect(timeout=T)
        for number in range(10):
            ref.tell(Add(number))
        assert await ref.ask(Get(), timeout=T) == Total(45)
        assert await ref.ask(Sleep(0.0), timeout=T) is None
        assert await t.at("book").ask(Get(), timeout=T) == Total(45), "by name"
        await t.quiet()


@virtually
async def test_a_ref_to_an_actor_here_is_local() -> None:
    async with two() as t:
        cell = await t.at_a.start(Book(), "book", timeout=T)
        ref = t.remote_a.ref(BOOK, cell.ref.address)
        assert isinstance(ref, LocalRef)
        assert await ref.ask(Add(1), timeout=T) == Total(1)


@virtually
async def test_errors_keep_their_meaning() -> None:
    async with two() as t:

        class Small(Book):
            policy = Policy(bound=1)

        ref = await t.book(Small())
        with pytest.raises(InvalidRequest, match="no thanks"):
            await ref.ask(Refuse(), timeout=T)
        busy = asyncio.ensure_future(ref.ask(Sleep(1.0), timeout=T))
        await asyncio.sleep(0.5)
        waiting = asyncio.ensure_future(ref.ask(Get(), timeout=T))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await ref.ask(Get(), timeout=T)
        assert await waiting == Total(0)
        await busy
        other = await t.book(name="other")
        crash = asyncio.ensure_future(other.ask(Crash(), timeout=T))
        behind = asyncio.ensure_future(other.ask(Get(), timeout=T))
        with pytest.raises(ActorFailed):
            await crash
        with pytest.raises(NoActor):
            await behind
        with pytest.raises(NoActor, match="no actor named other"):
            await other.ask(Get(), timeout=T)


@virtually
async def test_nobody_at_the_address() -> None:
    async with two() as t:
        old = await t.book()
        await t.at_b.find("book").stop(timeout=T)
        await t.book()
        with pytest.raises(NoActor, match="a later one"):
            await old.ask(Get(), timeout=T)
        address = Address(t.b.id, t.b.epoch, "book")
        with pytest.raises(NoActor, match="no other"):
            await t.remote_a.ref(OTHER, address).ask(Get(), timeout=T)
        earlier = Address(t.b.id, t.b.epoch - 1, "book")
        with pytest.raises(NoActor, match="later life"):
            await t.remote_a.ref(BOOK, earlier).ask(Get(), timeout=T)
        later = Address(t.b.id, t.b.epoch + 1, "book")
        with pytest.raises(LinkLost) as lost:
            await t.remote_a.ref(BOOK, later).ask(Get(), timeout=T)
        assert not lost.value.sent
        nowhere = t.remote_a.ref(BOOK, Address(NodeId("nowhere"), 1, "book"))
        for attempt in (nowhere.ask(Get(), timeout=T), nowhere.connect(timeout=T)):
            with pytest.raises(LinkError) as error:
                await attempt
            assert not error.value.sent
        with pytest.raises(LinkLost) as lost:
            nowhere.tell(Get())
        assert not lost.value.sent


@virtually
async def test_tells_that_nobody_takes_are_counted() -> None:
    async with two() as t:
        ref = t.at("nobody")
        await ref.connect(timeout=T)
        ref.tell(Add(1))
        await t.nodes.until(lambda: t.remote_b.dead_letters == 1)


@virtually
async def test_what_cannot_be_decoded_is_the_senders_fault() -> None:
    async with two() as t:
        await t.book()

        class Odd(msgspec.Struct, frozen=True, array_like=True, tag="odd"):
            pass

        wrong: Contract[Odd, Total] = Contract("book", Odd, Total)
        ref = t.remote_a.ref(wrong, Address(t.b.id, t.b.epoch, "book"))
        with pytest.raises(ProtocolError, match="not a"):
            await ref.ask(Odd(), timeout=T)
        strange: Contract[Message, Odd] = Contract("book", Message, Odd)
        other = t.remote_a.ref(strange, Address(t.b.id, t.b.epoch, "book"))
        with pytest.raises(ProtocolError):
            await other.ask(Get(), timeout=T)


@virtually
async def test_an_answer_that_cannot_travel_ends_the_actor() -> None:
    async with two() as t:

        class Loose(Book):
            async def receive(self, message):
                return object()

        ref = await t.book(Loose())
        with pytest.raises(ActorFailed):
            await ref.ask(Get(), timeout=T)


@virtually
async def test_a_cancelled_or_late_ask_is_taken_back_over_there() -> None:
    async with two() as t:
        book = Book()
        ref = await t.book(book)
        mailbox = t.at_b.find("book").mailbox
        busy = asyncio.ensure_future(ref.ask(Sleep(8.0), timeout=T))
        await asyncio.sleep(0.1)
        cancelled = asyncio.ensure_future(ref.ask(Add(1), timeout=T))
        late = asyncio.ensure_future(ref.ask(Add(10), timeout=2.0))
        kept = asyncio.ensure_future(ref.ask(Add(100), timeout=T))
        await t.nodes.until(lambda: len(mailbox) == 3)
        cancelled.cancel()
        await t.nodes.until(lambda: len(mailbox) == 2)
        with pytest.raises(DeadlineExceeded):
            await late
        await t.nodes.until(lambda: len(mailbox) == 1)
        await asyncio.wait({busy, kept})
        assert book.total == 100
        await t.quiet()


@virtually
async def test_a_lost_link_says_that_the_message_may_have_been_handled() -> None:
    async with two() as t:
        ref = await t.book()
        ask = asyncio.ensure_future(ref.ask(Sleep(5.0), timeout=T))
        await asyncio.sleep(1.0)
        t.nodes.world.reset("a", "b")
        with pytest.raises(LinkLost) as lost:
            await ask
        assert lost.value.sent
        assert await ref.ask(Get(), timeout=T) == Total(0), "over the next link"


@virtually
async def test_no_link_in_time_is_known_not_to_have_been_sent() -> None:
    async with two() as t:
        ref = await t.book()
        t.nodes.world.partition("a", "b")
        t.nodes.world.reset("a", "b")
        await t.nodes.until(lambda: t.a.link_nowait(t.b.id) is None)
        with pytest.raises(LinkError) as late:
            await ref.ask(Get(), timeout=0.2)
        assert not late.value.sent


@virtually
async def test_death_ends_what_waits_for_the_node() -> None:
    async with two() as t:
        ref = await t.book()
        loop = asyncio.get_running_loop()
        ask = asyncio.ensure_future(ref.ask(Sleep(1e5), timeout=1e5))
        await asyncio.sleep(1.0)
        await t.nodes.crash("b")
        before = loop.time()
        with pytest.raises(LinkLost):
            await ask
        assert loop.time() - before < 60.0, "not at its deadline"
        with pytest.raises(LinkError) as error:
            await ref.ask(Get(), timeout=5.0)
        assert not error.value.sent


# ---------------------------------------------------------------------- watch


@virtually
async def test_a_watch_fires_once_for_every_kind_of_end() -> None:
    async with two() as t:
        stopped, crashed = await t.book(name="stopped"), await t.book(name="crashed")
        heard: list[Terminated] = []
        for ref in (stopped, crashed, t.at("nobody")):
            ref.watch(heard.append)
        never: list[Terminated] = []
        cancelled = stopped.watch(never.append)
        await asyncio.sleep(1.0)
        cancelled.cancel()
        assert [one.address.name for one in heard] == ["nobody"]
        await t.at_b.find("stopped").stop(timeout=T)
        await crashed.connect(timeout=T)
        crashed.tell(Crash())
        await t.nodes.until(lambda: len(heard) == 3)
        assert [(one.address.name, one.failed) for one in heard[1:]] == [
            ("stopped", False),
            ("crashed", True),
        ]
        stopped.watch(heard.append)
        await asyncio.sleep(5.0)
        assert len(heard) == 4, "also when it is over already"
        assert never == []
        assert t.remote_a.watches == 0
        await t.quiet()


@virtually
async def test_a_watch_outlives_its_links() -> None:
    async with two() as t:
        ref = await t.book()
        heard: list[Terminated] = []
        ref.watch(heard.append)
        for _ in range(5):
            await asyncio.sleep(1.0)
            t.nodes.world.reset("a", "b")
        await asyncio.sleep(6.0)
        assert heard == []
        assert t.at_b.find("book").watchers == 1, "the ones over lost links are forgotten"
        ref.watch(heard.append).cancel()
        other = ref.watch(heard.append)
        await asyncio.sleep(1.0)
        assert t.at_b.find("book").watchers == 2
        other.cancel()
        await t.nodes.until(lambda: t.at_b.find("book").watchers == 1)
        t.nodes.world.reset("a", "b")
        await t.at_b.find("book").stop(timeout=T)  # ended while there was no link
        await t.nodes.until(lambda: bool(heard))
        await asyncio.sleep(60.0)
        assert len(heard) == 1
        await t.quiet()


@virtually
async def test_a_watch_fires_once_when_the_node_dies_and_when_it_never_was() -> None:
    async with two() as t:
        ref = await t.book()
        heard: list[Terminated] = []
        ref.watch(heard.append)
        await asyncio.sleep(1.0)
        await t.nodes.crash("b")
        await t.nodes.until(lambda: bool(heard), 120.0)
        assert heard[0].failed
        ref.watch(heard.append)
        await asyncio.sleep(60.0)
        assert len(heard) == 2
        assert t.remote_a.watches == 0


@virtually
async def test_a_watch_fires_when_the_node_comes_back_in_another_life() -> None:
    async with two() as t:
        ref = await t.book()
        heard: list[Terminated] = []
        ref.watch(heard.append)
        await asyncio.sleep(1.0)
        await t.nodes.crash("b")
        again = await t.nodes.add("b")
        actors = Actors(again)
        RemoteActors(again, actors)
        await actors.start(Book(), "book", timeout=T)
        await t.nodes.until(lambda: bool(heard), 120.0)
        await t.nodes.until(t.nodes.converged)
        with pytest.raises(NoActor, match="later life"):
            await ref.ask(Get(), timeout=T)
        new = t.remote_a.ref(BOOK, Address(again.id, again.epoch, "book"))
        assert await new.ask(Get(), timeout=T) == Total(0)
        ref.watch(heard.append)
        await asyncio.sleep(60.0)
        assert len(heard) == 2


@virtually
async def test_a_partition_ends_the_life_that_others_knew() -> None:
    """Both sides hold the other for dead; afterwards the actor is there, at a new address."""
    async with two() as t:
        ref = await t.book()
        heard: list[Terminated] = []
        ref.watch(heard.append)
        ask = asyncio.ensure_future(ref.ask(Sleep(1e5), timeout=1e5))
        await asyncio.sleep(1.0)
        t.nodes.world.partition("a", "b")
        await t.nodes.until(lambda: bool(heard), 120.0)
        with pytest.raises(LinkLost):
            await ask
        t.nodes.world.heal()
        await t.nodes.until(lambda: t.nodes.converged() and max(t.a.lives, t.b.lives) > 1, 120.0)
        await asyncio.sleep(60.0)
        assert len(heard) == 1
        found = t.at_b.find("book").ref.address
        assert (found.uid, found.epoch) == (ref.address.uid, t.b.epoch)


@virtually
async def test_leaving_is_an_end_but_no_failure() -> None:
    async with two() as t:
        ref = await t.book()
        heard: list[Terminated] = []
        ref.watch(heard.append)
        await asyncio.sleep(1.0)
        await t.b.leave()
        await t.nodes.until(lambda: bool(heard))
        assert not heard[0].failed


@virtually
async def test_an_actor_that_ends_takes_its_remote_watches_along() -> None:
    async with two() as t:
        ref = await t.book()
        book = Book()
        watcher = await t.at_a.start(book, "watcher", timeout=T)
        book.context.watch(ref, lambda terminated: Add(1))
        await asyncio.sleep(1.0)
        assert t.remote_a.watches == 1
        await watcher.stop(timeout=T)
        assert t.remote_a.watches == 0
        await t.quiet()


# ---------------------------------------------------------------------- everything at once


def test_whatever_happens_everything_ends_once_and_nothing_is_left(seed: int, long: bool) -> None:
    """Asks, streams and watches at random, cancelled at random, over links that break at random,
    to actors that stop, crash and come back."""
    for round in range(30 if long else 5):
        virtual_time.run(_storm(seed + round))


async def _storm(seed: int) -> None:
    random = Random(seed)
    async with two() as t:
        fired: list[int] = []
        work: list[asyncio.Task[None]] = []
        watched = 0

        def hear(number: int, terminated: Terminated) -> None:
            fired.append(number)

        async def ask(name: str) -> None:
            message = random.choice([Add(1), Get(), Refuse(), Sleep(random.random())])
            with suppress(PdserveError):
                await t.at(name).ask(message, timeout=random.uniform(0.1, 3.0))

        async def read(name: str) -> None:
            message = Count(random.randrange(50), keep=random.random() < 0.5)
            with suppress(PdserveError):
                stream = t.at(name).stream(message, timeout=1.0, window=random.randrange(1, 3000))
                async with stream as items:
                    async for item in items:
                        if item.number == 30:
                            break

        def change(name: str) -> None:
            if name not in t.at_b.names():
                t.at_b.spawn(Book(), name)
            elif random.random() < 0.5:
                t.at_b.find(name).close(drain=random.random() < 0.5)
            else:
                with suppress(PdserveError):
                    t.at_b.find(name).ref.tell(Crash())

        for _ in range(150):
            name = random.choice(["x", "y", "z"])
            what = random.randrange(10)
            if what < 3:
                work.append(asyncio.ensure_future(ask(name)))
            elif what < 6:
                work.append(asyncio.ensure_future(read(name)))
            elif what < 7:
                t.at(name).watch(partial(hear, watched))
                watched += 1
            elif what < 8:
                random.choice(work or [asyncio.ensure_future(asyncio.sleep(0))]).cancel()
            elif what < 9:
                change(name)
            elif random.random() < 0.3:
                t.nodes.world.reset("a", "b")
            await asyncio.sleep(random.random() * 0.1)
        if work:
            await asyncio.wait(work)
        for name in t.at_b.names():
            await t.at_b.find(name).stop(timeout=T)
        await t.nodes.until(lambda: t.remote_a.watches == 0)
        assert sorted(fired) == list(range(watched))
        await t.at("x").connect(timeout=T)
        await t.quiet()


# ---------------------------------------------------------------------- stream


@virtually
async def test_a_stream_delivers_all_and_ends() -> None:
    async with two() as t:
        ref = await t.book()
        for window in (1, 1000, 16384):
            async with ref.stream(Count(200), timeout=T, window=window) as items:
                assert [item.number async for item in items] == list(range(200))
        await t.quiet()


@virtually
async def test_a_slow_reader_holds_the_actor_back() -> None:
    async with two() as t:
        book = Book()
        ref = await t.book(book)
        async with ref.stream(Count(1000), timeout=T, window=2000) as items:
            await asyncio.sleep(1.0)
            link = t.a.link_nowait(t.b.id)
            assert link is not None
            assert len(items) <= 20
            seen = 0
            async for item in items:
                assert item.number == seen
                seen += 1
                if seen % 100 == 0:
                    await asyncio.sleep(0.1)
                    assert len(items) <= 20
        assert seen == 1000
        await t.quiet()


@virtually
async def test_a_reader_that_leaves_is_noticed_and_credit_returns() -> None:
    async with two() as t:
        book = Book()
        ref = await t.book(book)
        async with ref.stream(Count(10, keep=True), timeout=T) as items:
            assert (await anext(items)).number == 0
            await asyncio.sleep(1.0)
            closed: list[bool] = []
            book.outlets[0].on_closed = lambda: closed.append(True)
        await t.nodes.until(lambda: bool(closed))
        with pytest.raises(Cancelled):
            book.outlets[0].try_send(Total(1))
        with pytest.raises(Cancelled):
            await anext(items)
        await t.quiet()


@virtually
async def test_a_stream_ends_by_what_ended_the_actor_or_the_link() -> None:
    async with two() as t:
        ref = await t.book()
        with pytest.raises(InvalidRequest):
            async with ref.stream(Refuse(), timeout=T) as items:
                await anext(items)
        with pytest.raises(NoActor):
            async with t.at("nobody").stream(Count(1), timeout=T) as items:
                await anext(items)
        async with ref.stream(Count(1, keep=True), timeout=T) as items:
            assert (await anext(items)).number == 0
            with pytest.raises(DeadlineExceeded):
                await anext(items)
            t.nodes.world.reset("a", "b")
            with pytest.raises(LinkLost):
                await anext(items)
        async with ref.stream(Count(1, keep=True), timeout=T) as items:
            assert (await anext(items)).number == 0
            ref.tell(Crash())
            with pytest.raises(ActorFailed):
                await anext(items)
        await t.quiet()


@virtually
async def test_a_stream_whose_items_are_strange_ends() -> None:
    async with two() as t:
        await t.book()

        class Odd(msgspec.Struct, frozen=True, array_like=True, tag="odd"):
            pass

        strange: Contract[Message, Odd] = Contract("book", Message, Odd)
        ref = t.remote_a.ref(strange, Address(t.b.id, t.b.epoch, "book"))
        with pytest.raises(ProtocolError):
            async with ref.stream(Count(1), timeout=T) as items:
                await anext(items)
        await t.quiet()
