"""Nodes in a world of their own, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

from pdserve.ids import NodeId
from pdserve.net.settings import NetSettings
from pdserve.net.transport.memory import MemoryWorld
from pdserve.testing import virtual_time
from tests.support.net_support import RecordingHandler, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from pdserve.net.endpoint import Endpoint
    from pdserve.net.link import PeerLink


P = ParamSpec("P")


def virtually(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Run a test in virtual time, with its parameters and fixtures."""

    def run(*args: P.args, **named: P.kwargs) -> None:
        virtual_time.run(test(*args, **named))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    vars(run)["__signature__"] = inspect.signature(test)
    return run


class Two:
    """Nodes `a` and `b`; `a` has dialled."""

    def __init__(self, settings: NetSettings | None, seed: int) -> None:
        self.world = MemoryWorld(random.Random(seed))
        self.settings = settings or NetSettings()
        self.at_a, self.at_b = RecordingHandler(), RecordingHandler()
        self.a = self.node("a", self.at_a)
        self.b = self.node("b", self.at_b)
        self.link: PeerLink
        self.back: PeerLink
        self.address = ""

    def node(self, name: str, handler: RecordingHandler, **details: Any) -> Endpoint:
        host = details.pop("host", name)
        return node(name, self.world.network(host), handler, settings=self.settings, **details)

    async def connect(self) -> None:
        self.address = await self.b.listen("b:7000")
        self.link = await self.a.dial(self.address)
        await self.at_b.until(lambda handler: bool(handler.ups))
        back = self.b.link(NodeId("a"))
        assert back is not None
        self.back = back


@asynccontextmanager
async def two(settings: NetSettings | None = None, seed: int = 0) -> AsyncIterator[Two]:
    """Two connected nodes; afterwards nothing is left of them."""
    nodes = Two(settings, seed)
    await nodes.connect()
    try:
        yield nodes
    finally:
        nodes.world.heal()
        nodes.world.resume("a")
        nodes.world.resume("b")
        await nodes.a.close()
        await nodes.b.close()
    await asyncio.sleep(0)
    assert nodes.a.connections == nodes.b.connections == 0
    assert nodes.world.connections == 0
