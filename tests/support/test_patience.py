"""Waits end with what they wait for, and name it if it does not come."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.testing.virtual_time import run
from tests.support.patience import PATIENCE, eventually


def test_a_wait_ends_with_what_it_waits_for() -> None:
    async def main() -> float:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(PATIENCE - 1.0, there.set)
        await eventually(there.is_set, "the event")
        return loop.time()

    assert run(main()) == pytest.approx(PATIENCE - 1.0, abs=0.1)


def test_what_does_not_come_is_named() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError, match="not within 2 s: a sunny day"):
            await eventually(lambda: False, "a sunny day", within=2.0)

    run(main())
