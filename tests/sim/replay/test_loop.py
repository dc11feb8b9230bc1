"""The loop of a replay."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.sim.replay.loop import ReplayLoop
from pdserve.testing.virtual_time import Deadlock


def run(work):
    loop = ReplayLoop()
    try:
        return loop.run_until_complete(work), loop
    finally:
        loop.close()


def test_time_jumps_and_nobody_wakes_early() -> None:
    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = []
        for step in range(1, 2000):
            until = loop.time() + step / 7
            await asyncio.sleep(step / 7)
            assert loop.time() >= until
            seen.append(loop.time())
        return seen

    seen, _ = run(work())
    assert seen[-1] == pytest.approx(1999 * 2000 / 2 / 7, rel=0.01)


def test_what_can_never_end_is_said() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(work())


def test_what_nobody_catches_is_noted() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    _, loop = run(work())
    assert len(loop.problems) == 1
    assert "ZeroDivisionError" in loop.problems[0]
