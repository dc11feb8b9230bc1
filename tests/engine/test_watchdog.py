"""Whether a core stands still: looks at given times."""

from __future__ import annotations

from pdserve.engine.watchdog import StallWatchdog
from pdserve.observe.heartbeat import HeartbeatReading

FAR = 1e9


def at(ticks: int, *, heard: int = 0, due: float = 0.0) -> HeartbeatReading:
    return HeartbeatReading(ticks, heard, due, "a test")


def stalls_at(
    watch: StallWatchdog, seen: HeartbeatReading, posted: int = 0, begin: float = 0.0
) -> float | None:
    """When, if it is looked at as often as it should be; None: not within a minute."""
    now = begin
    while now < begin + 60.0:
        now += watch.interval
        if watch.look(seen, posted, now):
            return now - begin
    return None


def test_a_core_at_work_that_does_not_tick_has_stalled_after_the_timeout():
    for timeout in (1.0, 10.0, 30.0):
        found = stalls_at(StallWatchdog(timeout, 0.0), at(1))
        assert found is not None
        assert timeout <= found <= timeout + 1.0


def test_a_core_that_rests_may_do_nothing():
    assert stalls_at(StallWatchdog(10.0, 0.0), at(1, due=FAR)) is None


def test_a_core_that_wanted_to_be_at_work_owes_progress_from_then_on():
    found = stalls_at(StallWatchdog(10.0, 0.0), at(1, due=20.0))
    assert found is not None
    assert 30.0 <= found <= 31.0


def test_commands_that_wait_are_work():
    watch = StallWatchdog(10.0, 0.0)
    assert stalls_at(watch, at(1, heard=5, due=FAR), posted=5) is None
    assert stalls_at(watch, at(1, heard=5, due=FAR), posted=6, begin=60.0) is not None


def test_every_tick_begins_anew():
    watch = StallWatchdog(10.0, 0.0)
    now = 0.0
    for ticks in range(100):
        for _ in range(18):
            now += watch.interval
            assert not watch.look(at(ticks), 0, now)
    assert watch.age > 8.0


def test_a_pause_of_the_one_who_looks_counts_as_little_as_it_can():
    """It was stopped, and perhaps the core with it: the next look shows."""
    watch = StallWatchdog(10.0, 0.0)
    now = 0.0
    for _ in range(9):
        now += 3600.0
        assert not watch.look(at(1), 0, now)
    assert watch.age <= 9.0
    assert not watch.look(at(2), 0, now + 3600.0)
    assert watch.age == 0.0


def test_without_a_timeout_it_only_measures():
    watch = StallWatchdog(0.0, 0.0)
    assert stalls_at(watch, at(1)) is None
    assert watch.age > 50.0


def test_a_core_without_work_is_looked_at_seldom_and_one_with_work_often():
    watch = StallWatchdog(10.0, 0.0)
    watch.look(at(1, due=FAR), 0, 0.25)
    assert watch.pause(at(1, due=FAR), 0, 0.25) == 9.75
    assert watch.pause(at(1, due=3.25), 0, 0.25) == 3.0
    assert watch.pause(at(1, due=FAR), 1, 0.25) <= watch.interval
    watch.look(at(1, due=FAR), 1, 0.25)
    assert watch.pause(at(1, due=FAR), 0, 0.25) <= watch.interval
