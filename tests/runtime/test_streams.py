"""Streams within one node: the same as over links, see `test_remote`."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import ActorFailed, Cancelled, DeadlineExceeded, InvalidRequest, NoActor
from pdserve.runtime.streams import LOCAL_COST, Inlet, Outlet, pipe
from tests.net.world import virtually
from tests.runtime.actors import Book, Count, Crash, Refuse, Sleep, Total, at_home

T = 10.0


@virtually
async def test_a_window_bounds_what_waits_and_all_of_it_returns() -> None:
    inlet: Inlet[int]
    outlet: Outlet[int]
    inlet, outlet = pipe(T, 3 * LOCAL_COST)
    assert [outlet.try_send(n) for n in range(5)] == [True, True, True, False, False]
    assert await anext(inlet) == 0
    assert outlet.try_send(3)
    inlet.discard()
    assert [outlet.try_send(n) for n in range(4)] == [True, True, True, False]
    outlet.end()
    assert [number async for number in inlet] == [0, 1, 2]
    assert inlet.complete


@virtually
async def test_a_sender_waits_for_the_reader_and_no_longer_than_it_may() -> None:
    inlet: Inlet[int]
    outlet: Outlet[int]
    inlet, outlet = pipe(T, LOCAL_COST)
    await outlet.send(0, timeout=T)
    with pytest.raises(DeadlineExceeded):
        await outlet.send(1, timeout=1.0)
    sending = asyncio.ensure_future(outlet.send(2, timeout=T))
    await asyncio.sleep(1.0)
    assert not sending.done()
    assert await anext(inlet) == 0
    await sending
    assert await anext(inlet) == 2, "what was late was not sent"
    with pytest.raises(DeadlineExceeded):
        await anext(inlet)
    gone = asyncio.ensure_future(outlet.send(3, timeout=T))
    await gone
    gone = asyncio.ensure_future(outlet.send(4, timeout=T))
    await asyncio.sleep(0)
    outlet.left()
    with pytest.raises(Cancelled):
        await gone


@virtually
async def test_cancelling_a_reader_loses_no_item() -> None:
    inlet: Inlet[int]
    outlet: Outlet[int]
    inlet, outlet = pipe(T, LOCAL_COST)
    reading = asyncio.ensure_future(anext(inlet))
    await asyncio.sleep(0)
    outlet.try_send(7)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    assert await anext(inlet) == 7


@virtually
async def test_an_actor_streams() -> None:
    async with at_home() as actors:
        ref = actors.spawn(Book(), "book").ref
        async with ref.stream(Count(200), timeout=T, window=1000) as items:
            assert [item async for item in items] == [Total(n) for n in range(200)]


@virtually
async def test_an_end_ends_the_streams_by_name() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        with pytest.raises(InvalidRequest):
            async with cell.ref.stream(Refuse(), timeout=T) as items:
                await anext(items)
        async with cell.ref.stream(Count(1, keep=True), timeout=T) as items:
            assert await anext(items) == Total(0)
            cell.ref.tell(Sleep(1.0))
            async with cell.ref.stream(Count(1), timeout=T) as waiting:
                await asyncio.sleep(0.5)
                cell.close()
                with pytest.raises(NoActor):
                    await anext(waiting)
                with pytest.raises(ActorFailed):
                    await anext(items)
        with pytest.raises(NoActor):
            async with cell.ref.stream(Count(1), timeout=T):
                pass


@virtually
async def test_a_reader_that_leaves_takes_its_message_back() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        cell.ref.tell(Sleep(5.0))
        await asyncio.sleep(0.1)
        async with cell.ref.stream(Count(1), timeout=T):
            assert len(cell.mailbox) == 1
        assert len(cell.mailbox) == 0
        await asyncio.sleep(10.0)
        assert book.outlets == []


@virtually
async def test_an_actor_without_streams_refuses() -> None:
    async with at_home() as actors:

        class Plain(Book):
            opened = Book.__mro__[1].opened  # type: ignore[attr-defined]

        ref = actors.spawn(Plain(), "plain").ref
        with pytest.raises(Exception, match="has no streams"):
            async with ref.stream(Count(1), timeout=T) as items:
                await anext(items)
        with pytest.raises(NoActor):
            async with actors.ref(Plain.contract, "nobody").stream(Crash(), timeout=T):
                pass
