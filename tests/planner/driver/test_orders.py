"""Orders on their way: what is told of those that are not obeyed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.planner import Change
from pdserve.planner.driver.orders import Orders
from pdserve.planner.tick import Order
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    import pytest


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
