"""An operator's order reaches the engine of the worker that is named, and its answer comes back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError, NotReady
from pdserve.messages.tiers import DropOrder, DropReport
from pdserve.runtime.rpc_methods import DROP_KV
from pdserve.testing.virtual_time import run
from pdserve.worker.tiers.drop_orders import DropOrders
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pdserve.engine.port import Dropped
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.kv_events import Tier


class Engine:
    """The part of an engine that drops."""

    def __init__(self) -> None:
        self.orders: list[tuple[tuple[str, ...] | None, Seconds]] = []
        self.answer: dict[Tier, int] | PdserveError = {"device": 1, "disk": 7}
        self.down = False

    def drop_kv(self, owners: tuple[str, ...] | None, older: Seconds, done: Dropped) -> None:
        if self.down:
            raise NotReady("the engine is restarting", retry_after=1.0)
        self.orders.append((owners, older))
        asyncio.get_running_loop().call_later(1.0, done, self.answer)


def test_orders_are_answered_with_blocks_by_tier_or_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            engine = Engine()
            DropOrders(b, engine)
            await c.until(c.converged)
            link = await a.link(b.id, timeout=5.0)
            order = DropOrder(("tenant:secret",), 60.0)
            report = await link.request(DROP_KV, order, timeout=5.0)
            assert report == DropReport({"device": 1, "disk": 7})
            assert engine.orders == [(("tenant:secret",), 60.0)]
            engine.answer = ConfigError("this engine can only drop all: --all")
            with pytest.raises(ConfigError, match="can only drop all"):
                await link.request(DROP_KV, DropOrder(), timeout=5.0)
            engine.down = True
            with pytest.raises(NotReady, match="the engine is restarting"):
                await link.request(DROP_KV, DropOrder(), timeout=5.0)

    with caplog.at_level("INFO"):
        run(main())
    assert "a dropped KV of 1 tenants or salts, unused for 60 s: blocks on device: 1" in caplog.text
    assert "secret" not in caplog.text
