"""The actors of one node by name, and what an ask promises there."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pdserve.errors import (
    ActorFailed,
    DeadlineExceeded,
    NoActor,
)
from tests.net.world import virtually
from tests.runtime.actors import BOOK, OTHER, Add, Book, Get, Sleep, Total, at_home

T = 10.0


@virtually
async def test_messages_pass_by_reference() -> None:
    async with at_home() as actors:
        book = Book()
        ref = actors.spawn(book, "book").ref
        message = Add(1)
        await ref.ask(message, timeout=T)
        assert book.last is message


@virtually
async def test_an_actor_that_cannot_start_never_was() -> None:
    async with at_home() as actors:
        with pytest.raises(ActorFailed, match="did not start") as failed:
            await actors.start(Book(fail_at="start"), "book", timeout=T)
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        with pytest.raises(DeadlineExceeded):
            await actors.start(Book(fail_at="hang"), "book", timeout=T)
        starting = asyncio.ensure_future(actors.start(Book(fail_at="hang"), "book", timeout=T))
        await asyncio.sleep(1.0)
        starting.cancel()
        await asyncio.wait({starting})
        assert len(actors) == 0
        await actors.start(Book(), "book", timeout=T)  # the name is free


@virtually
async def test_a_cancelled_ask_leaves_nothing_behind() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        cell.ref.tell(Sleep(5.0))
        await asyncio.sleep(0)
        asks = [asyncio.ensure_future(cell.ref.ask(Add(1), timeout=T)) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert len(cell.mailbox) == 3
        asks[1].cancel()
        await asyncio.wait({asks[1]})
        assert len(cell.mailbox) == 2
        await asyncio.wait(asks)
        assert book.total == 2


@virtually
async def test_an_ask_cancelled_as_its_error_comes_is_quiet() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        cell.ref.tell(Sleep(5.0))
        await asyncio.sleep(0.1)
        behind = asyncio.ensure_future(cell.ref.ask(Get(), timeout=T))
        await asyncio.sleep(0.1)
        cell.close()  # fails `behind`, which is cancelled before it can see that
        behind.cancel()
        await asyncio.wait({behind})
        assert behind.cancelled()
        gc.collect()  # the loop would hear of an error that nobody looked at


@virtually
async def test_an_ask_that_is_handled_is_finished_for_nobody() -> None:
    async with at_home() as actors:
        book = Book()
        ref = actors.spawn(book, "book").ref
        ask = asyncio.ensure_future(ref.ask(Sleep(5.0), timeout=T))
        await asyncio.sleep(1.0)
        ask.cancel()
        assert await ref.ask(Get(), timeout=T) == Total(0)
        assert book.log[-2:] == ["slept", "get"]


@virtually
async def test_a_deadline_says_whether_the_message_was_reached() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        first = asyncio.ensure_future(cell.ref.ask(Sleep(60.0), timeout=1.0))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match="still waits"):
            await cell.ref.ask(Get(), timeout=2.0)
        assert len(cell.mailbox) == 0
        with pytest.raises(DeadlineExceeded, match="has the message"):
            await first


@virtually
async def test_an_actor_cannot_ask_itself() -> None:
    async with at_home() as actors:

        class Vain(Book):
            async def receive(self, message):
                return await self.context.ref.ask(message, timeout=T)

        ref = actors.spawn(Vain(), "vain").ref
        with pytest.raises(ActorFailed, match="asks itself"):
            await ref.ask(Get(), timeout=T)


@virtually
async def test_the_node_going_away_ends_all() -> None:
    async with at_home() as actors:
        books = [Book() for _ in range(3)]
        cells = [await actors.start(book, f"book-{n}", timeout=T) for n, book in enumerate(books)]
        ask = asyncio.ensure_future(cells[0].ref.ask(Sleep(100.0), timeout=1000.0))
        await asyncio.sleep(1.0)
        await actors.home.tasks.close()
        with pytest.raises(ActorFailed):
            await ask
        assert all(book.log[-1] == "stopped" for book in books)
        assert len(actors) == 0


@virtually
async def test_a_name_belongs_to_one_actor_and_a_ref_to_one_life_or_to_the_name() -> None:
    async with at_home() as actors:
        first = await actors.start(Book(), "book", timeout=T)
        with pytest.raises(ValueError, match="already"):
            actors.spawn(Book(), "book")
        by_name = actors.ref(BOOK, "book")
        await first.stop(timeout=T)
        assert actors.names() == []
        with pytest.raises(NoActor):
            by_name.tell(Add(1))
        second = await actors.start(Book(), "book", timeout=T)
        assert await by_name.ask(Add(1), timeout=T) == Total(1)
        with pytest.raises(NoActor, match="a later one"):
            first.ref.tell(Add(1))
        await second.ref.connect(timeout=T)
        with pytest.raises(NoActor, match="no other"):
            await actors.ref(OTHER, "book").connect(timeout=T)
