"""What is alike on a link and on a local link; and what local links alone do."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.errors import DeadlineExceeded, LinkLost, NoWorker, Overloaded, PdserveError
from pdserve.ids import NodeId
from pdserve.runtime.peers import local_link
from pdserve.runtime.peers.handlers import answers, hears
from pdserve.runtime.rpc_methods import EXPLAIN, MOVE, RELEASE, ROUTE
from pdserve.wire.codec import Method, Notice
from pdserve.wire.type_check import is_immutable
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster
from tests.support.net_support import ECHO, HANG, REFUSE, Echo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.base import IncomingCall, Peer
    from pdserve.runtime.node import Node

B = NodeId("b")
NOTE = Notice(0x7001, "note", Echo)
both_ways = pytest.mark.parametrize("together", [False, True], ids=["link", "local link"])


class Listed(msgspec.Struct, array_like=True):
    """A record that can change."""

    items: list[int]


LIST = Method(9, "list", Listed, Listed)
TOLD = Notice(0x7003, "told", Listed)


class Books:
    """Keeps what came, in its order, and the calls that wait."""

    def __init__(self, node: Node) -> None:
        self.came: list[str] = []
        self.calls: list[IncomingCall] = []
        self.withdrawn = 0
        self.lists: list[Listed] = []
        node.host(self)

    @answers(ECHO)
    def _echo(self, message: Echo, call: IncomingCall) -> Echo:
        self.came.append(message.payload.decode())
        return message

    @answers(HANG)
    def _hang(self, message: Echo, call: IncomingCall) -> Echo | None:
        self.calls.append(call)
        call.on_cancel = self._withdraw
        return None

    @answers(REFUSE)
    def _refuse(self, message: Echo, call: IncomingCall) -> Echo:
        if message.payload:
            raise ValueError(message.payload.decode())
        raise NoWorker("there is none", retry_after=2.0)

    @answers(LIST)
    def _list(self, message: Listed, call: IncomingCall) -> Listed:
        message.items.append(2)
        self.lists.append(message)
        return message

    @hears(NOTE)
    def _note(self, message: Echo, peer: Peer) -> None:
        if message.payload == b"bug":
            raise ValueError("a bug")
        self.came.append(f"{peer.node} {message.payload.decode()}")

    @hears(TOLD)
    def _told(self, message: Listed, peer: Peer) -> None:
        self.lists.append(message)

    def _withdraw(self) -> None:
        self.withdrawn += 1


@asynccontextmanager
async def books(*, together: bool = True) -> AsyncIterator[tuple[Cluster, Node, Books]]:
    async with cluster(together=together) as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        await a.link(B, timeout=1.0)
        yield nodes, a, Books(b)


# ---------------------------------------------------------------- alike


@both_ways
@virtually
async def test_requests_and_one_way_messages_arrive_in_one_order(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        ref = a.ref(B)
        asking = []
        for number in range(10):
            asking.append(asyncio.create_task(ref.ask(ECHO, Echo(b"%d" % number), timeout=3.0)))
            await asyncio.sleep(0)
            ref.tell(NOTE, Echo(b"%d" % number))
            assert f"a {number}" not in at_b.came, "not before the teller has run"
        await asyncio.gather(*asking)
        await asyncio.sleep(0.1)
        assert at_b.came == [word for n in range(10) for word in (f"{n}", f"a {n}")]


@both_ways
@virtually
async def test_errors_come_as_copies_and_foreign_ones_without_their_words(together: bool) -> None:
    async with books(together=together) as (_, a, _at_b):
        with pytest.raises(NoWorker, match="there is none") as refused:
            await a.ref(B).ask(REFUSE, Echo(), timeout=3.0)
        assert refused.value.retry_after == 2.0
        with pytest.raises(PdserveError) as foreign:
            await a.ref(B).ask(REFUSE, Echo(b"secret"), timeout=3.0)
        assert "secret" not in str(foreign.value)


@both_ways
@virtually
async def test_a_deadline_ends_the_work(together: bool) -> None:
    async with books(together=together) as (nodes, a, at_b):
        begun = nodes.loop.time()
        with pytest.raises(DeadlineExceeded):
            await a.ref(B).ask(HANG, Echo(), timeout=1.0)
        assert 1.0 <= nodes.loop.time() - begun < 1.2
        await asyncio.sleep(0.1)
        assert at_b.withdrawn == 1
        assert at_b.calls[0].done
        at_b.calls[0].reply(Echo())  # too late, and without effect


@both_ways
@virtually
async def test_who_gives_up_ends_the_work_or_gets_the_late_answer(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        late: list[Echo] = []

        async def asked() -> asyncio.Task[Echo]:
            asking = a.ref(B).ask(HANG, Echo(), timeout=30.0, late=late.append)
            task = asyncio.create_task(asking)
            await asyncio.sleep(0.1)
            return task

        given_up = await asked()
        given_up.cancel()
        await asyncio.sleep(0.1)
        assert (at_b.withdrawn, at_b.calls[0].done) == (1, True)

        crossed = await asked()
        at_b.calls[1].reply(Echo(b"kept"))
        crossed.cancel()
        await asyncio.sleep(0.1)
        # Over a link, the answer leaves when the turn ends; it may also cross the cancellation.
        assert late == [Echo(b"kept")]
        assert crossed.cancelled()


@both_ways
@virtually
async def test_an_answer_in_the_turn_of_the_cancellation_is_late(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        late: list[Echo] = []
        asking = a.ref(B).ask(HANG, Echo(), timeout=30.0, late=late.append)
        task = asyncio.create_task(asking)
        await asyncio.sleep(0.1)
        task.cancel()
        at_b.calls[0].reply(Echo(b"kept"))
        await asyncio.sleep(0.1)
        assert task.cancelled()
        assert late == [Echo(b"kept")], "it may grant something that must be given back"
        assert at_b.withdrawn == 0, "an answered request is not withdrawn"


@both_ways
@virtually
async def test_a_bug_in_a_cancellation_stays_with_its_node(
    together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with books(together=together) as (_, a, at_b):
        asking = [asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=30.0)) for _ in range(2)]
        await asyncio.sleep(0.1)

        def fail() -> None:
            raise ValueError("a bug")

        at_b.calls[0].on_cancel = fail
        asking[0].cancel()
        await asyncio.sleep(0.1)
        assert asking[0].cancelled()
        at_b.calls[1].reply(Echo(b"x"))
        assert await asking[1] == Echo(b"x")
        assert "failed when it was cancelled" in caplog.text


@both_ways
@virtually
async def test_a_task_that_asks_while_its_node_closes_waits_no_longer_than_it_said(
    together: bool,
) -> None:
    async with books(together=together) as (nodes, a, _):
        over: list[float] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60.0)
            finally:
                began = nodes.loop.time()
                with pytest.raises(DeadlineExceeded):
                    await a.ref(B).ask(HANG, Echo(), timeout=1.0)
                over.append(nodes.loop.time() - began)

        _ = a.tasks.spawn(work(), "work")
        await asyncio.sleep(0.1)
        await nodes.nodes.pop("a").close()
        assert 1.0 <= over[0] < 1.2


@both_ways
@virtually
async def test_a_burst_of_messages_in_one_turn_arrives(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        for _ in range(10_000):
            a.ref(B).tell(NOTE, Echo())
        await asyncio.sleep(0.1)
        assert len(at_b.came) == 10_000


@both_ways
@virtually
async def test_a_request_that_is_given_up_at_once_does_not_arrive(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        asking = asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=30.0))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0.1)
        assert all(call.done for call in at_b.calls)
        assert at_b.withdrawn == len(at_b.calls)


@both_ways
@virtually
async def test_the_end_of_the_node_ends_requests(together: bool) -> None:
    async with books(together=together) as (nodes, a, at_b):
        asking = asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=30.0))
        await asyncio.sleep(0.1)
        await nodes.nodes.pop("b").close()
        with pytest.raises(LinkLost) as lost:
            await asking
        assert lost.value.sent
        assert at_b.withdrawn == 1
        await nodes.until(lambda: a.registry.get(B) is None)
        with pytest.raises(LinkLost):
            await a.ref(B).ask(ECHO, Echo(), timeout=3.0)


@both_ways
@virtually
async def test_a_later_life_is_reached_and_the_earlier_is_not(together: bool) -> None:
    async with books(together=together) as (nodes, a, _):
        before = nodes.nodes["b"].epoch
        await nodes.nodes.pop("b").close()
        await nodes.until(lambda: a.registry.get(B) is None)
        b = await nodes.add("b")
        await nodes.until(nodes.converged)
        Books(b)
        assert await a.ref(B, b.epoch).ask(ECHO, Echo(b"x"), timeout=3.0) == Echo(b"x")
        with pytest.raises(LinkLost):
            await a.ref(B, before).ask(ECHO, Echo(b"x"), timeout=3.0)


@both_ways
@virtually
async def test_a_failing_hearer_stops_nothing(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        a.ref(B).tell(NOTE, Echo(b"bug"))
        a.ref(B).tell(NOTE, Echo(b"after"))
        await asyncio.sleep(0.1)
        assert at_b.came == ["a after"]


@both_ways
@virtually
async def test_nobody_shares_what_can_change(together: bool) -> None:
    async with books(together=together) as (_, a, at_b):
        mine = Listed([1])
        got = await a.ref(B).ask(LIST, mine, timeout=3.0)
        a.ref(B).tell(TOLD, mine)
        mine.items.append(9)
        await asyncio.sleep(0.1)
        assert got == Listed([1, 2])
        assert at_b.lists == [Listed([1, 2]), Listed([1])]
        got.items.clear()
        assert at_b.lists[0] == Listed([1, 2])


# ---------------------------------------------------------------- local links alone


@virtually
async def test_a_record_that_cannot_change_is_passed_as_it_is() -> None:
    async with books() as (_, a, _at_b):
        sent = Echo(b"x")
        assert await a.ref(B).ask(ECHO, sent, timeout=3.0) is sent


@virtually
async def test_requests_and_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_link, "_MOST", 3)
    monkeypatch.setattr(local_link, "_MOST_WAITING", 3)
    async with books() as (_, a, at_b):
        asking = [asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=9.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await a.ref(B).ask(HANG, Echo(), timeout=9.0)
        for call in at_b.calls:
            call.reply(Echo())
        await asyncio.gather(*asking)
        assert await a.ref(B).ask(ECHO, Echo(b"x"), timeout=3.0) == Echo(b"x")
        for _ in range(3):
            a.ref(B).tell(NOTE, Echo())
        with pytest.raises(Overloaded):
            a.ref(B).tell(NOTE, Echo())


@virtually
async def test_what_has_not_arrived_when_a_life_ends_was_not_sent() -> None:
    async with books() as (nodes, a, at_b):
        asking = asyncio.create_task(a.ref(B).ask(ECHO, Echo(b"x"), timeout=9.0))
        await asyncio.sleep(0)
        assert nodes.neighbours is not None
        nodes.neighbours.leave(nodes.nodes["b"], "its life is over")
        with pytest.raises(LinkLost) as lost:
            await asking
        assert not lost.value.sent
        assert not at_b.came


@virtually
async def test_a_node_that_takes_another_ones_name_takes_its_place() -> None:
    async with books() as (nodes, a, _):
        assert nodes.neighbours is not None
        asking = asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=30.0))
        await asyncio.sleep(0.1)
        earlier, later = nodes.nodes["b"], nodes.make("b")
        nodes.neighbours.enter(later)
        with pytest.raises(LinkLost):
            await asking
        link = nodes.neighbours.link(a, B)
        assert link is not None
        assert link.peer.epoch == later.epoch != earlier.epoch
        assert nodes.neighbours.link(earlier, a.id) is None
        await later.close()


@virtually
async def test_a_rejoined_node_is_asked_in_its_new_life() -> None:
    async with books() as (nodes, a, _):
        b = nodes.nodes["b"]
        before = b.epoch
        nodes.world.partition("a", "b")
        await nodes.until(lambda: a.registry.get(B) is None, timeout=120.0)
        nodes.world.heal()
        await nodes.until(lambda: b.epoch != before and nodes.converged(), timeout=120.0)
        assert await a.ref(B, b.epoch).ask(ECHO, Echo(b"x"), timeout=3.0) == Echo(b"x")


@pytest.mark.parametrize(
    "kind", [ROUTE.request, ROUTE.reply, EXPLAIN.request, RELEASE.message, MOVE.message]
)
def test_records_between_frontend_and_router_cannot_change(kind: type[Any]) -> None:
    assert is_immutable(kind)


def test_records_that_can_change_are_known() -> None:
    class Frozen(msgspec.Struct, frozen=True):
        inner: tuple[Listed, ...] = ()

    assert not is_immutable(Listed)
    assert not is_immutable(Frozen)
    assert not is_immutable(EXPLAIN.reply)
