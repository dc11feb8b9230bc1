import asyncio
import time

from pdserve.observe.loop_lag import IDLE_INTERVAL, LagWindow, LoopLagMonitor, SamplingPace
from pdserve.observe.metrics import TOKEN_LATENCY_BUCKETS, Metrics


def test_the_maximum_is_forgotten_after_two_windows():
    window = LagWindow(now=0.0, window=60.0)
    window.add(0.5, 1.0)
    assert window.max == 0.5
    window.add(0.1, 61.0)
    assert window.max == 0.5
    window.add(0.1, 122.0)
    assert window.max == 0.1


def test_a_long_silence_forgets_both_windows_at_once():
    window = LagWindow(now=0.0, window=60.0)
    window.add(0.5, 1.0)
    window.add(0.1, 500.0)
    assert window.max == 0.1


def test_a_process_that_does_nothing_is_sampled_less_and_one_that_begins_at_once_more():
    pace, now, used = SamplingPace(0.05, 0.0, 0.0), 0.0, 0.0
    found: list[float] = []
    for tick in range(120):
        now += found[-1] if found else 0.05
        used += 0.05 if tick >= 100 else 0.0001
        found.append(pace.next(now, used))
    assert set(found[:39]) == {0.05}
    assert set(found[39:100]) == {IDLE_INTERVAL}
    assert set(found[101:]) == {0.05}


async def test_a_blocked_loop_shows_as_lag():
    metrics = Metrics()
    monitor = LoopLagMonitor(metrics, interval=0.005)
    monitor.start()
    await asyncio.sleep(0.02)
    before = metrics.event_loop_lag.count
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:  # what must never happen in the product
        pass
    await asyncio.sleep(0.02)
    monitor.stop()
    assert before > 0
    assert metrics.event_loop_lag_max.value >= 0.09
    counts = dict(zip(TOKEN_LATENCY_BUCKETS, metrics.event_loop_lag.counts, strict=False))
    assert sum(count for bound, count in counts.items() if bound > 0.075) >= 1


async def test_nothing_is_measured_after_stop():
    metrics = Metrics()
    monitor = LoopLagMonitor(metrics, interval=0.001)
    monitor.start()
    monitor.start()
    monitor.stop()
    monitor.stop()
    count = metrics.event_loop_lag.count
    await asyncio.sleep(0.01)
    assert metrics.event_loop_lag.count == count


async def test_tasks_are_counted_at_each_scrape():
    metrics = Metrics()
    monitor = LoopLagMonitor(metrics)
    monitor.start()
    before = metrics.event_loop_tasks.value
    task = asyncio.create_task(asyncio.sleep(60))
    assert metrics.event_loop_tasks.value == before + 1
    task.cancel()
    await asyncio.wait({task})
    assert metrics.event_loop_tasks.value == before
    monitor.stop()
