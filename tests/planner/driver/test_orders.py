"""Orders on their way: what is told of those that are not obeyed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from pdserve.ids import NodeId
from pdserve.messages.planner import Change, Kind
from pdserve.planner.driver import orders as module
from pdserve.planner.driver.actuator_watch import ActuatorWatch
from pdserve.planner.driver.orders import Orders
from pdserve.planner.tick import Order
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    import pytest

    from pdserve.planner.actuators.base import Actuator


@virtually
async def test_a_refusal_that_is_repeated_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdserve.planner.driver.orders")
    async with cluster() as made:
        node = await made.add("planner", role="planner")
        orders = Orders(node, ())
        change = Change(id="c-1", action="start", kind="gpu", mode="decode")
        order = Order("begin", change, "m", 1, 1)
        for _ in range(3):
            orders.carry_out([order])
            await made.until(lambda: bool(orders.taken_refusals()), 1.0)
        assert caplog.messages == ["start of gpu: no actuator offers kind 'gpu' now"]


class _Silent:
    """An actuator that answers no order."""

    name = "silent"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def start(self, kind: str, mode: str, change: str) -> None:
        self.asked.append(change)
        await asyncio.sleep(3600.0)


@virtually
async def test_orders_that_nobody_answers_hold_no_others_up() -> None:
    many = [
        Order("begin", Change(id=f"c-{n}", action="start", kind="gpu"), "m", 1, n)
        for n in range(3 * module._MOST)
    ]
    undo = Change(id="u-1", action="undo_drain", node=NodeId("nobody"), epoch=1)
    async with cluster() as made:
        node = await made.add("planner", role="planner")
        silent = _Silent()
        watch = ActuatorWatch(cast("Actuator", silent))
        watch.kinds = (Kind(name="gpu"),)
        orders = Orders(node, (watch,))
        orders.carry_out(many)
        await made.until(lambda: len(silent.asked) == module._MOST, 1.0)
        orders.carry_out([*many, Order("begin", undo, "m", 1, 999)])
        await made.until(lambda: "u-1" in orders.taken_refusals(), 30.0)
        for _ in range(6):
            orders.carry_out(many)
            await asyncio.sleep(5.0)
        assert len(set(silent.asked)) == len(many), "each has its turn"
