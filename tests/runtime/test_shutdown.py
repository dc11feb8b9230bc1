"""Phases happen in order, whatever becomes of each; what overran or stayed is named."""

from __future__ import annotations

import asyncio

from pdserve.runtime.shutdown import Phase, shut_down
from tests.net.world import virtually


@virtually
async def test_all_in_order() -> None:
    log: list[str] = []

    def phase(name: str) -> Phase:
        async def work() -> None:
            await asyncio.sleep(0.5)
            log.append(name)

        return Phase(name, work, 1.0)

    names = ["gate", "drain", "leave", "close"]
    report = await shut_down([phase(name) for name in names])
    assert log == names
    assert report.clean


@virtually
async def test_what_overruns_or_fails_is_named_and_the_rest_happens() -> None:
    log: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            log.append("drain was cut short")

    async def broken() -> None:
        raise ValueError("broken on purpose")

    async def fine() -> None:
        log.append("closed")

    loop = asyncio.get_running_loop()
    before = loop.time()
    report = await shut_down(
        [Phase("drain", slow, 3.0), Phase("leave", broken, 1.0), Phase("close", fine, 1.0)],
        left=lambda: ["socket 5"],
    )
    assert loop.time() - before < 3.1
    assert report.overran == ["drain"]
    assert list(report.failed) == ["leave"]
    assert report.left == ("socket 5",)
    assert log == ["drain was cut short", "closed"]
    assert not report.clean


@virtually
async def test_a_phase_that_ignores_its_end_is_left_behind_by_name() -> None:
    stubborn: list[asyncio.Task] = []

    async def ignore() -> None:
        task = asyncio.current_task()
        assert task is not None
        stubborn.append(task)
        for _ in range(2):
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue

    report = await shut_down([Phase("drain", ignore, 1.0)])
    assert report.overran == ["drain"]
    assert report.left == ("task drain",)
    stubborn[0].cancel()
    await asyncio.wait(stubborn)


@virtually
async def test_cancelling_it_cancels_the_present_phase() -> None:
    log: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            log.append("cancelled")

    async def later() -> None:
        log.append("later")

    task = asyncio.ensure_future(shut_down([Phase("drain", slow, 1e6), Phase("close", later, 1.0)]))
    await asyncio.sleep(1.0)
    task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0.1)
    assert task.cancelled()
    assert log == ["cancelled"]
