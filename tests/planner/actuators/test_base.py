"""Orders are checked alike by every actuator, and each call ends in time."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.messages.planner import START_MODES
from pdserve.planner.actuators.base import ActuatorDenied, ActuatorTransient, check_order, within


@pytest.mark.parametrize("mode", START_MODES)
@pytest.mark.parametrize("change", ["a", "7f3a-2.1_b", "x" * 64])
def test_orders_that_are_in_order(mode: str, change: str) -> None:
    check_order(mode, change)


@pytest.mark.parametrize("change", ["", "x" * 65, "-rf", "a b", "a/b", "..", "a\n", "ä"])
def test_a_change_id_that_could_harm_a_command_line_is_refused(change: str) -> None:
    with pytest.raises(ActuatorDenied, match="is not 1 to 64 letters"):
        check_order("aggregated", change)


@pytest.mark.parametrize("mode", ["", "both", "router"])
def test_a_mode_in_which_no_worker_starts_is_refused(mode: str) -> None:
    with pytest.raises(ActuatorDenied, match="use one of aggregated, prefill, decode"):
        check_order(mode, "a")


async def test_work_that_takes_too_long_is_a_passing_failure() -> None:
    with pytest.raises(ActuatorTransient, match=r"to list jobs: no answer within 0\.01 s"):
        async with within(0.01, "to list jobs"):
            await asyncio.Event().wait()


async def test_work_in_time_keeps_its_own_error() -> None:
    with pytest.raises(ActuatorDenied, match="no such user"):
        async with within(5.0, "to list jobs"):
            raise ActuatorDenied("no such user")
