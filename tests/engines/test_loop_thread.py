"""The loop thread: who gets a coroutine's end, and how the thread itself ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

from pdserve_engines.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 20.0
"""Seconds that no test reaches unless something hangs."""


class Errors:
    """The callback, and a way to wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, BaseException]] = []
        self._new = threading.Semaphore(0)

    def __call__(self, name: str, error: BaseException) -> None:
        self.seen.append((name, error))
        self._new.release()

    def wait(self) -> tuple[str, BaseException]:
        assert self._new.acquire(timeout=LONG)
        return self.seen[-1]


@pytest.fixture
def errors() -> Errors:
    return Errors()


@pytest.fixture
def loop(errors) -> Iterator[LoopThread]:
    thread = LoopThread("test-loop", errors)
    thread.start()
    yield thread
    thread.stop(LONG)
    assert not thread.alive


async def forever(begun: threading.Event | None = None) -> None:
    if begun is not None:
        begun.set()
    await asyncio.Event().wait()


def test_a_coroutine_runs_in_the_loops_thread(loop, errors) -> None:
    async def where() -> str:
        asyncio.get_running_loop()
        return threading.current_thread().name

    task = loop.submit(where(), "where")
    assert task.result(LONG) == "test-loop"
    assert task.done
    assert loop.run(where(), "where", LONG) == "test-loop"
    assert errors.seen == []


def test_an_exception_reaches_the_callback_by_the_tasks_name(loop, errors) -> None:
    async def fail() -> None:
        raise ValueError("no")

    task = loop.submit(fail(), "task 7")
    name, error = errors.wait()
    assert (name, str(error)) == ("task 7", "no")
    with pytest.raises(ValueError, match="no"):
        task.result(LONG)


def test_run_gives_the_exception_to_its_caller_alone(loop, errors) -> None:
    async def fail() -> None:
        raise TimeoutError("the coroutine's own")

    with pytest.raises(TimeoutError, match="the coroutine's own"):
        loop.run(fail(), "fail", LONG)
    assert errors.seen == []


def test_run_cancels_what_takes_too_long(loop, errors) -> None:
    cancelled = threading.Event()

    async def long() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match=r"long has not ended after 0\.01 s"):
        loop.run(long(), "long", 0.01)
    assert cancelled.wait(LONG)
    assert errors.seen == []


def test_cancel_ends_a_coroutine_and_may_be_repeated(loop, errors) -> None:
    task = loop.submit(forever(), "forever")
    task.cancel()
    task.cancel()
    with pytest.raises(CancelledError):
        task.result(LONG)
    task.cancel()
    assert errors.seen == []


def test_functions_are_called_in_order_and_their_errors_reported(loop, errors) -> None:
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        if number == 2:
            raise ValueError("two")

    for number in (1, 2, 3):
        loop.call_soon(call, number)
    name, error = errors.wait()
    assert name.endswith("call")
    assert str(error) == "two"

    async def nothing() -> None:
        return None

    loop.run(nothing(), "after them", LONG)
    assert calls == [1, 2, 3]


def test_failed_tasks_of_the_engines_own_are_reported(loop, errors) -> None:
    async def fail() -> None:
        raise ValueError("inner")

    async def make() -> None:
        inner = asyncio.create_task(fail(), name="inner task")
        await asyncio.wait([inner])

    loop.run(make(), "make", LONG)
    _, error = errors.wait()
    assert str(error) == "inner"


def test_a_broken_callback_does_not_end_the_loop(caplog) -> None:
    called = threading.Event()

    def broken(name: str, error: BaseException) -> None:
        called.set()
        raise KeyError(name)

    thread = LoopThread("broken", broken)
    thread.start()
    thread.call_soon(int, "no number")
    assert called.wait(LONG)

    async def answer() -> int:
        return 7

    assert thread.run(answer(), "answer", LONG) == 7
    assert thread.stop(LONG) == []
    assert "the callback for errors failed" in caplog.text


def test_stop_cancels_all_tasks_those_of_the_engine_too(errors) -> None:
    thread = LoopThread("ending", errors)
    thread.start()
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await forever()
        finally:
            ended.append(name)

    own: list[asyncio.Task[None]] = []

    async def make() -> None:
        own.append(asyncio.create_task(work("inner")))
        await work("outer")

    begun = threading.Event()
    task = thread.submit(make(), "make")
    thread.submit(forever(begun), "last")
    assert begun.wait(LONG)
    assert thread.stop(LONG) == []
    assert sorted(ended) == ["inner", "outer"]
    assert task.done
    assert not thread.alive
    assert errors.seen == []


def test_stop_closes_open_generators(errors) -> None:
    thread = LoopThread("generators", errors)
    thread.start()
    closed: list[str] = []

    async def numbers():
        try:
            for number in range(10):
                yield number
        finally:
            closed.append("closed")

    generator = numbers()

    async def first() -> int:
        return await anext(generator)

    assert thread.run(first(), "first", LONG) == 0
    assert thread.stop(LONG) == []
    assert closed == ["closed"]


def test_stop_names_tasks_that_refuse_to_end(errors, caplog) -> None:
    thread = LoopThread("stubborn", errors)
    thread.start()
    begun = threading.Event()
    enough = asyncio.Event()

    async def refuse() -> None:
        while not enough.is_set():
            try:
                await forever(begun)
            except asyncio.CancelledError:
                begun.set()

    task = thread.submit(refuse(), "refuse")
    assert begun.wait(LONG)
    assert thread.stop(0.02) == ["refuse"]
    assert thread.stop(0.02) == ["refuse"]
    assert not thread.alive
    assert "not ended after 0.02 s: refuse" in caplog.text
    with pytest.raises(CancelledError):
        task.result(LONG)


def test_stop_leaves_a_blocked_thread_behind_and_says_so(errors, monkeypatch) -> None:
    monkeypatch.setattr("pdserve_engines.loop_thread._BLOCKED", 0.01)
    thread = LoopThread("blocked", errors)
    thread.start()
    begun, free = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        free.wait(LONG)

    waiting = threading.Event()
    thread.submit(forever(waiting), "waits")
    assert waiting.wait(LONG)
    thread.call_soon(block)
    assert begun.wait(LONG)
    assert thread.stop(0.0) == ["blocked", "waits"]
    assert thread.alive
    free.set()
    thread._thread.join(LONG)
    assert not thread.alive


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nothing_is_taken_before_the_start_and_after_the_end(errors) -> None:
    thread = LoopThread("brief", errors)
    with pytest.raises(RuntimeError, match="brief is not running"):
        thread.submit(forever(), "early")
    thread.start()
    assert thread.stop(LONG) == []
    with pytest.raises(RuntimeError, match="brief is not running"):
        thread.submit(forever(), "late")
    thread.call_soon(pytest.fail)
    assert errors.seen == []


def test_what_was_submitted_before_the_end_is_cancelled_not_lost(errors) -> None:
    """Many threads submit while the loop ends: each coroutine runs to its end or is refused."""
    thread = LoopThread("race", errors)
    thread.start()
    outcomes: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)

    def submit() -> None:
        for _ in range(200):
            try:
                task = thread.submit(work(), "work")
            except RuntimeError:
                outcomes.append("refused")
                continue
            try:
                task.result(LONG)
                outcomes.append("done")
            except CancelledError:
                outcomes.append("cancelled")

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for submitter in threads:
        submitter.start()
    assert thread.stop(LONG) == []
    for submitter in threads:
        submitter.join(LONG)
    assert len(outcomes) == 600


def test_a_loop_that_was_never_started_can_be_stopped(errors) -> None:
    thread = LoopThread("idle", errors)
    assert thread.stop(LONG) == []
    assert not thread.alive


def test_an_exit_in_a_task_ends_the_loop_and_is_reported(errors) -> None:
    thread = LoopThread("exits", errors)
    thread.start()

    async def leave() -> None:
        raise SystemExit(3)

    waiting = thread.submit(forever(), "waits")
    thread.submit(leave(), "leave")
    thread._thread.join(LONG)
    assert any(isinstance(error, SystemExit) for _, error in errors.seen)
    with pytest.raises(CancelledError):
        waiting.result(LONG)
    assert thread.stop(LONG) == []
