"""No task is lost, none outlives its owner, no failure goes unheard."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging

import pytest

from pdserve.errors import Draining
from pdserve.runtime.tasks import Tasks, close_runner
from tests.net.world import virtually


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("broken on purpose")


async def test_a_task_runs_and_is_forgotten() -> None:
    tasks = Tasks("test")

    async def answer() -> int:
        return 42

    assert await tasks.spawn(answer(), "answer") == 42
    await asyncio.sleep(0)
    assert len(tasks) == 0
    await tasks.close()


async def test_a_failure_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, BaseException]] = []
    tasks = Tasks("test", lambda name, error: heard.append((name, error)))
    with caplog.at_level(logging.ERROR):
        await asyncio.wait({tasks.spawn(fail(), "failing")})
        await asyncio.sleep(0)
    ((name, error),) = heard
    assert name == "failing"
    assert isinstance(error, ValueError)
    assert "test: failing failed" in caplog.text
    await tasks.close()


async def test_being_cancelled_is_no_failure() -> None:
    heard: list[str] = []
    tasks = Tasks("test", lambda name, _: heard.append(name))
    _ = tasks.spawn(forever(), "one").cancel()
    _ = tasks.spawn(forever(), "two")
    await tasks.close()
    assert len(tasks) == 0
    assert heard == []


async def test_close_waits_for_the_clean_up_and_refuses_what_it_spawns() -> None:
    tasks = Tasks("test")
    steps: list[str] = []

    async def tidy() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            with pytest.raises(Draining):
                _ = tasks.spawn(forever(), "late")
            steps.append("tidied")

    _ = tasks.spawn(tidy(), "tidy")
    await asyncio.sleep(0)
    await tasks.close()
    assert steps == ["tidied"]
    await tasks.close()


async def test_a_closed_owner_never_starts_the_work() -> None:
    tasks = Tasks("test")
    await tasks.close()
    work = forever()
    with pytest.raises(Draining):
        _ = tasks.spawn(work, "late")
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED  # else: "was never awaited"


async def test_a_failure_while_closing_is_heard() -> None:
    heard: list[str] = []
    tasks = Tasks("test", lambda name, _: heard.append(name))

    async def break_down() -> None:
        try:
            await forever()
        finally:
            raise ValueError("while cleaning up")

    _ = tasks.spawn(break_down(), "breaks")
    await asyncio.sleep(0)
    await tasks.close()
    assert heard == ["breaks"]


async def test_a_task_may_close_its_owner() -> None:
    tasks = Tasks("test")
    _ = tasks.spawn(forever(), "other")
    await tasks.spawn(tasks.close(), "closer")
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_two_may_close_at_once() -> None:
    tasks = Tasks("test")
    _ = tasks.spawn(forever(), "one")
    await asyncio.gather(tasks.close(), tasks.close())
    assert len(tasks) == 0


def test_a_task_that_will_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @virtually
    async def stubborn() -> None:
        tasks = Tasks("test")

        async def ignore_once() -> None:
            try:
                await forever()
            except asyncio.CancelledError:
                await forever()

        _ = tasks.spawn(ignore_once(), "stubborn")
        await asyncio.sleep(0)
        await tasks.close()
        assert len(tasks) == 0

    with caplog.at_level(logging.WARNING):
        stubborn()
    assert "stubborn does not end when cancelled" in caplog.text


class Stubborn:
    """Tasks that end only when they are released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def stay(self) -> None:
        while not self.released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.released.wait()


def test_a_task_that_never_ends_holds_its_owner_up_for_30_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    @virtually
    async def stuck() -> None:
        loop = asyncio.get_running_loop()
        tasks, stubborn = Tasks("test", on_stuck=heard.append), Stubborn()
        stays = [tasks.spawn(stubborn.stay(), name) for name in ("b", "a")]
        _ = tasks.spawn(forever(), "ends")
        await asyncio.sleep(0)
        begun = loop.time()
        assert await tasks.close() == ("a", "b")
        assert loop.time() - begun == pytest.approx(30.0)
        assert tasks.names() == ["a", "b"]
        assert await tasks.close() == ("a", "b")
        assert loop.time() - begun == pytest.approx(30.0), "a repeat does not wait again"
        stubborn.released.set()
        await asyncio.wait(stays)
        await asyncio.sleep(0)
        assert await tasks.close() == ()

    with caplog.at_level(logging.ERROR):
        stuck()
    assert heard == ["test: a, b still run 30 s after they were cancelled"]
    assert "a, b still run" in caplog.text


def test_one_of_two_that_close_does_not_wait_for_the_other_ones_task() -> None:
    @virtually
    async def both() -> None:
        tasks, stubborn = Tasks("test"), Stubborn()
        stays = tasks.spawn(stubborn.stay(), "stays")
        await asyncio.sleep(0)
        for left in await asyncio.gather(tasks.close(), tasks.close()):
            assert left == ("stays",)
        stubborn.released.set()
        await stays

    both()


def test_a_runner_is_closed() -> None:
    runner = asyncio.Runner()
    seen: list[asyncio.Task[None]] = []

    async def leave_one() -> None:
        seen.append(asyncio.ensure_future(forever()))
        await asyncio.sleep(0)

    runner.run(leave_one())
    close_runner(runner)
    assert seen[0].cancelled()
    with pytest.raises(RuntimeError):
        runner.get_loop()


def test_a_runner_with_a_task_that_never_ends_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.runtime.tasks._PATIENCE", 0.05)
    runner, stubborn = asyncio.Runner(), Stubborn()

    async def leave_one() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(stubborn.stay(), name="stubborn")
        await asyncio.sleep(0)
        return task

    task = runner.run(leave_one())
    with caplog.at_level(logging.ERROR):
        close_runner(runner)
    assert "the process ends although tasks still run: stubborn" in caplog.text
    assert not task.done()
    stubborn.released.set()
    runner.run(asyncio.wait_for(task, 10.0))
    runner.close()
