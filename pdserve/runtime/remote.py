"""Actors of other nodes: refs over links, and the answering side of them.

    0x0200 ask      request: Parcel -> the answer's own bytes
    0x0201 tell     Parcel
    0x0202 stream   opened by a Parcel; items are answers; the reader leaves by a reset
    0x0203 watch    opened by Whom; one item, Terminated

A watch is a stream, so that neither side keeps a table of the other's: a link that ends takes its
watches along, and the watching side opens them anew on the next link, until membership says that
life of the node is over. Asks under way end with their link. Deadlines travel as the time left.

It knows nothing of where nodes are or who is alive: those are the node's. Owned by whoever owns the
node.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DialTimeout,
    LinkLost,
    NoActor,
    Overloaded,
    PdserveError,
    ProtocolError,
)
from pdserve.runtime.actors import Home, LocalRef
from pdserve.runtime.envelope import Envelope
from pdserve.runtime.intensity import Backoff, Restarts
from pdserve.runtime.ref import WINDOW, ActorRef, Address, Terminated, Watch
from pdserve.runtime.registry import Gone
from pdserve.runtime.streams import Inlet, Outlet
from pdserve.wire.codec import Method, decoder, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from random import Random

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.net.base import Call, Incoming, Link
    from pdserve.runtime.actor import Cell
    from pdserve.runtime.actors import Actors
    from pdserve.runtime.ref import Contract
    from pdserve.runtime.registry import MemberEvent, Registry
    from pdserve.wire.parser import Buffer

__all__ = ["Host", "RemoteActors", "RemoteRef"]

_log = logging.getLogger(__name__)

M = TypeVar("M")
R = TypeVar("R")
Q = TypeVar("Q")
A = TypeVar("A")


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A message to an actor. Its epoch is the link's: a link leads to one life of a node."""

    contract: str
    name: str
    uid: int
    message: msgspec.Raw


class Whom(msgspec.Struct, frozen=True, array_like=True):
    """The actor to watch."""

    name: str
    uid: int


ASK: Final = Method(0x0200, "actor-ask", Parcel, msgspec.Raw)
TELL: Final = 0x0201
STREAM: Final = 0x0202
WATCH: Final = 0x0203

_decode_parcel = decoder(Parcel)
_decode_whom = decoder(Whom)
_decode_terminated = decoder(Terminated)

_WATCH_WINDOW: Final[Bytes] = 2048
"""One `Terminated` fits."""
_DIAL: Final[Seconds] = 5.0
"""How long one attempt to reach a watched node takes."""
_AGAIN: Final = Restarts(first=0.1, cap=5.0)
"""Pauses between them."""


class Host(Home, Protocol):
    """What this file needs of `node.Node`."""

    @property
    def registry(self) -> Registry: ...

    @property
    def random(self) -> Random: ...

    def now(self) -> Seconds: ...

    def serve(self, method: Method[Q, A], answer: Callable[[Q, Call], A | None]) -> None: ...

    def serve_tell(self, number: int, hear: Callable[[Link, Buffer], None]) -> None: ...

    def serve_stream(self, number: int, opened: Callable[[Incoming, Buffer], None]) -> None: ...

    def on_member(self, listener: Callable[[MemberEvent], None]) -> object: ...

    def link_nowait(self, node: NodeId) -> Link | None: ...

    async def link(self, node: NodeId, *, timeout: Seconds) -> Link: ...


class RemoteActors:
    """See above; one per node."""

    def __init__(self, host: Host, actors: Actors) -> None:
        self.host = host
        self.dead_letters = 0
        """Tells from other nodes that no actor took."""
        self._actors = actors
        self._watches: dict[tuple[NodeId, Epoch], dict[Watch, Address]] = {}
        host.serve(ASK, self._asked)
        host.serve_tell(TELL, self._told)
        host.serve_stream(STREAM, self._opened)
        host.serve_stream(WATCH, self._watched)
        host.on_member(self._on_member)

    @property
    def watches(self) -> int:
        """Actors of other nodes that are watched from here."""
        return sum(map(len, self._watches.values()))

    def ref(self, contract: Contract[M, R], address: Address) -> ActorRef[M, R]:
        """A ref to an actor anywhere; a local one if the actor is here, in this life."""
        home = self.host
        if (address.node, address.epoch) == (home.id, home.epoch):
            return LocalRef(self._actors, contract, address.name, address.uid)
        return RemoteRef(self, contract, address)

    # ------------------------------------------------------------------ answering

    def _take(self, parcel: Parcel) -> tuple[Cell[Any, Any], Any]:
        """Raises `NoActor`, `ProtocolError`."""
        cell = self._actors.find(parcel.name, parcel.uid, parcel.contract)
        return cell, cell.ref.contract.decode_message(parcel.message)

    def _asked(self, parcel: Parcel, call: Call) -> None:
        cell, message = self._take(parcel)
        envelope = Envelope(message, call)
        cell.post(envelope)
        call.on_cancel = lambda: cell.withdraw(envelope)

    def _told(self, link: Link, body: Buffer) -> None:
        try:
            cell, message = self._take(_decode_parcel(body))
            cell.post(Envelope(message))
        except (NoActor, Overloaded) as error:
            self.dead_letters += 1
            _log.debug("a tell from %s was dropped: %s", link.peer.node, error)

    def _opened(self, stream: Incoming, body: Buffer) -> None:
        cell, message = self._take(_decode_parcel(body))

        def finish(error: BaseException | None) -> None:
            if error is None:
                stream.end()
            else:
                stream.abort(error)

        outlet: Outlet[Any] = Outlet(lambda item: stream.try_send(encode(item)), finish)
        cell.post(Envelope(message, outlet=outlet))
        stream.accept(_Reverse(outlet.left, outlet.unblocked))

    def _watched(self, stream: Incoming, body: Buffer) -> None:
        whom = _decode_whom(body)

        def ended(terminated: Terminated) -> None:
            if not stream.try_send(encode(terminated), last=True):
                stream.abort(ProtocolError("a watch needs credit for one item"))

        watch = self._actors.watch(whom.name, whom.uid, ended)
        stream.accept(_Reverse(watch.cancel))

    # ------------------------------------------------------------------ reaching

    async def link(self, address: Address, timeout: Seconds) -> Link:
        """The link to that life of the node. Raises `NoActor`, `LinkError` (not sent)."""
        try:
            link = await self.host.link(address.node, timeout=timeout)
        except DeadlineExceeded as error:
            raise DialTimeout(error.message) from None
        return _checked(link, address)

    def link_nowait(self, address: Address) -> Link:
        """The same without waiting."""
        link = self.host.link_nowait(address.node)
        if link is None:
            raise LinkLost(f"there is no link to {address.node}", sent=False)
        return _checked(link, address)

    # ------------------------------------------------------------------ watching

    def watch(self, address: Address, callback: Callable[[Terminated], None]) -> Watch:
        """See `ActorRef.watch`. Raises `Draining` if this node is going away."""
        watch = Watch(callback)
        member = self.host.registry.get(address.node)
        if member is None or member.epoch > address.epoch:
            gone = Terminated(address, failed=True, reason=f"{address.node} is not in the cluster")
            asyncio.get_running_loop().call_soon(watch.fire, gone)
            return watch
        task = self.host.tasks.spawn(self._follow(watch, address), f"watch {address}")
        life = (address.node, address.epoch)
        self._watches.setdefault(life, {})[watch] = address

        def forget() -> None:
            task.cancel()
            watches = self._watches[life]
            del watches[watch]
            if not watches:
                del self._watches[life]

        watch.on_cancel = forget
        return watch

    async def _follow(self, watch: Watch, address: Address) -> None:
        """Ask for the end over one link after the other. `_on_member` ends it with the node."""
        backoff = Backoff(_AGAIN, self.host.random)
        while True:
            try:
                link = await self.link(address, _DIAL)
                watch.fire(await _end_of(link, address))
                return
            except NoActor as error:  # the node is in a later life
                watch.fire(Terminated(address, failed=True, reason=error.message))
                return
            except PdserveError as error:
                _log.debug("the watch of %s was interrupted: %s", address, error)
            await asyncio.sleep(backoff.failed(self.host.now()))

    def _on_member(self, event: MemberEvent) -> None:
        if isinstance(event, Gone):
            life = (event.member.node, event.member.epoch)
            for watch, address in tuple(self._watches.get(life, {}).items()):
                reason = f"{event.member.node}: {event.reason}"
                watch.fire(Terminated(address, failed=event.reason != "left", reason=reason))


class RemoteRef(ActorRef[M, R], Generic[M, R]):
    """An actor on another node, or in another life of this one."""

    __slots__ = ("_address", "_remote", "contract")

    def __init__(self, remote: RemoteActors, contract: Contract[M, R], address: Address) -> None:
        self.contract = contract
        self._remote = remote
        self._address = address

    @property
    def address(self) -> Address:
        return self._address

    def _parcel(self, message: M) -> Parcel:
        address = self._address
        raw = msgspec.Raw(encode(message))
        return Parcel(self.contract.name, address.name, address.uid, raw)

    def tell(self, message: M) -> None:
        self._remote.link_nowait(self._address).tell(TELL, encode(self._parcel(message)))

    async def connect(self, *, timeout: Seconds) -> None:
        await self._remote.link(self._address, timeout)

    async def ask(self, message: M, *, timeout: Seconds) -> R:
        now = self._remote.host.now
        until = now() + timeout
        link = await self._remote.link(self._address, timeout)
        answer = await link.request(ASK, self._parcel(message), timeout=until - now())
        return self.contract.decode_answer(answer)

    @asynccontextmanager
    async def stream(
        self, message: M, *, timeout: Seconds, window: Bytes = WINDOW
    ) -> AsyncIterator[Inlet[R]]:
        link = await self._remote.link(self._address, timeout)
        inlet: Inlet[R] = Inlet(timeout)
        sink = _Reader(inlet, self.contract.decode_answer)
        body = encode(self._parcel(message))
        stream = link.open_stream(STREAM, body, sink, window=window, hold=True)
        inlet.taken = stream.consumed
        try:
            yield inlet
        finally:
            complete = inlet.complete
            inlet.end(Cancelled("the reader has left the stream"))
            inlet.discard()
            if complete:
                stream.end()
            else:
                stream.abort(Cancelled("the reader has left the stream"))

    def watch(self, callback: Callable[[Terminated], None]) -> Watch:
        return self._remote.watch(self._address, callback)


# ---------------------------------------------------------------------- sinks


class _Reverse:
    """The half of a stream on which nothing comes: only its end, and credit for the other half."""

    def __init__(
        self, ended: Callable[[], None], unblocked: Callable[[], None] = lambda: None
    ) -> None:
        self._ended = ended
        self.on_unblocked = unblocked

    def on_data(self, body: Buffer) -> None:
        raise ProtocolError("nothing is expected on this half of the stream")

    def on_payload(self, meta: bytes, size: Bytes) -> memoryview | None:
        return None

    def on_raw(self, meta: bytes, payload: Buffer) -> None:
        self.on_data(payload)

    def on_end(self, error: BaseException | None) -> None:
        self._ended()


class _Reader(Generic[R]):
    """Feeds an inlet."""

    def __init__(self, inlet: Inlet[R], decode: Callable[[Buffer], R]) -> None:
        self._inlet = inlet
        self._decode = decode

    def on_data(self, body: Buffer) -> None:
        try:
            self._inlet.push(self._decode(body), len(body))
        except ProtocolError as error:
            self._inlet.end(error)  # the link aborts the stream, and then says nothing to us
            raise

    def on_payload(self, meta: bytes, size: Bytes) -> memoryview | None:
        return None

    def on_raw(self, meta: bytes, payload: Buffer) -> None:
        self._inlet.end(ProtocolError("raw bytes are no item"))

    def on_end(self, error: BaseException | None) -> None:
        self._inlet.end(error)

    def on_unblocked(self) -> None:
        pass


async def _end_of(link: Link, address: Address) -> Terminated:
    """Wait for the end of an actor, as long as the link lasts: that has its own deadline.

    Raises `LinkLost` and what `Link.open_stream` raises. Cancellation: the peer is told.
    """
    inlet: Inlet[Terminated] = Inlet(None)
    body = encode(Whom(address.name, address.uid))
    sink = _Reader(inlet, _decode_terminated)
    stream = link.open_stream(WATCH, body, sink, window=_WATCH_WINDOW)
    try:
        async for terminated in inlet:
            return terminated
        raise ProtocolError(f"{address.node} ended a watch without a word")
    finally:
        stream.abort(Cancelled("the watch is over"))


def _checked(link: Link, address: Address) -> Link:
    """Raises `NoActor` if the link leads to a later life than the address."""
    if link.peer.epoch > address.epoch:
        raise NoActor(f"{address.node} has ended; it is in a later life")
    if link.peer.epoch < address.epoch:
        raise LinkLost(f"the link to {address.node} is one to an earlier life", sent=False)
    return link
