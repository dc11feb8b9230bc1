"""The actors of one node, by name and life; refs to them that pass messages by reference.

It knows nothing of other nodes: those are `remote`'s. Owned by whoever owns the node.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pdserve.errors import Cancelled, DeadlineExceeded, NoActor
from pdserve.runtime.actor import Cell
from pdserve.runtime.envelope import Envelope
from pdserve.runtime.ref import WINDOW, ActorRef, Address, Terminated, Watch
from pdserve.runtime.streams import Inlet, Outlet, pipe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.runtime.actor import Actor
    from pdserve.runtime.ref import Contract
    from pdserve.runtime.tasks import Tasks

__all__ = ["Actors", "Home", "LocalRef"]

M = TypeVar("M")
R = TypeVar("R")


class Home(Protocol):
    """What actors need of their node."""

    @property
    def id(self) -> NodeId: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def tasks(self) -> Tasks: ...


class Actors:
    """See above."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._cells: dict[str, Cell[Any, Any]] = {}
        self._lives = 0

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._cells)

    def names(self) -> list[str]:
        """Of those that have not ended, in the order of their start."""
        return list(self._cells)

    def spawn(self, actor: Actor[M, R], name: str) -> Cell[M, R]:
        """Begin a life of an actor; its `started` runs later.

        Raises `ValueError` if the name is taken, `Draining` if the node is going away.
        """
        if name in self._cells:
            raise ValueError(f"an actor named {name} is there already")
        self._lives += 1
        ref: LocalRef[M, R] = LocalRef(self, actor.contract, name, self._lives)

        def forget() -> None:
            del self._cells[name]

        cell = self._cells[name] = Cell(actor, ref, self.home.tasks, forget)
        return cell

    async def start(self, actor: Actor[M, R], name: str, *, timeout: Seconds) -> Cell[M, R]:
        """`spawn`, and wait until the actor has started.

        Raises `ActorFailed` if it fails to, `DeadlineExceeded`, and what `spawn` raises. Then, and
        when cancelled, the actor is gone.
        """
        cell = self.spawn(actor, name)
        started = False
        try:
            started = await cell.wait_started(timeout=timeout)
        finally:
            if not started:
                await cell.stop(timeout=0.0)
        if not started:
            raise DeadlineExceeded(f"{name} did not start within {timeout:g} s")
        return cell

    def find(self, name: str, uid: int = 0, contract: str = "") -> Cell[Any, Any]:
        """Raises `NoActor` if nobody has the name, or in another life, or of another contract."""
        cell = self._cells.get(name)
        if cell is None:
            raise NoActor(f"there is no actor named {name} at {self.home.id}")
        if uid and cell.uid != uid:
            raise NoActor(f"{name} has ended; the actor of that name is a later one")
        if contract and cell.ref.contract.name != contract:
            raise NoActor(f"{name} is a {cell.ref.contract.name} and no {contract}")
        return cell

    def watch(self, name: str, uid: int, callback: Callable[[Terminated], None]) -> Watch:
        """See `ActorRef.watch`."""
        watch = Watch(callback)
        try:
            self.find(name, uid).watch(watch)
        except NoActor as error:
            address = Address(self.home.id, self.home.epoch, name, uid)
            gone = Terminated(address, failed=False, reason=error.message)
            asyncio.get_running_loop().call_soon(watch.fire, gone)
        return watch

    def ref(self, contract: Contract[M, R], name: str, uid: int = 0) -> LocalRef[M, R]:
        """A ref to an actor here, whether it is there yet or not."""
        return LocalRef(self, contract, name, uid)


class FutureAnswer:
    """An answer that a coroutine of this process waits for."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(self, message: Any) -> None:
        if not self.future.done():
            self.future.set_result(message)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class LocalRef(ActorRef[M, R], Generic[M, R]):
    """An actor on this node; messages pass by reference, so they must be frozen."""

    __slots__ = ("_actors", "contract", "name", "uid")

    def __init__(self, actors: Actors, contract: Contract[M, R], name: str, uid: int) -> None:
        self.contract = contract
        self.name = name
        self.uid = uid
        self._actors = actors

    @property
    def address(self) -> Address:
        home = self._actors.home
        return Address(home.id, home.epoch, self.name, self.uid)

    def _cell(self) -> Cell[M, R]:
        return self._actors.find(self.name, self.uid, self.contract.name)

    def tell(self, message: M) -> None:
        self._cell().post(Envelope(message))

    async def connect(self, *, timeout: Seconds) -> None:
        self._cell()

    async def ask(self, message: M, *, timeout: Seconds) -> R:
        cell, answer = self._cell(), FutureAnswer()
        if asyncio.current_task() is cell.task:
            raise RuntimeError(f"{cell.name} asks itself, and would wait for itself")
        envelope = Envelope(message, answer)
        cell.post(envelope)

        def expire() -> None:
            doing = "it has the message" if envelope.place is None else "the message still waits"
            late = f"{cell.name} did not answer within {timeout:g} s: {doing}"
            answer.fail(DeadlineExceeded(late))

        timer = asyncio.get_running_loop().call_later(timeout, expire)
        try:
            result: R = await answer.future
        finally:
            timer.cancel()
            cell.withdraw(envelope)
        return result

    @asynccontextmanager
    async def stream(
        self, message: M, *, timeout: Seconds, window: Bytes = WINDOW
    ) -> AsyncIterator[Inlet[R]]:
        inlet: Inlet[R]
        outlet: Outlet[R]
        inlet, outlet = pipe(timeout, window)
        self._cell().post(Envelope(message, outlet=outlet))
        try:
            yield inlet
        finally:
            outlet.left()
            inlet.end(Cancelled("the reader has left the stream"))
            inlet.discard()

    def watch(self, callback: Callable[[Terminated], None]) -> Watch:
        return self._actors.watch(self.name, self.uid, callback)
