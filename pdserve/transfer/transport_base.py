"""Implements what all transports share: regions, paths, and the handshake that creates a path.

    this node                              the peer
    connect: `_dial` ── PathHello ───────▶ answer: `_accept`
             `_dial` ◀───── PathWelcome ── its end is set up, but starts nothing
             path up ── PathReady ───────▶ path up

A path belongs to one life of a peer, which PathHello and PathWelcome name. Control messages come
from authenticated peers; unknown numbers in them are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from pdserve.errors import PdserveError, TransferError, TransferRefused, TransferTimeout
from pdserve.messages.transfer import (
    ControlDone,
    PathGone,
    PathHello,
    PathReady,
    PathWelcome,
    StopTicket,
    TicketWithdrawn,
    TransferControl,
)
from pdserve.transfer.grants import GrantTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.transfer import RegionCard
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.path_base import PathBase

__all__ = ["HALF_OPEN", "HelloExchange", "TransportBase"]

HALF_OPEN: Final[Seconds] = 30.0
"""How long an accepted path waits for its PathReady before it fails."""
_UNUSABLE: Final = (OSError, ValueError, OverflowError)
"""Errors caused by a peer's wrong details, or details of another version: `PlanError`, an
undecodable record, an invalid address. They end the path, never this node."""
_COURTESY: Final[Seconds] = 1.0
"""Timeout of messages that only tell the peer early what it would notice later."""


class HelloExchange(Protocol):
    """Sends PathHello with these details and returns the PathWelcome."""

    async def __call__(self, details: bytes) -> PathWelcome: ...


class TransportBase:
    """Keeps one node's paths over one backend and answers its peers; implements `base.KvTransport`.
    A backend adds `_dial` and `_accept`."""

    name = ""

    def __init__(
        self, node: NodeId, epoch: Epoch, regions: Sequence[Region], ask: CallPeer
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.regions = tuple(regions)
        self.cards = self._cards()
        self.ask = ask
        self.grants = GrantTable(epoch)
        self.closed = False
        self._paths: dict[int, PathBase] = {}
        self._up: dict[NodeLife, PathBase] = {}
        self._half_open: dict[int, asyncio.TimerHandle] = {}
        self._connecting: dict[NodeLife, asyncio.Task[PathBase]] = {}
        self._numbers = 0
        self._telling: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what back ends bring

    def _cards(self) -> tuple[RegionCard, ...]:
        """The descriptions of the regions that peers get."""
        return tuple(region.card() for region in self.regions)

    async def _dial(self, peer: NodeLife, number: int, exchange: HelloExchange) -> PathBase:
        """Create this node's end of a new path; it is ready when this returns."""
        raise NotImplementedError

    async def _accept(
        self, peer: NodeLife, number: int, hello: PathHello
    ) -> tuple[PathBase, bytes]:
        """Create the accepting end of a path; also returns the details of the PathWelcome."""
        raise NotImplementedError

    async def _stopped(self, path: PathBase, slot: int, generation: int) -> None:
        """Return when nothing is under way for a ticket of the peer."""
        await path.drain(slot, generation)

    # ------------------------------------------------------------------ paths

    def path(self, peer: NodeLife, number: int = 0) -> PathBase | None:
        """The open path to this life of a peer, whichever side opened it; None: there is none.
        `number`: the one with this number of ours."""
        if not number:
            return self._up.get(peer)
        path = self._paths.get(number)
        return path if path is not None and path.peer == peer and path.down is None else None

    async def connect(self, peer: NodeLife, *, timeout: Seconds) -> PathBase:
        """Return the path to a peer, and set it up if there is none. Concurrent callers share one
        attempt.

        Errors: `TransferTimeout`, or another `TransferError` that names the step. Cancellation: the
        attempt goes on.
        """
        path = self._up.get(peer)
        if path is not None:
            return path
        task = self._connecting.get(peer)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(peer, timeout))
            self._connecting[peer] = task
            task.add_done_callback(lambda done: self._connected(peer, done))
        try:
            async with asyncio.timeout(
                timeout
            ):  # the task's own timeout is that of its first caller
                return await asyncio.shield(task)
        except TimeoutError:
            reason = f"not done within {timeout:g} s"
            raise TransferTimeout.at("", self._name(peer), "connect", reason) from None

    def _connected(self, peer: NodeLife, task: asyncio.Task[PathBase]) -> None:
        """An attempt to connect has ended; reads its error, which may have no other reader."""
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()

    async def _connect(self, peer: NodeLife, timeout: Seconds) -> PathBase:
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

    def _exchange(self, peer: NodeLife, number: int, timeout: Seconds) -> HelloExchange:
        async def exchange(details: bytes) -> PathWelcome:
            hello = PathHello(
                backend=self.name,
                epoch=self.epoch,
                path=number,
                regions=self.cards,
                details=details,
            )
            answer = await self._asked(peer, hello, timeout)
            if not isinstance(answer, PathWelcome) or answer.epoch != peer.epoch:
                reason = f"the peer has restarted: {getattr(answer, 'epoch', answer)}"
                raise TransferRefused.at("", self._name(peer), "connect", reason)
            return answer

        return exchange

    async def _asked(
        self, peer: NodeLife, control: TransferControl, timeout: Seconds
    ) -> TransferControl:
        """The peer's answer; its refusal is raised from this node's view."""
        try:
            return await self.ask(peer, control, timeout)
        except TransferError as error:
            reason = f"the peer says: {error.message}"
            raise type(error).at("", self._name(peer), "connect", reason) from error

    async def _say_ready(self, path: PathBase, timeout: Seconds) -> None:
        """Tell the peer that it may use the path; it may do so before its answer is here."""
        try:
            await self._asked(path.peer, PathReady(path.remote), timeout)
        except BaseException:
            path.fail("connect", "the peer did not confirm that it is ready")
            raise

    def _rise(self, path: PathBase) -> None:
        """The path is in use: end the paths to earlier lives of the peer."""
        if path.down is None:
            self._up[path.peer] = path
        for other in list(self._paths.values()):
            if other.peer.node == path.peer.node and other.peer.epoch < path.peer.epoch:
                other.fail("peer", f"a later life of it, {path.peer.epoch}, has a path")

    def _enter(self, path: PathBase, number: int) -> None:
        self._paths[number] = path
        path.tell = partial(self._tell_soon, path)

    def number_from(self, first: int) -> None:
        """Number the paths from here on. A ticket names a path: numbers must not come again in
        another life of the node, nor in another run of its engine."""
        self._numbers = first

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def forget(self, path: PathBase) -> None:
        """Remove a path that has ended."""
        self._paths.pop(path.number, None)
        if self._up.get(path.peer) is path:
            del self._up[path.peer]
        timer = self._half_open.pop(path.number, None)
        if timer is not None:
            timer.cancel()

    # ------------------------------------------------------------------ courtesies

    def _tell_soon(self, path: PathBase, control: TransferControl) -> None:
        """Send the peer a message in the background, if it can still be reached."""
        if path.remote:
            task = asyncio.get_running_loop().create_task(self._tell(path, control))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, path: PathBase, control: TransferControl) -> None:
        with contextlib.suppress(PdserveError, TimeoutError):
            await self.ask(path.peer, control, _COURTESY)

    # ------------------------------------------------------------------ control

    async def answer(self, peer: NodeLife, control: TransferControl) -> TransferControl:
        """Answer a control message of an authenticated peer. Errors: `TransferRefused` for a
        message that does not fit, which the caller passes on."""
        self._check_open(peer)
        match control:
            case PathHello():
                return await self._welcome(peer, control)
            case PathReady():
                self._on_ready(self._mine(peer, control.path, "connect"))
            case StopTicket():
                path = self._mine(peer, control.path, "stop")
                await self._stopped(path, control.slot, control.generation)
            case TicketWithdrawn():
                path = self._mine(peer, control.path, "withdraw")
                path.given_up(control.slot, control.generation)
            case PathGone():
                path = self._mine(peer, control.path, "close")
                path.fail("peer", control.reason or "the peer closed the path")
            case _:
                self._refuse(peer, "control", f"{type(control).__name__} is not a request")
        return ControlDone()

    async def _welcome(self, peer: NodeLife, hello: PathHello) -> PathWelcome:
        if hello.backend != self.name:
            self._refuse(
                peer, "connect", f"the hello is for backend {hello.backend}, not {self.name}"
            )
        if hello.epoch != peer.epoch:
            self._refuse(peer, "connect", f"its hello names epoch {hello.epoch}, its link another")
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
        return PathWelcome(
            epoch=self.epoch,
            path=number,
            regions=self.cards,
            details=details,
        )

    def _on_ready(self, path: PathBase) -> None:
        timer = self._half_open.pop(path.number, None)
        if timer is not None:
            timer.cancel()
            self._rise(path)

    def _mine(self, peer: NodeLife, number: int, step: str) -> PathBase:
        path = self._paths.get(number)
        if path is None or path.peer != peer:
            self._refuse(peer, step, f"there is no path {number}")
        return path

    def _refuse(self, peer: NodeLife, step: str, reason: str) -> NoReturn:
        raise TransferRefused.at("", self._name(peer), step, reason)

    # ------------------------------------------------------------------ the rest

    async def close(self) -> None:
        """Closes every path and refuses new ones. Each peer has 2 s to learn of it."""
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

    def _check_open(self, peer: NodeLife) -> None:
        if self.closed:
            self._refuse(peer, "connect", "this node has closed its transfers")

    def _name(self, peer: NodeLife) -> str:
        return f"{peer} over {self.name}"
