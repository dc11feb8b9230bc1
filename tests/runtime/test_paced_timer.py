"""How often a function is called, on a loop with virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.net.timers import Timers
from pdserve.runtime.paced_timer import IDLE, PacedTimer
from pdserve.testing.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Callable


class Owner:
    """A node as far as a timer needs it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.timers = Timers(self._loop)
        self.now: Callable[[], float] = self._loop.time
        self.calls: list[float] = []
        self.work = False

    def look(self) -> bool:
        self.calls.append(self.now())
        return self.work

    def between(self, low: float, high: float) -> int:
        return sum(low < moment <= high for moment in self.calls)


def paced(owner: Any) -> PacedTimer:
    timer = PacedTimer(owner.timers, 0.1, owner.look)
    timer.start()
    return timer


def test_without_work_calls_become_seldom_and_fall_together() -> None:
    async def scene() -> None:
        first, second = Owner(), Owner()
        paced(first)
        await asyncio.sleep(0.37)
        paced(second)
        begun = first.now()
        await asyncio.sleep(45.0)
        for owner in (first, second):
            assert owner.between(begun, begun + 1.0) >= 9
            late = [moment for moment in owner.calls if moment > begun + 5.0]
            assert 3 <= len(late) <= 5
            assert all(moment % IDLE == pytest.approx(0.0, abs=0.001) for moment in late)
            owner.timers.close()

    run(scene())


def test_work_is_seen_soon_and_lasts() -> None:
    async def scene() -> None:
        owner = Owner()
        timer = paced(owner)
        await asyncio.sleep(10.25)
        owner.work = True
        timer.wake()
        timer.wake()
        woken = owner.now()
        await asyncio.sleep(3.0)
        assert owner.between(woken, woken + 0.12) == 1
        assert 25 <= owner.between(woken, woken + 3.0) <= 30
        owner.work = False
        await asyncio.sleep(10.0)
        assert 18 <= owner.between(woken + 3.0, woken + 5.0) <= 21
        assert owner.between(woken + 6.0, woken + 12.0) <= 7
        owner.timers.close()

    run(scene())


def test_work_that_only_the_call_sees_makes_it_frequent_again() -> None:
    async def scene() -> None:
        owner = Owner()
        paced(owner)
        await asyncio.sleep(2 * IDLE - 0.25)
        owner.work = True
        begun = owner.now()
        await asyncio.sleep(3.0)
        assert owner.between(begun, begun + 3.0) >= 19
        owner.timers.close()

    run(scene())


def test_a_call_that_fails_is_made_again() -> None:
    async def scene() -> None:
        owner = Owner()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        def fail() -> bool:
            owner.look()
            if len(owner.calls) > 1:
                raise RuntimeError("a bug")
            return True

        PacedTimer(owner.timers, 0.1, fail).start()
        await asyncio.sleep(1.0)
        assert len(owner.calls) >= 9
        owner.timers.close()

    run(scene())


def test_a_stopped_timer_calls_no_more() -> None:
    async def scene() -> None:
        owner = Owner()
        timer = paced(owner)
        await asyncio.sleep(5.0)
        timer.stop()
        calls = len(owner.calls)
        assert not timer.wake()
        await asyncio.sleep(3 * IDLE)
        assert len(owner.calls) == calls
        owner.timers.close()

    run(scene())
