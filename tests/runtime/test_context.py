"""Timers, watches and tasks of an actor come one at a time, and end with it."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import (
    Overloaded,
)
from pdserve.runtime.mailbox import Policy
from pdserve.testing.virtual_time import VirtualTimeLoop
from tests.net.world import virtually
from tests.runtime.actors import Add, Book, Get, Sleep, Total, at_home

T = 10.0


@virtually
async def test_an_actor_watches_another_by_a_message() -> None:
    async with at_home() as actors:
        watcher = Book()
        cell = await actors.start(watcher, "watcher", timeout=T)
        other = await actors.start(Book(), "other", timeout=T)
        watcher.context.watch(other.ref, lambda terminated: Add(100))
        unheard = await actors.start(Book(), "unheard", timeout=T)
        watcher.context.watch(unheard.ref, lambda terminated: Add(1000))
        await other.stop(timeout=T)
        assert await cell.ref.ask(Get(), timeout=T) == Total(100)
        await cell.stop(timeout=T)
        await unheard.stop(timeout=T)
        assert watcher.total == 100


@virtually
async def test_timers_come_as_messages_and_end_with_the_actor() -> None:
    async with at_home() as actors:
        book = Book()
        cell = await actors.start(book, "book", timeout=T)
        book.context.set_timer("once", 1.0, Add(1))
        book.context.set_timer("often", 1.0, Add(10), every=2.0)
        book.context.set_timer("never", 1.0, Add(100))
        book.context.cancel_timer("never")
        book.context.cancel_timer("unknown")
        await asyncio.sleep(5.5)
        assert book.total == 31
        await cell.stop(timeout=T)
        await asyncio.sleep(10.0)
        assert book.total == 31


@virtually
async def test_a_timer_taken_back_does_not_come_though_its_message_waits() -> None:
    async with at_home() as actors:
        book = Book()
        cell = await actors.start(book, "book", timeout=T)
        cell.ref.tell(Sleep(5.0))
        book.context.set_timer("a", 1.0, Add(1))
        book.context.set_timer("b", 1.0, Add(10), every=1.0)
        await asyncio.sleep(3.5)
        assert len(cell.mailbox) == 2, "one tick of each, however late"
        book.context.set_timer("a", 10.0, Add(100))
        await asyncio.sleep(3.1)
        assert book.total == 10 + 10, "the tick that waited, and the one at 6 s"
        with pytest.raises(ValueError, match="every"):
            book.context.set_timer("c", 1.0, Add(1), every=0.0)


@virtually
async def test_ticks_that_the_loop_was_too_late_for_are_left_out() -> None:
    async with at_home() as actors:
        book = Book()
        await actors.start(book, "book", timeout=T)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        start = loop.time()
        book.context.set_timer("often", 1.0, Add(1), every=1.0)
        loop._advance(5.5)  # as if something had blocked it
        await asyncio.sleep(0.1)
        assert book.total == 1
        await asyncio.sleep(start + 6.1 - loop.time())
        assert book.total == 2, "and the next is on time"


@virtually
async def test_an_actor_that_cannot_keep_up_with_itself_ends() -> None:
    async with at_home() as actors:

        class Narrow(Book):
            policy = Policy(system_bound=1)

        book = Narrow()
        cell = await actors.start(book, "book", timeout=T)
        cell.ref.tell(Sleep(10.0))
        book.context.set_timer("a", 1.0, Add(1))
        book.context.set_timer("b", 1.0, Add(1))
        await asyncio.sleep(2.0)
        assert isinstance(cell.failure, Overloaded)
        assert cell.ended is not None


@virtually
async def test_an_actors_own_task_ends_with_it_and_its_failure_is_the_actors() -> None:
    async with at_home() as actors:
        book = Book()
        cell = await actors.start(book, "book", timeout=T)
        _ = book.context.tasks.spawn(asyncio.sleep(1e6), "sleeper")

        async def fail() -> None:
            await asyncio.sleep(1.0)
            raise ValueError("broken on purpose")

        _ = book.context.tasks.spawn(fail(), "failing")
        await asyncio.wait({cell.task})
        assert isinstance(cell.failure, ValueError)
        assert len(book.context.tasks) == 0
