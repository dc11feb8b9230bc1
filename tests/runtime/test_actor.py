"""One life of an actor: order, answers, failures, who hears of its end, and what is left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    ActorFailed,
    InvalidRequest,
    NoActor,
    Overloaded,
    PdserveError,
)
from pdserve.runtime.mailbox import Policy
from tests.net.world import virtually
from tests.runtime.actors import Add, Book, Crash, Get, Refuse, Sleep, Total, at_home

if TYPE_CHECKING:
    from pdserve.runtime.ref import Terminated

T = 10.0


@virtually
async def test_messages_are_handled_one_at_a_time_in_order() -> None:
    async with at_home() as actors:
        book = Book()
        ref = actors.spawn(book, "book").ref
        for number in range(100):
            ref.tell(Add(number))
        assert await ref.ask(Get(), timeout=T) == Total(4950)
        assert book.log == ["started", *(f"add {n}" for n in range(100)), "get"]
        assert book.most_at_once == 1


@virtually
async def test_a_refusal_is_an_answer_and_the_actor_lives() -> None:
    async with at_home() as actors:
        ref = actors.spawn(Book(), "book").ref
        with pytest.raises(InvalidRequest, match="no thanks"):
            await ref.ask(Refuse(), timeout=T)
        assert await ref.ask(Get(), timeout=T) == Total(0)


@virtually
async def test_a_failure_ends_the_actor_and_everybody_who_waits_hears_which_it_was() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        asks = [asyncio.ensure_future(cell.ref.ask(m, timeout=T)) for m in (Crash(), Get(), Get())]
        await asyncio.wait(asks)
        errors = [ask.exception() for ask in asks]
        assert [type(error) for error in errors] == [ActorFailed, NoActor, NoActor]
        assert "broken on purpose" in str(errors[0])
        assert isinstance(cell.failure, ZeroDivisionError)
        assert book.log[-1] == "stopped by ZeroDivisionError"
        with pytest.raises(NoActor):
            cell.ref.tell(Add(1))


@virtually
async def test_nobody_hears_a_tell_fail_so_the_actor_ends() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        cell.ref.tell(Refuse())
        await asyncio.wait({cell.task})
        assert isinstance(cell.failure, PdserveError)


@virtually
async def test_a_failing_end_is_a_failure() -> None:
    async with at_home() as actors:
        cell = await actors.start(Book(fail_at="stop"), "book", timeout=T)
        await cell.stop(timeout=T)
        assert isinstance(cell.failure, ZeroDivisionError)


@virtually
async def test_what_gives_way_hears_of_it() -> None:
    async with at_home() as actors:

        class Small(Book):
            policy = Policy(bound=2, at_bound="drop_oldest")

        ref = actors.spawn(Small(), "small").ref
        asks = [asyncio.ensure_future(ref.ask(Add(n), timeout=T)) for n in range(4)]
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded, Overloaded, Total, Total]


@virtually
async def test_stop_ends_after_the_present_message_and_drain_after_all() -> None:
    async with at_home() as actors:
        for drain, total in ((False, 0), (True, 3)):
            book = Book()
            cell = actors.spawn(book, "book")
            cell.ref.tell(Sleep(1.0))
            await asyncio.sleep(0)
            asks = [asyncio.ensure_future(cell.ref.ask(Add(1), timeout=T)) for _ in range(3)]
            await asyncio.sleep(0.1)
            stopping = asyncio.ensure_future(cell.stop(timeout=T, drain=drain))
            await asyncio.sleep(0.1)
            with pytest.raises(NoActor):
                cell.ref.tell(Add(1))
            results = await asyncio.gather(*asks, return_exceptions=True)
            await stopping
            assert book.total == total
            assert book.log[-1] == "stopped"
            assert drain or all(isinstance(result, NoActor) for result in results)
            assert cell.failure is None


@virtually
async def test_stop_has_a_deadline() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        ask = asyncio.ensure_future(cell.ref.ask(Sleep(1e6), timeout=1e6))
        await asyncio.sleep(0.1)
        before = asyncio.get_running_loop().time()
        await cell.stop(timeout=3.0)
        assert asyncio.get_running_loop().time() - before <= 3.0 + 2 * book.stop_timeout
        with pytest.raises(ActorFailed):
            await ask
        assert book.log[-1] == "stopped"


@virtually
async def test_an_actor_cancelled_before_its_first_step_fails_who_waits() -> None:
    async with at_home() as actors:
        book = Book()
        cell = actors.spawn(book, "book")
        heard: list[Terminated] = []
        cell.ref.watch(heard.append)
        ask = asyncio.ensure_future(cell.ref.ask(Get(), timeout=T))
        cell.task.cancel()
        with pytest.raises(NoActor):
            await ask
        assert len(heard) == 1
        assert book.log == []


@virtually
async def test_watchers_hear_of_an_end_exactly_once() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        early: list[Terminated] = []
        late: list[Terminated] = []
        never: list[Terminated] = []
        cell.ref.watch(early.append)
        cell.ref.watch(never.append).cancel()
        await cell.stop(timeout=T)
        cell.ref.watch(late.append)
        cancelled = cell.ref.watch(never.append)
        assert late == [], "never before `watch` has returned"
        cancelled.cancel()
        await asyncio.sleep(1.0)
        assert len(early) == len(late) == 1
        assert never == []
        assert not early[0].failed
        assert early[0].address == cell.ref.address


@virtually
async def test_a_supervisor_that_comes_late_hears_too() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        ends: list[BaseException | None] = []
        cell.ref.tell(Crash())
        await asyncio.wait({cell.task})
        cell.when_ended(ends.append)
        assert ends == [], "never before `when_ended` has returned"
        await asyncio.sleep(0)
        assert ends == [cell.failure]


@virtually
async def test_a_watcher_that_fails_does_not_deafen_the_others() -> None:
    async with at_home() as actors:
        cell = actors.spawn(Book(), "book")
        heard: list[Terminated] = []

        def fail(terminated: Terminated) -> None:
            raise ValueError("broken on purpose")

        cell.ref.watch(fail)
        cell.ref.watch(heard.append)
        cell.ref.tell(Crash())
        await asyncio.wait({cell.task})
        assert [terminated.failed for terminated in heard] == [True]


@virtually
async def test_a_busy_actor_lets_others_run() -> None:
    async with at_home() as actors:
        book = Book()
        ref = actors.spawn(book, "book").ref
        for _ in range(1000):
            ref.tell(Add(1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert 0 < book.total < 1000
        assert await ref.ask(Get(), timeout=T) == Total(1000)
