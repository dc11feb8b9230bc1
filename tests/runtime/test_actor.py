"""One life of an actor: order, answers, failures, timers, and what is left of it (nothing)."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    ActorFailed,
    DeadlineExceeded,
    InvalidRequest,
    NoActor,
    Overloaded,
    PdserveError,
)
from pdserve.runtime.mailbox import Policy
from pdserve.testing.virtual_time import VirtualTimeLoop
from tests.net.world import virtually
from tests.runtime.actors import BOOK, Add, Book, Crash, Get, Refuse, Sleep, Total, at_home

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
async def test_messages_pass_by_reference() -> None:
    async with at_home() as actors:
        book = Book()
        ref = actors.spawn(book, "book").ref
        message = Add(1)
        await ref.ask(message, timeout=T)
        assert book.last is message


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
async def test_a_failing_end_is_a_failure() -> None:
    async with at_home() as actors:
        cell = await actors.start(Book(fail_at="stop"), "book", timeout=T)
        await cell.stop(timeout=T)
        assert isinstance(cell.failure, ZeroDivisionError)


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


# ---------------------------------------------------------------------- watches


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


# ---------------------------------------------------------------------- timers and tasks


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
        assert BOOK.name == "book"
