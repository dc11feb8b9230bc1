"""What is the same in every back end of a node: its regions, its paths, and how a path comes about.

    this node                          the peer
    connect: `_dial` ── Hello ───────▶ answer: `_accept`
             `_dial` ◀───── Welcome ── its end is set up, but starts nothing
             path up ── Ready ───────▶ path up

A path belongs to one life of a peer: Hello and Welcome say whose. Control comes from authenticated
peers; numbers in it that lead nowhere are refused, not guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from pdserve.errors import PdserveError, TransferError, TransferRefused, TransferTimeout
from pdserve.messages.transfer import (
    Control,
    Done,
    Gone,
    Hello,
    Ready,
    Stop,
    Welcome,
    Withdrawn,
)
from pdserve.transfer.grants import GrantTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.transfer import RegionCard
    from pdserve.transfer.base import Ask, PeerKey, Region
    from pdserve.transfer.path import PathCore

__all__ = ["HALF_OPEN", "Exchange", "TransportCore"]

HALF_OPEN: Final[Seconds] = 30.0
"""How long an accepted path waits for its Ready before it is given up."""
_UNUSABLE: Final = (OSError, ValueError, OverflowError)
"""What comes of a peer's details that are wrong, or of another version: `PlanError`, a record that
nobody can read, an address that is none. It costs the path, never this node."""
_COURTESY: Final[Seconds] = 1.0
"""How long a peer has to hear what it would find out by itself, only later."""


class Exchange(Protocol):
    """Says Hello with these details and returns the Welcome."""

    async def __call__(self, details: bytes) -> Welcome: ...


class TransportCore:
    """See above, and `base.Transport`. A back end brings `_dial` and `_accept`."""

    name = ""

    def __init__(self, node: NodeId, epoch: Epoch, regions: Sequence[Region], ask: Ask) -> None:
        self.node = node
        self.epoch = epoch
        self.regions = tuple(regions)
        self.cards = self._cards()
        self.ask = ask
        self.grants = GrantTable(epoch)
        self.closed = False
        self._paths: dict[int, PathCore] = {}
        self._up: dict[PeerKey, PathCore] = {}
        self._half_open: dict[int, asyncio.TimerHandle] = {}
        self._connecting: dict[PeerKey, asyncio.Task[PathCore]] = {}
        self._numbers = 0
        self._telling: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what back ends bring

    def _cards(self) -> tuple[RegionCard, ...]:
        """What peers learn of the regions."""
        return tuple(region.card() for region in self.regions)

    async def _dial(self, peer: PeerKey, number: int, exchange: Exchange) -> PathCore:
        """This side of a new path; it is ready when this returns."""
        raise NotImplementedError

    async def _accept(self, peer: PeerKey, number: int, hello: Hello) -> tuple[PathCore, bytes]:
        """The other side of it, and the details of the Welcome."""
        raise NotImplementedError

    async def _stopped(self, path: PathCore, slot: int, generation: int) -> None:
        """Return when nothing is under way for a ticket of the peer."""
        await path.drain(slot, generation)

    # ------------------------------------------------------------------ paths

    def path(self, peer: PeerKey) -> PathCore | None:
        """See `base.Transport`."""
        return self._up.get(peer)

    async def connect(self, peer: PeerKey, *, timeout: Seconds) -> PathCore:
        """See `base.Transport`."""
        path = self._up.get(peer)
        if path is not None:
            return path
        task = self._connecting.get(peer)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(peer, timeout))
            self._connecting[peer] = task
            task.add_done_callback(lambda done: self._connected(peer, done))
        try:
            async with asyncio.timeout(timeout):  # the task's is that of whoever asked first
                return await asyncio.shield(task)
        except TimeoutError:
            reason = f"not done within {timeout:g} s"
            raise TransferTimeout.at("", self._name(peer), "connect", reason) from None

    def _connected(self, peer: PeerKey, task: asyncio.Task[PathCore]) -> None:
        """Whoever waits hears how it ended; if nobody does any more, it is heard here."""
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()

    async def _connect(self, peer: PeerKey, timeout: Seconds) -> PathCore:
        self._check_open(peer)
        number = self._next()
        try:
            async with asyncio.timeout(timeout):
                path = await self._dial(peer, number, self._exchange(peer, number, timeout))
                self._enter(path, number)
                await self._say_ready(path, timeout)
        except TransferError:
            raise
        except TimeoutError:
            reason = f"not done within {timeout:g} s"
            raise TransferTimeout.at("", self._name(peer), "connect", reason) from None
        except (PdserveError, *_UNUSABLE) as error:
            raise TransferError.at("", self._name(peer), "connect", str(error)) from error
        self._rise(path)
        return path

    def _exchange(self, peer: PeerKey, number: int, timeout: Seconds) -> Exchange:
        async def exchange(details: bytes) -> Welcome:
            hello = Hello(
                backend=self.name,
                epoch=self.epoch,
                path=number,
                regions=self.cards,
                details=details,
            )
            answer = await self._asked(peer, hello, timeout)
            if not isinstance(answer, Welcome) or answer.epoch != peer.epoch:
                reason = f"another life of the peer answered: {getattr(answer, 'epoch', answer)}"
                raise TransferRefused.at("", self._name(peer), "connect", reason)
            return answer

        return exchange

    async def _asked(self, peer: PeerKey, control: Control, timeout: Seconds) -> Control:
        """The answer; a refusal is told from this side."""
        try:
            return await self.ask(peer, control, timeout)
        except TransferError as error:
            reason = f"the peer says: {error.message}"
            raise type(error).at("", self._name(peer), "connect", reason) from error

    async def _say_ready(self, path: PathCore, timeout: Seconds) -> None:
        """The peer may use the path from now on; it may do so before the answer is here."""
        try:
            await self._asked(path.peer, Ready(path.remote), timeout)
        except BaseException:
            path.fail("connect", "the peer did not confirm that it is ready")
            raise

    def _rise(self, path: PathCore) -> None:
        """The path is in use. Those to earlier lives of the peer end: nobody is there any more."""
        if path.down is None:
            self._up[path.peer] = path
        for other in list(self._paths.values()):
            if other.peer.node == path.peer.node and other.peer.epoch < path.peer.epoch:
                other.fail("peer", f"a later life of it, {path.peer.epoch}, has a path")

    def _enter(self, path: PathCore, number: int) -> None:
        self._paths[number] = path
        path.tell = partial(self._tell_soon, path)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def forget(self, path: PathCore) -> None:
        """A path has ended."""
        self._paths.pop(path.number, None)
        if self._up.get(path.peer) is path:
            del self._up[path.peer]
        timer = self._half_open.pop(path.number, None)
        if timer is not None:
            timer.cancel()

    # ------------------------------------------------------------------ courtesies

    def _tell_soon(self, path: PathCore, control: Control) -> None:
        """Let the peer know, if it can still be reached; nobody waits for it."""
        if path.remote:
            task = asyncio.get_running_loop().create_task(self._tell(path, control))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, path: PathCore, control: Control) -> None:
        with contextlib.suppress(PdserveError, TimeoutError):
            await self.ask(path.peer, control, _COURTESY)

    # ------------------------------------------------------------------ control

    async def answer(self, peer: PeerKey, control: Control) -> Control:
        """See `base.Transport`."""
        self._check_open(peer)
        match control:
            case Hello():
                return await self._welcome(peer, control)
            case Ready():
                self._on_ready(self._mine(peer, control.path, "connect"))
            case Stop():
                path = self._mine(peer, control.path, "stop")
                await self._stopped(path, control.slot, control.generation)
            case Withdrawn():
                path = self._mine(peer, control.path, "withdraw")
                path.given_up(control.slot, control.generation)
            case Gone():
                path = self._mine(peer, control.path, "close")
                path.fail("peer", control.reason or "the peer closed the path")
            case _:
                self._refuse(peer, "control", f"{type(control).__name__} asks nothing")
        return Done()

    async def _welcome(self, peer: PeerKey, hello: Hello) -> Welcome:
        if hello.backend != self.name:
            self._refuse(peer, "connect", f"{hello.backend} is not {self.name}")
        if hello.epoch != peer.epoch:
            self._refuse(peer, "connect", f"it says that it is in epoch {hello.epoch}")
        number = self._next()
        try:
            path, details = await self._accept(peer, number, hello)
        except _UNUSABLE as error:
            raise TransferRefused.at("", self._name(peer), "connect", str(error)) from error
        path.remote = hello.path
        self._enter(path, number)
        self._half_open[number] = asyncio.get_running_loop().call_later(
            HALF_OPEN, path.fail, "connect", "the peer never said that it is ready"
        )
        return Welcome(
            epoch=self.epoch,
            path=number,
            regions=self.cards,
            details=details,
        )

    def _on_ready(self, path: PathCore) -> None:
        timer = self._half_open.pop(path.number, None)
        if timer is not None:
            timer.cancel()
            self._rise(path)

    def _mine(self, peer: PeerKey, number: int, step: str) -> PathCore:
        path = self._paths.get(number)
        if path is None or path.peer != peer:
            self._refuse(peer, step, f"there is no path {number}")
        return path

    def _refuse(self, peer: PeerKey, step: str, reason: str) -> NoReturn:
        raise TransferRefused.at("", self._name(peer), step, reason)

    # ------------------------------------------------------------------ the rest

    async def close(self) -> None:
        """See `base.Transport`."""
        self.closed = True
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        if connecting:
            await asyncio.wait(connecting)
        for path in list(self._paths.values()):
            await path.close("this node closes its transfers")
        if self._telling:
            await asyncio.wait(self._telling, timeout=2 * _COURTESY)

    def _check_open(self, peer: PeerKey) -> None:
        if self.closed:
            self._refuse(peer, "connect", "this node has closed its transfers")

    def _name(self, peer: PeerKey) -> str:
        return f"{peer} over {self.name}"
