from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    DeadlineExceeded,
    NoMethod,
    NoWorker,
    Overloaded,
    PdserveError,
    ProtocolError,
)
from pdserve.ids import NodeId
from pdserve.runtime.peers.handlers import accepts, answers, answers_later, hears
from pdserve.wire.codec import Notice
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.support.net_support import ECHO, HANG, REFUSE, Echo, RecordingStreamSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.base import IncomingCall, IncomingStream, Peer
    from pdserve.runtime.node import Node
    from pdserve.wire.parser import Buffer

NOTE = Notice(0x7001, "note", Echo)
STREAM = 0x7002
AT_ONCE = 3


class Desk:
    """An actor with one handler of each kind."""

    def __init__(self, node: Node) -> None:
        self.heard: list[tuple[bytes, str]] = []
        self.opened: list[bytes] = []
        self.begun = self.cancelled = 0
        self.go_on = asyncio.Event()
        node.host(self)

    @answers(ECHO)
    def _echo(self, message: Echo, call: IncomingCall) -> Echo | None:
        if message.payload == b"later":
            asyncio.get_running_loop().call_later(1.0, call.reply, Echo(b"now"))
            return None
        return Echo(message.payload + call.life.node.encode())

    @answers_later(HANG, at_once=AT_ONCE)
    async def _hang(self, message: Echo, call: IncomingCall) -> Echo:
        self.begun += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if message.payload == b"fail":
            raise NoWorker("there is none")
        if message.payload == b"bug":
            raise ValueError("a bug")
        return message

    @hears(NOTE)
    def _note(self, message: Echo, peer: Peer) -> None:
        self.heard.append((message.payload, peer.node))

    @accepts(STREAM)
    def _stream(self, stream: IncomingStream, body: Buffer) -> None:
        self.opened.append(bytes(body))
        stream.accept(RecordingStreamSink())


@asynccontextmanager
async def desk(*, together: bool = False) -> AsyncIterator[tuple[Node, Desk]]:
    """A node `a`, which asks, and the desk of a node `b`. `together`: both are of one process."""
    async with cluster(together=together) as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        yield a, Desk(b)


B = NodeId("b")
both_ways = pytest.mark.parametrize("together", [False, True], ids=["link", "local link"])


@both_ways
@virtually
async def test_a_request_is_answered_at_once_or_later(together: bool) -> None:
    async with desk(together=together) as (a, _):
        ref = a.ref(B)
        assert (await ref.ask(ECHO, Echo(b"from "), timeout=3.0)).payload == b"from a"
        assert (await ref.ask(ECHO, Echo(b"later"), timeout=3.0)).payload == b"now"
        with pytest.raises(NoMethod):
            await ref.ask(REFUSE, Echo(), timeout=3.0)


@both_ways
@virtually
async def test_a_task_answers_with_its_result_or_error(together: bool) -> None:
    async with desk(together=together) as (a, at_b):
        at_b.go_on.set()
        assert (await a.ref(B).ask(HANG, Echo(b"x"), timeout=3.0)).payload == b"x"
        with pytest.raises(NoWorker, match="there is none"):
            await a.ref(B).ask(HANG, Echo(b"fail"), timeout=3.0)


@both_ways
@virtually
async def test_a_bug_in_a_task_is_answered_at_once_too(together: bool) -> None:
    async with desk(together=together) as (a, at_b):
        at_b.go_on.set()
        begun = a.now()
        with pytest.raises(PdserveError) as error:
            await a.ref(B).ask(HANG, Echo(b"bug"), timeout=30.0)
        assert not isinstance(error.value, DeadlineExceeded)
        assert a.now() < begun + 1.0


@both_ways
@virtually
async def test_a_caller_that_gives_up_ends_the_task(together: bool) -> None:
    async with desk(together=together) as (a, at_b):
        asking = asyncio.create_task(a.ref(B).ask(HANG, Echo(), timeout=30.0))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded):
            await a.ref(B).ask(HANG, Echo(), timeout=1.0)
        await asyncio.sleep(0.1)
        assert (at_b.begun, at_b.cancelled) == (2, 2)


@both_ways
@virtually
async def test_tasks_are_bounded_and_places_come_back(together: bool) -> None:
    async with desk(together=together) as (a, at_b):
        ask = a.ref(B).ask
        asking = [asyncio.create_task(ask(HANG, Echo(), timeout=9.0)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await ask(HANG, Echo(), timeout=3.0)
        at_b.go_on.set()
        await asyncio.gather(*asking)
        await ask(HANG, Echo(), timeout=3.0)
        assert at_b.begun == AT_ONCE + 1


@both_ways
@virtually
async def test_one_way_messages_come_in_order(together: bool) -> None:
    async with desk(together=together) as (a, at_b):
        await a.link(B, timeout=1.0)
        for number in range(20):
            a.ref(B).tell(NOTE, Echo(bytes([number])))
        await asyncio.sleep(0.1)
        assert at_b.heard == [(bytes([number]), "a") for number in range(20)]


@virtually
async def test_a_one_way_message_that_cannot_be_decoded_does_not_reach_the_actor() -> None:
    async with desk() as (a, at_b):
        link = await a.link(B, timeout=1.0)
        with pytest.raises(ProtocolError):
            NOTE.decode(b"\xc1")
        for _ in range(3):
            link.tell(NOTE.id, b"\xc1")
        await asyncio.sleep(0.1)
        assert not at_b.heard
        assert link.down is not None, "the third one ends the link"


@virtually
async def test_a_stream_reaches_its_actor() -> None:
    async with desk() as (a, at_b):
        link = await a.ref(B).link(timeout=1.0)
        link.open_stream(STREAM, b"hello", RecordingStreamSink(), last=True)
        await asyncio.sleep(0.1)
        assert at_b.opened == [b"hello"]


@virtually
async def test_a_subclass_inherits_what_its_base_serves_and_the_last_actor_counts() -> None:
    class Louder(Desk):
        def _echo(self, message: Echo, call: IncomingCall) -> Echo | None:
            return Echo(b"not marked, so not served")

        @answers(HANG)
        def _hang(self, message: Echo, call: IncomingCall) -> Echo:  # type: ignore[override]
            return Echo(b"loud")

    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        Desk(b)
        Louder(b)
        assert (await a.ref(B).ask(HANG, Echo(b"x"), timeout=3.0)).payload == b"loud"
        assert (await a.ref(B).ask(ECHO, Echo(b"x"), timeout=3.0)).payload == b"xa"
