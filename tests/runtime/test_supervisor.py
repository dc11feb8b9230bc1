"""Children are restarted, stopped in reverse order, and given up in the end."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ActorFailed, DeadlineExceeded, NoActor, RestartsExhausted
from pdserve.runtime.intensity import Restarts
from pdserve.runtime.supervisor import ChildSpec, Supervisor
from tests.net.world import virtually
from tests.runtime.actors import BOOK, Add, Book, Crash, Get, Sleep, Total, at_home

if TYPE_CHECKING:
    from pdserve.runtime.actors import Actors
    from pdserve.runtime.ref import Terminated

T = 10.0


class Family:
    """Books under a supervisor, and the order in which they come and go."""

    def __init__(self, actors: Actors, *names: str, seed: int = 0, **how: Any) -> None:
        self.log: list[str] = []
        self.fail_start: set[str] = set()
        self.actors = actors
        kinds = how.pop("kinds", {})
        self.supervisor = Supervisor(
            "family",
            [self.spec(name, kinds.get(name, "permanent")) for name in names],
            tasks=actors.home.tasks,
            random=random.Random(seed),
            **how,
        )

    def spec(self, name: str, kind) -> ChildSpec:
        family = self

        class Child(Book):
            async def started(self) -> None:
                if name in family.fail_start:
                    raise ZeroDivisionError("broken on purpose")
                family.log.append(f"+{name}")

            async def stopped(self, error: BaseException | None) -> None:
                family.log.append(f"-{name}")

        return ChildSpec(name, lambda: family.actors.start(Child(), name, timeout=T), kind)

    def crash(self, name: str) -> None:
        self.actors.ref(BOOK, name).tell(Crash())


@virtually
async def test_a_failed_child_comes_back_under_its_name() -> None:
    async with at_home() as actors:
        family = Family(actors, "a", "b")
        await family.supervisor.start()
        ref = actors.ref(BOOK, "a")
        await ref.ask(Add(5), timeout=T)
        heard: list[Terminated] = []
        first = family.supervisor.child("a")
        actors.find("a").ref.watch(heard.append)
        old = actors.find("a").ref
        family.crash("a")
        await asyncio.sleep(0.2)
        assert await ref.ask(Get(), timeout=T) == Total(0), "a new life knows nothing of the old"
        assert family.supervisor.child("a") is not first
        with pytest.raises(NoActor):
            old.tell(Add(1))
        assert len(heard) == 1
        await family.supervisor.stop(timeout=T)
        assert family.log == ["+a", "+b", "-a", "+a", "-b", "-a"]


@virtually
async def test_rest_for_one_restarts_the_pipeline_behind_it() -> None:
    async with at_home() as actors:
        family = Family(actors, "a", "b", "c", strategy="rest_for_one")
        await family.supervisor.start()
        family.crash("b")
        await asyncio.sleep(1.0)
        assert family.log == ["+a", "+b", "+c", "-b", "-c", "+b", "+c"]
        await family.supervisor.stop(timeout=T)
        assert family.log[-3:] == ["-c", "-b", "-a"]


@virtually
async def test_too_many_failures_are_the_owners_failure() -> None:
    async with at_home() as actors:
        ends: list[BaseException | None] = []
        family = Family(actors, "a", "b", restarts=Restarts(most=2))
        await family.supervisor.start()
        family.supervisor.when_ended(ends.append)
        for _ in range(3):
            family.crash("a")
            await asyncio.sleep(1.0)
        assert [type(end) for end in ends] == [RestartsExhausted]
        assert ends[0] is not None
        assert isinstance(ends[0].__cause__, ZeroDivisionError)
        assert family.log[-1] == "-b"
        assert len(actors) == 0
        family.supervisor.when_ended(ends.append)
        await family.supervisor.stop(timeout=T)
        await asyncio.sleep(0)
        assert len(ends) == 2, "once each"


@virtually
async def test_exhaustion_escalates_level_by_level() -> None:
    async with at_home() as actors:
        inner: list[Family] = []

        async def start_inner() -> Supervisor:
            family = Family(actors, "a", restarts=Restarts(most=1))
            inner.append(family)
            await family.supervisor.start()
            return family.supervisor

        outer = Supervisor(
            "outer",
            [ChildSpec("inner", start_inner)],
            tasks=actors.home.tasks,
            random=random.Random(0),
            restarts=Restarts(most=1, within=1000.0),
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
        assert len(actors) == 0


@virtually
async def test_a_start_that_fails_is_tried_again() -> None:
    async with at_home() as actors:
        family = Family(actors, "a")
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
    async with at_home() as actors:
        family = Family(actors, "a", "b", "c")
        family.fail_start.add("c")
        with pytest.raises(ActorFailed):
            await family.supervisor.start()
        assert family.log == ["+a", "+b", "-c", "-b", "-a"]

        async def never() -> Any:
            await asyncio.sleep(1e6)

        slow = Supervisor(
            "slow",
            [ChildSpec("slow", never, start_timeout=1.0)],
            tasks=actors.home.tasks,
            random=random.Random(0),
        )
        with pytest.raises(DeadlineExceeded, match="slow did not start within 1 s"):
            await slow.start()


@virtually
async def test_stopping_is_bounded_and_restarts_nothing() -> None:
    async with at_home() as actors:
        family = Family(actors, "a", "b")
        await family.supervisor.start()
        actors.ref(BOOK, "b").tell(Sleep(1e6))
        family.crash("a")
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        before = loop.time()
        await family.supervisor.stop(timeout=2.0)
        assert loop.time() - before <= 2.0 + 2 * Book.stop_timeout
        await asyncio.sleep(60.0)
        assert family.log == ["+a", "+b", "-a", "-b"]
        await family.supervisor.stop(timeout=2.0)


@virtually
async def test_a_stop_in_the_middle_of_a_start_leaves_nothing() -> None:
    async with at_home() as actors:
        starting = asyncio.Event()

        class Slow(Book):
            async def started(self) -> None:
                if starting.is_set():
                    await asyncio.sleep(1e6)
                starting.set()

        spec = ChildSpec("slow", lambda: actors.start(Slow(), "slow", timeout=1e6), "transient")
        supervisor = Supervisor("family", [spec], tasks=actors.home.tasks, random=random.Random(0))
        await supervisor.start()
        actors.ref(BOOK, "slow").tell(Crash())
        await asyncio.sleep(1.0)
        assert len(actors) == 1
        assert supervisor.child("slow") is None, "it is being started"
        await supervisor.stop(timeout=T)
        assert len(actors) == 0


@virtually
async def test_a_transient_child_that_ends_well_stays_away() -> None:
    async with at_home() as actors:
        family = Family(actors, "a", "b", kinds={"a": "transient"})
        await family.supervisor.start()
        await actors.find("a").stop(timeout=T)
        await asyncio.sleep(60.0)
        assert family.supervisor.child("a") is None
        await family.supervisor.stop(timeout=T)
