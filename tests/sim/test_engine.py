"""The inline engine: the core's own tokens in virtual time, deaths, aborts, nothing left."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdserve.engine.api import EngineState
from pdserve.errors import EngineDied, NotReady, Overloaded
from pdserve.messages.engine import EngineSpec
from pdserve.sim.callers import Account, draw_request
from pdserve.sim.engine import InlineEngine
from pdserve.testing.scripted import ENGINE
from pdserve.testing.virtual_time import run

SPEC = EngineSpec(
    engine=ENGINE,
    model="/m",
    block_size=8,
    max_sequences=4,
    max_waiting=4,
    max_batch_tokens=64,
    options={"blocks": "64", "max_len": "200"},
)


def account(seed: int, number: int, complaints: list[str]) -> Account:
    request = draw_request(random.Random(seed + number), f"q{number}", "m")
    return Account(request.request_id, request, 0.0, complaints.append)


async def started() -> InlineEngine:
    engine = InlineEngine(SPEC, pace=0.02, load_time=1.0)
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
        assert engine.statistics().blocks_used == 0
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


def test_it_is_bounded() -> None:
    async def main() -> None:
        engine = await started()
        for number in range(8):
            one = account(1, number, [])
            engine.submit(one.request, one)
        with pytest.raises(Overloaded):
            engine.submit(account(1, 9, []).request, account(1, 9, []))
        await engine.stop()

    run(main())
