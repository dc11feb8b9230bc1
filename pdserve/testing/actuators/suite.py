"""Tests that an actuator keeps to `pdserve.planner.actuators.base.Actuator`: a suite to inherit.

    class TestMyActuator(ActuatorSuite):
        @pytest.fixture
        async def lab(self) -> AsyncIterator[ActuatorLab]:
            ...

The lab is an environment with two slots of one kind, and ways to make it fail. The suite needs
pytest with pytest-asyncio in auto mode. A lab that cannot cause a fault names it in `cannot`, and
the test of that fault is skipped with these words.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import pytest

from pdserve.planner.actuators.base import (
    ActuatorDenied,
    ActuatorExhausted,
    ActuatorTransient,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance
    from pdserve.planner.actuators.base import Actuator

__all__ = ["ActuatorLab", "ActuatorSuite"]

ENDED: Final = ("ended", "failed")
LIVE: Final = ("pending", "booting", "running")


class ActuatorLab(Protocol):
    """One environment with its actuator. It begins without instances."""

    actuator: Actuator
    kind: str
    """A kind with two slots."""
    up: str
    """What it says of a worker that runs: `running`, or `booting` if it does not know when a worker
    has joined."""
    deadline: Seconds
    """What the actuator was given."""
    patience: Seconds
    """How long a worker may take to come or to go."""
    pause: Seconds
    """Between two looks at the list."""
    cannot: Mapping[str, str]
    """By fault (the names of the methods below): why this lab cannot cause it."""

    async def reopen(self) -> Actuator:
        """Returns a new actuator over the same environment, as a later planner has it."""
        ...

    async def processes(self, change: str) -> int:
        """Returns how many processes the environment really runs for a change."""
        ...

    async def die(self, change: str) -> None:
        """Ends a worker from outside, as a crash does."""
        ...

    async def never_ready(self) -> None:
        """Workers started from now on never join."""
        ...

    async def start_fails(self) -> None:
        """Workers started from now on cannot be run."""
        ...

    async def deny(self) -> None:
        """The environment refuses every order from now on."""
        ...

    async def silence(self) -> None:
        """The environment does not answer from now on."""
        ...


class ActuatorSuite:
    """Subclass it as `Test…` with a fixture `lab`."""

    # ------------------------------------------------------------------ tools

    async def find(self, lab: ActuatorLab, change: str) -> Instance | None:
        """The listed instance of a change; there is one at most."""
        found = [one for one in await lab.actuator.list() if one.change == change]
        assert len(found) <= 1, f"{change} is listed {len(found)} times"
        return found[0] if found else None

    async def until(self, lab: ActuatorLab, change: str, states: Collection[str]) -> Instance:
        """Waits until an instance has one of the states."""
        found = None
        async with asyncio.timeout(lab.patience):
            while found is None or found.state not in states:
                if found is not None and found.state in ENDED:
                    break
                await asyncio.sleep(lab.pause)
                found = await self.find(lab, change)
        assert found is not None
        assert found.state in states, f"{found.state}: {found.reason}"
        return found

    async def one_runs(self, lab: ActuatorLab, change: str) -> None:
        """Waits until the environment runs something for a change: that is one process."""
        async with asyncio.timeout(lab.patience):
            while not (count := await lab.processes(change)):  # noqa: ASYNC110
                await asyncio.sleep(lab.pause)
        assert count == 1, f"{change} runs {count} times"

    def need(self, lab: ActuatorLab, fault: str) -> None:
        """Skips a test whose fault the lab cannot cause."""
        if fault in lab.cannot:
            pytest.skip(lab.cannot[fault])

    # ------------------------------------------------------------------ starting

    async def test_kinds_are_named_and_counted(self, lab: ActuatorLab) -> None:
        kinds = [one for one in await lab.actuator.kinds() if one.name == lab.kind]
        assert [(one.actuator, one.slots) for one in kinds] == [(lab.actuator.name, 2)]

    async def test_a_worker_comes_and_goes(self, lab: ActuatorLab) -> None:
        asked = await lab.actuator.start(lab.kind, "aggregated", "a1")
        assert (asked.change, asked.kind, asked.actuator) == ("a1", lab.kind, lab.actuator.name)
        assert asked.state in LIVE
        running = await self.until(lab, "a1", (lab.up,))
        assert running.ref, "an operator has to find it"
        await self.one_runs(lab, "a1")
        await lab.actuator.stop("a1", lab.patience)
        assert (await self.until(lab, "a1", ENDED)).state == "ended"
        assert await lab.processes("a1") == 0

    async def test_a_change_starts_one_worker(self, lab: ActuatorLab) -> None:
        for _ in range(3):
            await lab.actuator.start(lab.kind, "aggregated", "a1")
        assert len(await lab.actuator.list()) == 1
        await self.until(lab, "a1", (lab.up,))
        await self.one_runs(lab, "a1")

    async def test_a_change_that_is_asked_for_twice_at_once_starts_one(
        self, lab: ActuatorLab
    ) -> None:
        order = (lab.kind, "aggregated", "a1")
        both = await asyncio.gather(lab.actuator.start(*order), lab.actuator.start(*order))
        assert {one.change for one in both} == {"a1"}
        assert len({one.ref for one in both if one.ref}) <= 1
        assert len(await lab.actuator.list()) == 1

    async def test_a_later_planner_finds_it_and_starts_no_second(self, lab: ActuatorLab) -> None:
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        lab.actuator = await lab.reopen()
        assert (await self.until(lab, "a1", (lab.up,))).kind == lab.kind
        assert (await lab.actuator.start(lab.kind, "aggregated", "a1")).state == lab.up
        await self.one_runs(lab, "a1")

    async def test_an_ended_change_is_not_started_again(self, lab: ActuatorLab) -> None:
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        await lab.actuator.stop("a1", 0.0)
        await self.until(lab, "a1", ENDED)
        assert (await lab.actuator.start(lab.kind, "aggregated", "a1")).state in ENDED
        assert await lab.processes("a1") == 0

    # ------------------------------------------------------------------ refusing

    async def test_no_more_than_there_are_slots(self, lab: ActuatorLab) -> None:
        for change in ("a1", "a2"):
            await lab.actuator.start(lab.kind, "aggregated", change)
        with pytest.raises(ActuatorExhausted):
            await lab.actuator.start(lab.kind, "aggregated", "a3")
        assert await self.find(lab, "a3") is None
        await lab.actuator.stop("a1", 0.0)
        await self.until(lab, "a1", ENDED)
        assert (await lab.actuator.start(lab.kind, "aggregated", "a3")).state in LIVE

    @pytest.mark.parametrize(
        ("kind", "mode", "change"),
        [("no-such-kind", "aggregated", "a1"), ("", "both", "a1"), ("", "aggregated", "a/../b")],
    )
    async def test_what_no_worker_can_be_is_denied(
        self, lab: ActuatorLab, kind: str, mode: str, change: str
    ) -> None:
        with pytest.raises(ActuatorDenied):
            await lab.actuator.start(kind or lab.kind, mode, change)
        assert not await lab.actuator.list()

    async def test_a_refusal_is_told(self, lab: ActuatorLab) -> None:
        self.need(lab, "deny")
        await lab.deny()
        with pytest.raises(ActuatorDenied) as raised:
            await lab.actuator.start(lab.kind, "aggregated", "a1")
        assert raised.value.message

    async def test_a_silent_environment_is_given_up_in_time(self, lab: ActuatorLab) -> None:
        self.need(lab, "silence")
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        await self.until(lab, "a1", (lab.up,))
        await lab.silence()
        async with asyncio.timeout(lab.deadline + 5.0):
            with pytest.raises(ActuatorTransient):
                await lab.actuator.start(lab.kind, "aggregated", "a2")
        async with asyncio.timeout(lab.deadline + 5.0):
            with pytest.raises(ActuatorTransient):
                await lab.actuator.stop("a1", 1.0)
        await self._lists_nothing_wrong(lab)

    async def _lists_nothing_wrong(self, lab: ActuatorLab) -> None:
        """What does not answer is unknown, or the list fails; it is never empty."""
        async with asyncio.timeout(lab.deadline + 5.0):
            try:
                found = await lab.actuator.list()
            except ActuatorTransient:
                return
        assert [(one.change, one.state) for one in found] == [("a1", "unknown")]

    # ------------------------------------------------------------------ ending

    async def test_ending_what_never_was_does_nothing(self, lab: ActuatorLab) -> None:
        await lab.actuator.stop("never", 1.0)
        assert not await lab.actuator.list()

    async def test_it_may_be_ended_twice(self, lab: ActuatorLab) -> None:
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        await self.until(lab, "a1", (lab.up,))
        await lab.actuator.stop("a1", lab.patience)
        await lab.actuator.stop("a1", lab.patience)
        await self.until(lab, "a1", ENDED)
        await lab.actuator.stop("a1", lab.patience)
        assert (await self.find(lab, "a1")) is not None

    async def test_it_may_be_ended_before_it_serves(self, lab: ActuatorLab) -> None:
        self.need(lab, "never_ready")
        await lab.never_ready()
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        await lab.actuator.stop("a1", 0.0)
        await self.until(lab, "a1", ENDED)
        assert await lab.processes("a1") == 0

    # ------------------------------------------------------------------ failing

    async def test_a_worker_that_is_never_ready_is_not_called_running(
        self, lab: ActuatorLab
    ) -> None:
        self.need(lab, "never_ready")
        await lab.never_ready()
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        for _ in range(3):
            await asyncio.sleep(lab.pause)
            found = await self.find(lab, "a1")
            assert found is not None
            assert found.state in ("pending", "booting")

    async def test_a_worker_that_cannot_be_run_has_failed_with_a_reason(
        self, lab: ActuatorLab
    ) -> None:
        self.need(lab, "start_fails")
        await lab.start_fails()
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        failed = await self.until(lab, "a1", ("failed",))
        assert failed.reason

    async def test_a_worker_that_dies_has_failed_with_a_reason(self, lab: ActuatorLab) -> None:
        self.need(lab, "die")
        await lab.actuator.start(lab.kind, "aggregated", "a1")
        await self.until(lab, "a1", (lab.up,))
        await lab.die("a1")
        failed = await self.until(lab, "a1", ("failed",))
        assert failed.reason
        assert (await lab.actuator.start(lab.kind, "aggregated", "a2")).state in LIVE
