"""The inline engine: the core's own tokens in virtual time, deaths, aborts, nothing left."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.engine.port import EngineState
from pdserve.errors import EngineDied, NotReady, Overloaded
from pdserve.messages.engine import EngineSpec
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.scripted import ENGINE
from pdserve.testing.virtual_time import run
from tests.worlds.load_clients import TrackedRequest, draw_request

if TYPE_CHECKING:
    from pdserve.messages.engine import Event

SPEC = EngineSpec(
    engine=ENGINE,
    model="/m",
    block_size=8,
    max_sequences=4,
    max_waiting=4,
    max_batch_tokens=64,
    options={"blocks": "64", "max_len": "200"},
)


def account(seed: int, number: int, complaints: list[str]) -> TrackedRequest:
    request = draw_request(random.Random(seed + number), f"q{number}", "m")
    return TrackedRequest(request.request_id, request, 0.0, complaints.append)


async def started() -> VirtualTimeEngine:
    engine = VirtualTimeEngine(SPEC, pace=0.02, load_time=1.0)
    with pytest.raises(NotReady):
        engine.submit(account(0, 0, []).request, account(0, 0, []))
    await engine.start()
    assert engine.state is EngineState.READY
    return engine


def test_it_gives_the_tokens_of_the_core(seed: int) -> None:
    async def main() -> None:
        engine, complaints = await started(), []  # type: ignore[var-annotated]
        asked = [account(seed, number, complaints) for number in range(4)]
        for one in asked:
            engine.submit(one.request, one)
        assert await engine.drain(60.0)
        for one in asked:
            assert one.outcome in ("completed", "failed DeadlineExceeded")
        assert not complaints
        assert engine.stats().blocks_used == 0
        await engine.stop()
        assert engine.leaked == 0

    run(main())


def test_a_death_ends_all_and_it_comes_back(seed: int) -> None:
    async def main() -> None:
        engine, complaints = await started(), []  # type: ignore[var-annotated]
        asked = [account(seed, number, complaints) for number in range(3)]
        handles = [engine.submit(one.request, one) for one in asked]
        engine.abort(handles[0])
        assert engine.die(2.0)
        assert not engine.die(2.0)
        assert [one.outcome for one in asked] == ["", *[f"failed {EngineDied.__name__}"] * 2]
        assert engine.state.value == "restarting"
        await asyncio.sleep(2.1)
        assert engine.state.value == "ready"
        assert not complaints
        await engine.stop()

    run(main())


class Waiting:
    """A core that has something to do, or waits for a deadline."""

    def __init__(self) -> None:
        self.has_work = False
        self.steps = 0

    def wake_at(self) -> float:
        return asyncio.get_running_loop().time() + 30.0

    def step(self) -> list[Event]:
        self.steps += 1
        self.has_work = False
        return []


def test_who_waits_for_a_deadline_takes_new_work_at_once() -> None:
    async def main() -> None:
        engine, core = await started(), Waiting()
        engine._core, real = cast("Any", core), engine._core
        engine._arm()
        core.has_work = True
        engine._arm()
        await asyncio.sleep(0.1)
        assert core.steps == 1
        await asyncio.sleep(31.0)
        assert core.steps == 2, "it still wakes when a deadline comes"
        engine._core = real
        await engine.stop()

    run(main())


def test_it_is_bounded() -> None:
    async def main() -> None:
        engine = await started()
        for number in range(8):
            assert not engine.full
            one = account(1, number, [])
            engine.submit(one.request, one)
        assert engine.full
        with pytest.raises(Overloaded):
            engine.submit(account(1, 9, []).request, account(1, 9, []))
        await engine.stop()

    run(main())
