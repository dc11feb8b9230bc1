"""The fake actuator keeps to the port, and its faults are those that it names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.messages.planner import Kind
from pdserve.planner.actuators.base import KEEP_ENDED, ActuatorTransient
from pdserve.testing.actuators.fake import FakeActuator, FakeHosts
from pdserve.testing.actuators.suite import ActuatorSuite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.planner.actuators.base import Actuator


class FakeLab:
    """The fake on the loop's clock, with short times."""

    kind = "gpu"
    up = "running"
    deadline = 0.1
    patience = 5.0
    pause = 0.01
    cannot: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.hosts = FakeHosts(
            asyncio.get_running_loop().time, (Kind(name="gpu", slots=2),), boot=0.03, ending=0.01
        )
        self.actuator: Actuator = FakeActuator(self.hosts, deadline=self.deadline)

    async def reopen(self) -> Actuator:
        return FakeActuator(self.hosts, deadline=self.deadline)

    async def processes(self, change: str) -> int:
        self.hosts.advance()
        worker = self.hosts.workers.get(change)
        return int(worker is not None and worker.ended is None)

    async def die(self, change: str) -> None:
        self.hosts.die(change)

    async def never_ready(self) -> None:
        self.hosts.faults.never_ready = True

    async def start_fails(self) -> None:
        self.hosts.faults.start_fails = "no such image"

    async def deny(self) -> None:
        self.hosts.faults.denied = "user nobody may not start workers"

    async def silence(self) -> None:
        self.hosts.faults.silent = True


class TestFake(ActuatorSuite):
    @pytest.fixture
    async def lab(self) -> FakeLab:
        return FakeLab()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hosts(clock: Clock) -> FakeHosts:
    return FakeHosts(clock, (Kind(name="gpu", slots=2),), pending=5.0, boot=10.0, ending=3.0)


async def state(hosts: FakeHosts, change: str = "a1") -> str:
    (found,) = [one for one in await FakeActuator(hosts).list() if one.change == change]
    return found.state


async def test_a_life_by_the_clock(hosts: FakeHosts, clock: Clock) -> None:
    actuator = FakeActuator(hosts)
    asked = await actuator.start("gpu", "decode", "a1")
    assert (asked.state, asked.expected) == ("pending", 5.0)
    clock.now += 5.0
    assert await state(hosts) == "booting"
    clock.now += 10.0
    assert await state(hosts) == "running"
    assert [one.mode for one in hosts.serving()] == ["decode"]
    await actuator.stop("a1", 30.0)
    assert await state(hosts) == "ending"
    assert len(hosts.serving()) == 1
    clock.now += 3.0
    assert await state(hosts) == "ended"
    clock.now += KEEP_ENDED + 1.0
    assert not await actuator.list()


async def test_a_shorter_grace_counts_and_a_longer_one_does_not(
    hosts: FakeHosts, clock: Clock
) -> None:
    hosts.ending = 100.0
    actuator = FakeActuator(hosts)
    await actuator.start("gpu", "decode", "a1")
    clock.now += 15.0
    await actuator.stop("a1", 20.0)
    await actuator.stop("a1", 60.0)
    clock.now += 10.0
    await actuator.stop("a1", 5.0)
    clock.now += 4.9
    assert await state(hosts) == "ending"
    clock.now += 0.2
    assert await state(hosts) == "ended"


async def test_what_waits_is_withdrawn_at_once(hosts: FakeHosts) -> None:
    actuator = FakeActuator(hosts)
    await actuator.start("gpu", "decode", "a1")
    await actuator.stop("a1", 60.0)
    assert await state(hosts) == "ended"


async def test_a_lost_answer_started_one_worker(hosts: FakeHosts) -> None:
    actuator = FakeActuator(hosts)
    hosts.faults.lost_answers = True
    for _ in range(2):
        with pytest.raises(ActuatorTransient, match="lost"):
            await actuator.start("gpu", "decode", "a1")
    assert hosts.starts == 1


async def test_the_other_faults(hosts: FakeHosts, clock: Clock) -> None:
    actuator = FakeActuator(hosts)
    hosts.faults.wrong_mode = "prefill"
    await actuator.start("gpu", "decode", "a1")
    clock.now += 15.0
    assert [one.mode for one in hosts.serving()] == ["prefill"]
    hosts.faults.unknown = True
    assert await state(hosts) == "unknown"
    hosts.faults.unknown = False
    hosts.die("a1")
    hosts.faults.lies = True
    assert await state(hosts) == "running"
    assert not hosts.serving()
    hosts.faults.stuck_pending = "QOSMaxJobsPerUserLimit"
    assert (await actuator.start("gpu", "decode", "a2")).reason == "QOSMaxJobsPerUserLimit"
    clock.now += 1e6
    assert await state(hosts, "a2") == "pending"


async def test_a_time_limit_is_told_and_kept(hosts: FakeHosts, clock: Clock) -> None:
    hosts.hard_end = 60.0
    actuator = FakeActuator(hosts)
    assert (await actuator.start("gpu", "decode", "a1")).hard_end == 60.0
    clock.now += 60.0
    assert await state(hosts) == "ended"
