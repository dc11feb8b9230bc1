"""A loop of many processes: order, death, standing still, running in circles."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import pytest

from tests.worlds.loop import Livelock, VirtualProcess, WorldLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


@pytest.fixture
def loop(seed: int) -> Iterator[WorldLoop]:
    loop = WorldLoop(random.Random(seed))
    yield loop
    loop.calm()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def orders(seed: int, processes: int) -> list[tuple[int, int]]:
    """In which order (process, number) run that are ready together."""
    loop = WorldLoop(random.Random(seed))
    ran: list[tuple[int, int]] = []

    async def main() -> None:
        for number in range(10):
            for index, process in enumerate(those):
                context = process.context.copy()
                loop.call_soon(ran.append, (index, number), context=context)
        await asyncio.sleep(1.0)

    those = [VirtualProcess(str(index)) for index in range(processes)]
    loop.run_until_complete(main())
    loop.close()
    return ran


def test_a_process_keeps_its_order_and_seeds_mix_processes(seed: int) -> None:
    ran = orders(seed, 4)
    assert ran == orders(seed, 4)
    assert sorted(ran) == sorted((index, number) for index in range(4) for number in range(10))
    for index in range(4):
        assert [n for i, n in ran if i == index] == list(range(10))
    assert len({tuple(orders(one, 4)) for one in range(20)}) > 1


def test_a_killed_process_runs_no_more(loop: WorldLoop) -> None:
    process, done = VirtualProcess("p"), []

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
            done.append("work")
        finally:
            done.append("clean-up")

    async def main() -> None:
        loop.start(process, work(), "work")
        await asyncio.sleep(0.5)
        loop.kill(process)
        await asyncio.sleep(5.0)

    loop.run_until_complete(main())
    assert done == []
    assert [task.get_name() for task in process.remains] == ["work"]
    assert process.dropped == 1
    loop.bury(process)
    assert done == ["clean-up"]


def test_a_paused_process_goes_on_where_it_was(loop: WorldLoop) -> None:
    process, ticks = VirtualProcess("p"), []

    async def work() -> None:
        while True:
            await asyncio.sleep(1.0)
            ticks.append(loop.time())

    async def main() -> None:
        loop.start(process, work(), "work")
        await asyncio.sleep(2.5)
        loop.pause(process)
        await asyncio.sleep(10.0)
        assert loop.resume(process) == 1
        await asyncio.sleep(1.5)
        loop.kill(process)

    loop.run_until_complete(main())
    assert ticks == pytest.approx([1.0, 2.0, 12.5, 13.5])
    loop.bury(process)


def test_what_a_process_owns_can_be_listed(loop: WorldLoop) -> None:
    process = VirtualProcess("p")

    async def work() -> None:
        asyncio.get_running_loop().call_later(5.0, print)
        inner = asyncio.ensure_future(asyncio.sleep(1.0))
        await inner

    async def main() -> None:
        task = loop.start(process, work(), "work")
        await asyncio.sleep(0.1)
        assert len(loop.tasks_of(process)) == 2
        assert len(loop.timers_of(process)) == 2
        await task
        assert loop.tasks_of(process) == []
        assert len(loop.timers_of(process)) == 1

    loop.run_until_complete(main())


def test_who_waits_for_a_moment_does_not_wake_before_it(loop: WorldLoop) -> None:
    """Several that look at the clock, each a little too early, would keep each other busy: found
    by the world of seed 5234."""
    woken = 0

    async def wait(until: float) -> None:
        nonlocal woken
        while loop.time() < until:
            await asyncio.sleep(until - loop.time())
            woken += 1

    async def main() -> None:
        for number in range(1, 101):
            moments = (number / 7, number / 7 + 4e-7, number / 7 + 8e-7)
            await asyncio.gather(*map(wait, moments))

    loop.run_until_complete(main())
    assert woken == 300


def test_running_in_circles_is_an_error(loop: WorldLoop) -> None:
    async def circle() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    def run(work: Coroutine[object, object, None]) -> None:
        loop.run_until_complete(work)

    with pytest.raises(Livelock, match="without a tick"):
        run(circle())
