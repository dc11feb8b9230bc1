"""Children are restarted, stopped in reverse order, and given up in the end."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import DeadlineExceeded, RestartsExhausted
from pdserve.runtime.restart_intensity import RestartLimits
from pdserve.runtime.supervisor import ChildSpec, Supervisor
from pdserve.runtime.tasks import Tasks
from tests.net.world import virtually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.runtime.supervisor import SupervisedChild

T = 10.0


class FakeChild:
    """Runs until it is stopped or a test ends it."""

    def __init__(self, name: str, family: Family) -> None:
        self.name = name
        self.slow = False
        """It takes all the time that it is given to stop."""
        self._family = family
        self._over = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        family.log.append(f"+{name}")
        family.running[name] = self

    def end(self, error: BaseException | None = None) -> None:
        self._over, self._error = True, error
        del self._family.running[self.name]
        self._family.log.append(f"-{self.name}")
        for callback in self._callbacks:
            callback(error)

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        if self._over:
            asyncio.get_running_loop().call_soon(callback, self._error)
        else:
            self._callbacks.append(callback)

    async def stop(self, *, timeout: float) -> None:
        if self.slow:
            await asyncio.sleep(timeout)
        if not self._over:
            self.end()


class Family:
    """Children under a supervisor, and the order in which they come and go."""

    def __init__(self, tasks: Tasks, *names: str, seed: int = 0, **how: Any) -> None:
        self.log: list[str] = []
        self.fail_start: set[str] = set()
        self.running: dict[str, FakeChild] = {}
        kinds = how.pop("kinds", {})
        self.supervisor = Supervisor(
            "family",
            [self.spec(name, kinds.get(name, "permanent")) for name in names],
            tasks=tasks,
            random=random.Random(seed),
            **how,
        )

    def spec(self, name: str, kind) -> ChildSpec:
        async def start() -> SupervisedChild:
            if name in self.fail_start:
                raise ZeroDivisionError("broken on purpose")
            return FakeChild(name, self)

        return ChildSpec(name, start, kind)

    def crash(self, name: str) -> None:
        self.running[name].end(ZeroDivisionError("broken on purpose"))


@asynccontextmanager
async def owned() -> AsyncIterator[Tasks]:
    """Tasks of which none is left afterwards."""
    tasks = Tasks("test")
    try:
        yield tasks
        assert len(tasks) == 0
    finally:
        await tasks.close()


@virtually
async def test_a_failed_child_comes_back_under_its_name() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a", "b")
        await family.supervisor.start()
        first = family.supervisor.child("a")
        assert first is family.running["a"]
        family.crash("a")
        assert family.supervisor.child("a") is None
        await asyncio.sleep(0.2)
        assert family.supervisor.child("a") is family.running["a"] is not first
        await family.supervisor.stop(timeout=T)
        assert family.log == ["+a", "+b", "-a", "+a", "-b", "-a"]


@virtually
async def test_a_child_that_ended_before_it_was_watched_is_restarted() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a")
        spec = family.spec("short", "permanent")

        async def start() -> SupervisedChild:
            child = await spec.start()
            if family.log == ["+short"]:
                family.crash("short")
            return child

        supervisor = Supervisor(
            "short", [ChildSpec("short", start)], tasks=tasks, random=random.Random(0)
        )
        await supervisor.start()
        await asyncio.sleep(1.0)
        assert family.log == ["+short", "-short", "+short"]
        await supervisor.stop(timeout=T)


@virtually
async def test_rest_for_one_restarts_the_pipeline_behind_it() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a", "b", "c", strategy="rest_for_one")
        await family.supervisor.start()
        family.crash("b")
        await asyncio.sleep(1.0)
        assert family.log == ["+a", "+b", "+c", "-b", "-c", "+b", "+c"]
        await family.supervisor.stop(timeout=T)
        assert family.log[-3:] == ["-c", "-b", "-a"]


@virtually
async def test_too_many_failures_are_the_owners_failure() -> None:
    async with owned() as tasks:
        ends: list[BaseException | None] = []
        family = Family(tasks, "a", "b", restarts=RestartLimits(most=2))
        await family.supervisor.start()
        family.supervisor.when_ended(ends.append)
        for _ in range(3):
            family.crash("a")
            await asyncio.sleep(1.0)
        assert [type(end) for end in ends] == [RestartsExhausted]
        assert ends[0] is not None
        assert isinstance(ends[0].__cause__, ZeroDivisionError)
        assert family.log[-1] == "-b"
        assert not family.running
        family.supervisor.when_ended(ends.append)
        await family.supervisor.stop(timeout=T)
        await asyncio.sleep(0)
        assert len(ends) == 2, "once each"


@virtually
async def test_exhaustion_escalates_level_by_level() -> None:
    async with owned() as tasks:
        inner: list[Family] = []

        async def start_inner() -> Supervisor:
            family = Family(tasks, "a", restarts=RestartLimits(most=1))
            inner.append(family)
            await family.supervisor.start()
            return family.supervisor

        outer = Supervisor(
            "outer",
            [ChildSpec("inner", start_inner)],
            tasks=tasks,
            random=random.Random(0),
            restarts=RestartLimits(most=1, within=1000.0),
        )
        ends: list[BaseException | None] = []
        await outer.start()
        outer.when_ended(ends.append)
        for _ in range(4):
            assert ends == []
            inner[-1].crash("a")
            await asyncio.sleep(2.0)
        assert len(inner) == 2
        assert isinstance(ends[0], RestartsExhausted)
        assert not any(family.running for family in inner)


@virtually
async def test_a_start_that_fails_is_tried_again() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a")
        await family.supervisor.start()
        family.fail_start.add("a")
        family.crash("a")
        await asyncio.sleep(0.4)
        assert family.supervisor.child("a") is None
        family.fail_start.clear()
        await asyncio.sleep(5.0)
        assert family.supervisor.child("a") is not None
        await family.supervisor.stop(timeout=T)


@virtually
async def test_a_family_that_cannot_start_never_was() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a", "b", "c")
        family.fail_start.add("c")
        with pytest.raises(ZeroDivisionError):
            await family.supervisor.start()
        assert family.log == ["+a", "+b", "-b", "-a"]

        async def never() -> Any:
            await asyncio.sleep(1e6)

        slow = Supervisor(
            "slow",
            [ChildSpec("slow", never, start_timeout=1.0)],
            tasks=tasks,
            random=random.Random(0),
        )
        with pytest.raises(DeadlineExceeded, match="slow did not start within 1 s"):
            await slow.start()


@virtually
async def test_stopping_is_bounded_and_restarts_nothing() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a", "b")
        await family.supervisor.start()
        family.running["b"].slow = True
        family.crash("a")
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        before = loop.time()
        await family.supervisor.stop(timeout=2.0)
        assert loop.time() - before == pytest.approx(2.0)
        await asyncio.sleep(60.0)
        assert family.log == ["+a", "+b", "-a", "-b"]
        await family.supervisor.stop(timeout=2.0)


@virtually
async def test_a_stop_in_the_middle_of_a_start_leaves_nothing() -> None:
    async with owned() as tasks:
        family = Family(tasks, "other")
        spec = family.spec("slow", "transient")
        starts: list[str] = []

        async def start() -> SupervisedChild:
            starts.append("begun")
            if len(starts) > 1:
                try:
                    await asyncio.sleep(1e6)
                finally:
                    starts.append("cancelled")
            return await spec.start()

        slow = ChildSpec("slow", start, "transient", start_timeout=1e6)
        supervisor = Supervisor("family", [slow], tasks=tasks, random=random.Random(0))
        await supervisor.start()
        family.crash("slow")
        await asyncio.sleep(1.0)
        assert starts == ["begun", "begun"]
        assert supervisor.child("slow") is None, "it is being started"
        await supervisor.stop(timeout=T)
        assert starts[2:] == ["cancelled"]
        assert not family.running


@virtually
async def test_a_transient_child_that_ends_well_stays_away() -> None:
    async with owned() as tasks:
        family = Family(tasks, "a", kinds={"a": "transient"})
        await family.supervisor.start()
        await family.running["a"].stop(timeout=T)
        await asyncio.sleep(60.0)
        assert family.supervisor.child("a") is None
        await family.supervisor.stop(timeout=T)
