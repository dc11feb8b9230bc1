"""An actor that does what tests tell it, and a home for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.ids import Epoch, NodeId
from pdserve.runtime.actor import Actor
from pdserve.runtime.actors import Actors
from pdserve.runtime.ref import Contract
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.runtime.streams import Outlet


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    number: int


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    pass


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    pass


class Crash(msgspec.Struct, frozen=True, array_like=True, tag="crash"):
    pass


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    seconds: float


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Stream the numbers below `to`, then end; or keep the stream open."""

    to: int
    keep: bool = False


class Total(msgspec.Struct, frozen=True, array_like=True):
    number: int


Message = Add | Get | Refuse | Crash | Sleep | Count

BOOK: Contract[Message, Total | None] = Contract("book", Message, Total | None)
OTHER: Contract[Message, Total | None] = Contract("other", Message, Total | None)


class Book(Actor[Message, Total | None]):
    """Adds up, and writes down what happens to it."""

    contract = BOOK

    def __init__(self, *, fail_at: str = "") -> None:
        self.fail_at = fail_at
        self.total = 0
        self.log: list[str] = []
        self.last: Message | None = None
        self.at_once = self.most_at_once = 0
        self.outlets: list[Outlet[Total | None]] = []

    async def started(self) -> None:
        if self.fail_at == "start":
            raise ZeroDivisionError("broken on purpose")
        if self.fail_at == "hang":
            await asyncio.sleep(1e6)
        self.log.append("started")

    async def receive(self, message: Message) -> Total | None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._receive(message)
        finally:
            self.at_once -= 1

    async def _receive(self, message: Message) -> Total | None:
        self.last = message
        if isinstance(message, Refuse):
            raise InvalidRequest("no thanks")
        if isinstance(message, Crash):
            raise ZeroDivisionError("broken on purpose")
        if isinstance(message, Sleep):
            await asyncio.sleep(message.seconds)
            self.log.append("slept")
            return None
        if isinstance(message, Add):
            self.total += message.number
            self.log.append(f"add {message.number}")
        else:
            self.log.append("get")
        return Total(self.total)

    async def opened(self, message: Message, outlet: Outlet[Total | None]) -> None:
        if isinstance(message, Refuse):
            raise InvalidRequest("no thanks")
        assert isinstance(message, Count)
        self.outlets.append(outlet)
        for number in range(message.to):
            await outlet.send(Total(number), timeout=10.0)
        if not message.keep:
            outlet.end()

    async def stopped(self, error: BaseException | None) -> None:
        self.log.append("stopped" if error is None else f"stopped by {type(error).__name__}")
        if self.fail_at == "stop":
            raise ZeroDivisionError("broken on purpose")


class SmallHome:
    """What local actors need of a node."""

    def __init__(self) -> None:
        self.id = NodeId("here")
        self.epoch: Epoch = 1
        self.tasks = Tasks("test")


@asynccontextmanager
async def at_home() -> AsyncIterator[Actors]:
    """Actors of one node; afterwards nothing is left of them."""
    home = SmallHome()
    actors = Actors(home)
    try:
        yield actors
    finally:
        await home.tasks.close()
    assert len(actors) == len(home.tasks) == 0
