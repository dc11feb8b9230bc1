"""A semaphore whose places tenants take in turn; with one place, a lock."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import Overloaded
from pdserve.frontend.fair_semaphore import FairSemaphore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def log():
    return []


class Taking:
    """Tasks that hold places."""

    def __init__(self, log: list[str], places: int = 1) -> None:
        self.turns = FairSemaphore(places, 4, lambda: Overloaded("too many wait"), Clock())
        self.log = log

    def __call__(
        self, tenant: str, name: str, until: asyncio.Event | None = None
    ) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.hold(tenant, name, until))

    async def hold(self, tenant: str, name: str, until: asyncio.Event | None) -> None:
        async with self.turns.of(tenant):
            self.log.append(name)
            if until is not None:
                await until.wait()


@pytest.fixture
def take(log):
    taking = Taking(log)
    yield taking
    assert not taking.turns.running
    assert not taking.turns._queue._tenants


async def idle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_queue_of_one_tenant_delays_another_by_one_turn(take, log):
    done = asyncio.Event()
    first = take("flood", "flood 0", done)
    await idle()
    others = [take("flood", f"flood {number}") for number in (1, 2, 3)]
    await idle()
    others.append(take("other", "other"))
    await idle()
    done.set()
    await asyncio.gather(first, *others)
    assert log == ["flood 0", "other", "flood 1", "flood 2", "flood 3"]


async def test_at_the_bound_the_tenant_with_most_pays(take, log):
    done = asyncio.Event()
    tasks = [take("flood", f"flood {number}", done) for number in range(5)]
    await idle()
    refused = take("flood", "flood 5")
    with pytest.raises(Overloaded):
        await refused
    other = take("other", "other")
    with pytest.raises(Overloaded):
        await tasks[4]
    done.set()
    await asyncio.gather(*tasks[:4], other)
    assert sorted(log) == ["flood 0", "flood 1", "flood 2", "flood 3", "other"]


async def test_who_waits_may_leave(take, log):
    done = asyncio.Event()
    first, second, third = (take("a", str(number), done) for number in range(3))
    await idle()
    second.cancel()
    await idle()
    assert second.cancelled()
    done.set()
    await asyncio.gather(first, third)
    assert log == ["0", "2"]


async def test_who_is_cancelled_as_its_turn_comes_passes_it_on(take, log):
    done = asyncio.Event()
    first, second, third = (take("a", str(number), done) for number in range(3))
    await idle()
    done.set()
    await asyncio.sleep(0)  # the first one goes on
    second.cancel()
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert log in (["0", "2"], ["0", "1", "2"])


async def test_who_was_cancelled_just_before_is_passed_over(take, log):
    done = asyncio.Event()
    first, second, third = (take("a", str(number), done) for number in range(3))
    await idle()
    done.set()
    second.cancel()  # it hears of it only after the first has given the lock back
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert log == ["0", "2"]


async def test_who_was_cancelled_just_before_makes_no_room(take, log):
    done = asyncio.Event()
    tasks = [take("flood", f"flood {number}", done) for number in range(5)]
    await idle()
    tasks[4].cancel()
    other = take("other", "other")
    await idle()
    done.set()
    await asyncio.gather(*tasks[:4], other)
    assert tasks[4].cancelled()


async def test_who_is_refused_and_cancelled_at_once_gives_no_lock_back(take, log):
    done = asyncio.Event()
    tasks = [take("flood", f"flood {number}", done) for number in range(5)]
    await idle()
    other = take("other", "other")
    await asyncio.sleep(0)  # the newest of the flood is refused, and has not heard of it
    tasks[4].cancel()
    await asyncio.gather(tasks[4], return_exceptions=True)
    assert take.turns.running
    assert log == ["flood 0"]
    done.set()
    await asyncio.gather(*tasks[:4], other)


async def test_what_fails_gives_the_lock_back(take):
    with pytest.raises(RuntimeError):
        async with take.turns.of("a"):
            raise RuntimeError
    async with take.turns.of("b"):
        pass


async def test_one_tenant_leaves_places_to_others(log):
    taking = Taking(log, places=8)
    done = asyncio.Event()
    flood = [taking("flood", f"flood {number}", done) for number in range(6)]
    await idle()
    assert (taking.turns.running_of("flood"), taking.turns.waiting) == (4, 2)
    others = [taking(f"other {number}", f"other {number}", done) for number in range(4)]
    await idle()
    assert (taking.turns.running, taking.turns.waiting) == (8, 2)
    done.set()
    await asyncio.gather(*flood, *others)
    assert (taking.turns.running, taking.turns.waiting) == (0, 0)
    assert not taking.turns._queue._tenants


async def test_a_full_queue_keeps_no_one_from_a_free_place(log):
    taking = Taking(log, places=2)
    done = asyncio.Event()
    flood = [taking("flood", f"flood {number}", done) for number in range(5)]
    await idle()
    assert (taking.turns.running, taking.turns.waiting) == (1, 4)
    other = taking("other", "other", done)
    await idle()
    assert log == ["flood 0", "other"]
    assert taking.turns.waiting == 4
    done.set()
    await asyncio.gather(*flood, other)
