"""Threads that are shared fairly, jobs that end, and no thread that keeps anybody waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from pdserve.errors import DeadlineExceeded, Draining, Overloaded
from pdserve.text.fair_thread_pool import FairThreadPool


class Gate:
    """Work that takes until it is let through."""

    def __init__(self, name: str = "through", log: list[str] | None = None) -> None:
        self.name = name
        self.log = log
        self.running = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.running.set()
        assert self.open.wait(30)
        if self.log is not None:
            self.log.append(self.name)
        return self.name

    async def is_running(self) -> None:
        await asyncio.to_thread(self.running.wait, 30)


class Spin:
    """Python code that never ends by itself."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.running.set()
        try:
            while True:
                pass
        finally:
            self.ended.set()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def wait(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def finish(lane: FairThreadPool) -> None:
    lane.stop()
    async with asyncio.timeout(30):
        await lane.wait_quiet()
    assert not lane.end()


def start(lane: FairThreadPool, work, tenant: str = "", **options) -> asyncio.Task:
    return asyncio.ensure_future(lane.submit(work, tenant=tenant, **options))


async def test_one_tenants_queue_does_not_delay_another():
    """A spare thread begins the other tenant's job while the first one's jobs hold theirs."""
    lane = FairThreadPool("lane", 1, 100, spare=1)
    gates = [Gate() for _ in range(20)]
    flood = [start(lane, gate, "flood") for gate in gates]
    await gates[0].is_running()
    assert await lane.submit(lambda: "at once", tenant="other") == "at once"
    assert not gates[1].running.is_set()
    for gate in gates:
        gate.open.set()
    await asyncio.gather(*flood)
    await finish(lane)


async def test_without_a_spare_thread_tenants_take_turns():
    lane = FairThreadPool("lane", 1, 100)
    log: list[str] = []
    gates = [Gate(f"flood {number}", log) for number in range(5)]
    flood = [start(lane, gate, "flood") for gate in gates]
    await gates[0].is_running()
    other = start(lane, lambda: log.append("other"), "other")
    await asyncio.sleep(0)
    for gate in gates:
        gate.open.set()
    await asyncio.gather(other, *flood)
    assert log[:2] == ["flood 0", "other"]
    await finish(lane)


async def test_at_the_bound_the_longest_queue_makes_room():
    lane = FairThreadPool("lane", 1, 4)
    gate = Gate()
    flood = [start(lane, gate, "flood") for _ in range(4)]
    await gate.is_running()
    with pytest.raises(Overloaded, match="4 texts"):
        await lane.submit(gate, tenant="flood")
    other = start(lane, lambda: "other", "other")
    with pytest.raises(Overloaded, match="others go first"):
        await flood[3]
    gate.open.set()
    assert await other == "other"
    assert await asyncio.gather(*flood[:3]) == ["through"] * 3
    assert (lane.refused, lane.accepted) == (2, 5)
    await finish(lane)


async def test_a_first_job_is_never_refused():
    lane = FairThreadPool("lane", 1, 2)
    log: list[str] = []
    gates = [Gate(str(number), log) for number in range(2)]
    running = [start(lane, gate) for gate in gates]
    await gates[0].is_running()
    firsts = [start(lane, lambda: log.append("first"), first=True) for _ in range(5)]
    await asyncio.sleep(0)
    for gate in gates:
        gate.open.set()
    await asyncio.gather(*running, *firsts)
    assert log == ["0", *["first"] * 5, "1"]
    await finish(lane)


async def test_large_jobs_run_one_at_a_time():
    lane = FairThreadPool("lane", 2, 10, spare=2)
    large = [Gate(), Gate()]
    tasks = [start(lane, gate, str(number), large=True) for number, gate in enumerate(large)]
    await large[0].is_running()
    assert await lane.submit(lambda: "small") == "small"
    assert not large[1].running.is_set()
    large[0].open.set()
    await large[1].is_running()
    large[1].open.set()
    await asyncio.gather(*tasks)
    await finish(lane)


async def test_a_late_job_is_given_up_and_its_thread_replaced(caplog):
    clock, changes = Clock(), []
    lane = FairThreadPool(
        "lane", 1, 10, seconds=5.0, clock=clock, changed=lambda: changes.append(lane.stuck)
    )
    gate = Gate()
    late = start(lane, gate, "a")
    await gate.is_running()
    waiting = start(lane, lambda: "next", "a")
    await asyncio.sleep(0)
    lane.look()
    assert lane.stuck == 0
    clock.now = 5.1
    lane.look()
    with pytest.raises(DeadlineExceeded, match="took over 5 s"):
        await late
    assert await waiting == "next"
    assert (lane.stuck, lane.given_up, changes) == (1, 1, [1])
    assert "given up; its thread is replaced" in caplog.text
    gate.open.set()
    async with asyncio.timeout(30):
        while lane.stuck:  # noqa: ASYNC110 - a thread's end
            await asyncio.sleep(0.001)
    await finish(lane)


async def test_a_fault_in_telling_of_a_late_job_leaves_nobody_waiting():
    def faulty():
        raise ZeroDivisionError("a bug")

    clock = Clock()
    lane = FairThreadPool("lane", 2, 10, seconds=5.0, clock=clock, changed=faulty)
    gates = [Gate(), Gate()]
    late = [start(lane, gate, "a") for gate in gates]
    for gate in gates:
        await gate.is_running()
    clock.now = 5.1
    with pytest.raises(ZeroDivisionError):
        lane._tick(asyncio.get_running_loop())
    assert lane._watch is not None, "the next look comes"
    lane._watch.cancel()
    for each in late:
        with pytest.raises(DeadlineExceeded):
            await each
    lane._changed = lambda: None
    for gate in gates:
        gate.open.set()
    await finish(lane)


async def test_python_code_that_never_ends_is_ended():
    clock = Clock()
    lane = FairThreadPool("lane", 1, 10, seconds=5.0, clock=clock)
    spin = Spin()
    late = start(lane, spin)
    await wait(spin.running)
    clock.now = 6.0
    lane.look()
    with pytest.raises(DeadlineExceeded):
        await late
    await wait(spin.ended)
    assert await lane.submit(lambda: "next") == "next"
    await finish(lane)


async def test_a_tenant_with_stuck_threads_is_refused_and_no_other():
    clock = Clock()
    lane = FairThreadPool("lane", 2, 10, seconds=5.0, clock=clock, max_abandoned=4)
    gates = [Gate() for _ in range(2)]
    late = [start(lane, gate, "bad") for gate in gates]
    for gate in gates:
        await gate.is_running()
    clock.now = 6.0
    lane.look()
    assert [type(error) for error in await asyncio.gather(*late, return_exceptions=True)] == [
        DeadlineExceeded
    ] * 2
    with pytest.raises(Overloaded, match="past their deadline"):
        await lane.submit(lambda: "no", tenant="bad")
    assert await lane.submit(lambda: "yes", tenant="good") == "yes"
    for gate in gates:
        gate.open.set()
    await finish(lane)


async def test_the_number_of_replaced_threads_is_bounded():
    clock = Clock()
    lane = FairThreadPool("lane", 1, 10, seconds=5.0, clock=clock, max_abandoned=1)
    gates = []
    for number in range(2):
        gate = Gate()
        gates.append(gate)
        late = start(lane, gate, str(number))
        await gate.is_running()
        clock.now += 6.0
        lane.look()
        lane.look()
        with pytest.raises(DeadlineExceeded):
            await late
    assert (lane.stuck, lane.given_up) == (1, 2)
    waiting = start(lane, lambda: "next", "2")
    await asyncio.sleep(0)
    assert not waiting.done()
    gates[1].open.set()  # it kept its place
    assert await waiting == "next"
    gates[0].open.set()
    await finish(lane)


async def test_what_does_not_end_is_left_behind():
    lane = FairThreadPool("lane", 1, 10)
    gate = Gate()
    running, waiting = start(lane, gate), start(lane, gate)
    await gate.is_running()
    lane.stop()
    with pytest.raises(Draining):
        await waiting
    assert lane.end() == 1
    with pytest.raises(Draining):
        await running
    with pytest.raises(Draining):
        await lane.submit(gate)
    gate.open.set()


STUCK = """
import asyncio, ctypes, threading
from pdserve.text.text_pool import TextPool
async def main():
    pool, running = TextPool(), threading.Event()
    def stuck():
        running.set()
        threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()
    job = asyncio.ensure_future(pool.run(10**6, stuck))
    await asyncio.to_thread(running.wait)
    print(await pool.close(0.01))
    await asyncio.gather(job, return_exceptions=True)
asyncio.run(main())
"""


def test_a_process_with_a_stuck_thread_ends():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
