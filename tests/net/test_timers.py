"""Deadlines come never early, at most a tick late, in a fixed order, with one timer of the loop."""

from __future__ import annotations

import asyncio
import tracemalloc
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from pdserve.net.timers import TICK, Timers, TimerWheel
from pdserve.testing import virtual_time


class Entry:
    def __init__(self, name: int = 0) -> None:
        self.name = name
        self.tick = 0
        self.expired = 0

    def expire(self) -> None:
        self.expired += 1


@given(
    st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=60),
    st.lists(st.floats(0, 2), max_size=10),
    st.sampled_from((0, 3, 64)),
)
def test_every_entry_expires_in_its_tick_unless_it_was_taken_back(entries, looks, few) -> None:
    with patch("pdserve.net.timers._FEW", few):
        _expire(entries, looks)


def _expire(entries: list[tuple[float, bool]], looks: list[float]) -> None:
    wheel = TimerWheel()
    kept = {}
    for number, (when, keep) in enumerate(entries):
        entry = Entry(number)
        wheel.add(entry, when)
        if keep:
            kept[entry] = when
        else:
            wheel.remove(entry)
            wheel.remove(entry)
    assert len(wheel) == len(kept)
    for now in sorted(looks):
        for expired in wheel.due(now):
            assert isinstance(expired, Entry)
            assert kept.pop(expired) < now + 1e-9
        assert all(when > now - TICK - 1e-9 for when in kept.values())
    for expired in wheel.due(10.0):
        assert isinstance(expired, Entry)
        del kept[expired]
    assert not kept
    assert wheel.next() is None


def test_entries_of_one_tick_expire_in_the_order_they_came() -> None:
    wheel = TimerWheel()
    entries = [Entry(number) for number in range(20)]
    for entry in entries:
        wheel.add(entry, 1.0)
    assert wheel.due(2.0) == entries


def test_the_loop_calls_at_the_right_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = Timers(loop)
        called: list[tuple[str, float]] = []
        for name, delay in (("late", 0.5), ("early", 0.1), ("never", 0.2)):
            timer = timers.call_later(
                delay,
                lambda name=name: called.append((name, loop.time())),  # type: ignore[misc]
            )
            if name == "never":
                timer.cancel()

        def chain() -> None:
            timers.call_later(0.05, lambda: called.append(("chained", loop.time())))

        timers.call_at(0.3, chain)
        await asyncio.sleep(1.0)
        assert [name for name, _ in called] == ["early", "chained", "late"]
        for (_, at), due in zip(called, (0.1, 0.36, 0.5), strict=True):
            assert due <= at + 1e-9 <= due + 3 * TICK
        assert len(timers) == 0

    virtual_time.run(main())


def test_an_earlier_deadline_moves_the_timer_forward() -> None:
    async def main() -> None:
        timers = Timers(asyncio.get_running_loop())
        late, early = Entry(), Entry()
        timers.add(late, 5.0)
        timers.add(early, 0.1)
        await asyncio.sleep(0.2)
        assert (early.expired, late.expired) == (1, 0)
        timers.remove(late)
        await asyncio.sleep(10.0)
        assert late.expired == 0

    virtual_time.run(main())


def test_after_close_nothing_expires() -> None:
    async def main() -> None:
        timers = Timers(asyncio.get_running_loop())
        entry = Entry()
        timers.add(entry, 0.1)
        timers.close()
        timers.add(Entry(), 0.05)
        await asyncio.sleep(1.0)
        assert entry.expired == 0

    virtual_time.run(main())


def test_one_that_raises_stops_neither_the_others_nor_the_clock() -> None:
    async def main() -> list[str]:
        timers = Timers(asyncio.get_running_loop())
        heard: list[str] = []
        timers.call_later(1.0, lambda: heard.append("before"))
        timers.call_later(1.0, lambda: 1 // 0)  # type: ignore[arg-type]
        timers.call_later(1.0, lambda: heard.append("after"))
        timers.call_later(2.0, lambda: heard.append("later"))
        await asyncio.sleep(3.0)
        assert len(timers) == 0
        timers.close()
        return heard

    loop = virtual_time.VirtualTimeLoop()
    problems: list[object] = []
    loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))
    try:
        assert loop.run_until_complete(main()) == ["before", "after", "later"]
    finally:
        loop.close()
    assert [type(problem) for problem in problems] == [ZeroDivisionError]


def test_a_deadline_taken_back_leaves_next_to_nothing():
    """Most are: of every request, for minutes ahead, each at a tick of its own."""
    wheel = TimerWheel()
    count = 5_000
    tracemalloc.start()
    for number in range(count):
        entry = Entry()
        wheel.add(entry, 600 + number * TICK)
        wheel.remove(entry)
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left / count < 200
    again = Entry()
    wheel.add(again, 600.0)
    assert len(wheel) == 1
    assert wheel.due(601.0) == [again]


def test_a_cancelled_timer_is_forgotten_at_once():
    loop = virtual_time.VirtualTimeLoop()
    try:
        timers = Timers(loop)
        timer = timers.call_later(600.0, lambda: None)
        assert len(timers) == 1
        timer.cancel()
        timer.cancel()
        assert len(timers) == 0
        timers.close()
    finally:
        loop.close()


def test_ticks_whose_deadlines_were_all_taken_back_are_forgotten():
    """Else what was used of fifteen minutes' ticks would stay for as long: 90,000 of them."""
    wheel = TimerWheel()
    last = Entry()
    wheel.add(last, 900.0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for tick in range(50_000):
        entry = Entry()
        wheel.add(entry, 300.0 + tick * TICK)
        wheel.remove(entry)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 50_000
    assert wheel.due(899.0) == []
    assert wheel.due(900.1) == [last]
