"""Interfaces of the network: what the layers above use, and what it needs of byte transports.

    Network      one node's links: listen, dial, look up    implemented by `endpoint`
    Link         one authenticated peer                     implemented by `link`
    LinkHandler  handles what peers start                   implemented by the runtime
    StreamSink   reads a stream                             implemented by its opener
    ByteNetwork  connections that carry bytes               `transport.tcp`, `transport.memory`

Everything belongs to one event loop. Sending is synchronous: it appends, frames leave in the order
of the calls, and a cancelled task cannot leave half a frame behind. Waiting is separate: `send`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from pdserve.ids import Bytes, Epoch, NodeId, NodeLife, Seconds
    from pdserve.wire.codec import Method
    from pdserve.wire.parser import Buffer

__all__ = [
    "ByteNetwork",
    "IncomingCall",
    "IncomingStream",
    "ItemStream",
    "Link",
    "LinkDownReason",
    "LinkHandler",
    "LinkStats",
    "NetListener",
    "Network",
    "Peer",
    "StreamLink",
    "StreamOpener",
    "StreamSink",
]

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Peer:
    """The authenticated node at the other end; fixed for the life of the link."""

    node: NodeId
    epoch: Epoch
    address: str
    """Address at which it can be dialled; empty: it cannot."""
    version: int
    """The negotiated protocol version."""
    features: int


@dataclass(frozen=True, slots=True)
class LinkDownReason:
    """Why a link ended."""

    cause: str
    """One word: closed, shutdown, duplicate, replaced, silent, violation, reset, eof."""
    message: str


@dataclass(frozen=True, slots=True)
class LinkStats:
    """A snapshot of one link's counters."""

    pending: int
    """Own requests without an answer."""
    serving: int
    """The peer's requests that this node has not answered."""
    streams: int
    queued_bytes: Bytes
    """Bytes ever queued for sending, over all connections of the link."""
    unsent_bytes: Bytes
    """Bytes not handed to the transport yet."""
    granted: int
    """Credit granted to the peer and neither used up nor returned."""
    bulk: bool
    """True if there is a bulk connection."""


class StreamLink(Protocol):
    """What a stream says of its link."""

    @property
    def peer(self) -> Peer: ...

    @property
    def local(self) -> bool:
        """True if the peer is in this process: items are records then, which belong to the reader
        once they are sent. False: they are encoded."""
        ...


class ItemStream(Protocol):
    """One stream of a link of either kind. Either side may end its half; the other half goes on."""

    @property
    def link(self) -> StreamLink: ...

    @property
    def sendable(self) -> bool:
        """True if `try_send` would be accepted now."""
        ...

    def try_send(self, body: Any, *, last: bool = False) -> bool:
        """Sends one item if the peer has granted credit; False: nothing was sent. Raises `LinkLost`
        (not sent) if this half has ended, `PayloadTooLarge`.
        """
        ...

    def end(self) -> None:
        """Completes this half; does nothing if it has ended."""
        ...

    def abort(self, error: BaseException) -> None:
        """Ends both halves: the peer's sink gets `error`, the own sink is not called any more."""
        ...


class StreamSink(Protocol):
    """Reads a stream. Called on the event loop; must be quick and must not raise."""

    def on_data(self, body: Any) -> None:
        """Handles one item."""
        ...

    def on_end(self, error: BaseException | None) -> None:
        """Handles the end: the peer's half is complete (None) or the stream failed. Once."""
        ...

    def on_unblocked(self) -> None:
        """Notes that `try_send` may succeed again."""
        ...


class IncomingCall(Protocol):
    """A request of another node. Answer it once; later answers are dropped."""

    on_cancel: Callable[[], None] | None
    """Called once if the answer is no longer wanted: cancelled, past its deadline, link lost."""

    @property
    def life(self) -> NodeLife:
        """The life of the node that asks."""
        ...

    @property
    def method(self) -> int: ...

    def read(self, method: Method[Q, R]) -> Q:
        """The message. Errors: `ProtocolError` if it does not decode."""
        ...

    @property
    def deadline(self) -> Seconds:
        """The deadline, on the event loop's clock."""
        ...

    @property
    def done(self) -> bool:
        """True if it was answered, was cancelled, or is past its deadline."""
        ...

    def reply(self, message: object) -> None:
        """Answers with a typed body."""
        ...

    def fail(self, error: BaseException) -> None:
        """Answers with an error; foreign exceptions arrive as `PdserveError`."""
        ...


class LinkHandler(Protocol):
    """Handles what peers start. Called on the event loop; must be quick.

    An exception from `on_request` or `on_stream` becomes the answer. An undecodable body is a
    `ProtocolError` and counts against the peer.
    """

    def on_link_up(self, link: Link) -> None:
        """Notes a new link; from now on `Network.link` returns it for its peer."""
        ...

    def on_link_down(self, link: Link, down: LinkDownReason) -> None:
        """Notes a closed link, after everything under way on it has ended. The peer may have
        another link by now: ask `Network.link`.
        """
        ...

    def on_tell(self, link: Link, method: int, body: Buffer) -> None: ...

    def on_request(self, call: IncomingCall) -> None:
        """Handles a request; it may be answered later. Without an answer in time, its deadline
        answers it.
        """
        ...

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        """Handles a new stream: call `accept`, now or later, or `abort`."""
        ...


class IncomingStream(ItemStream, Protocol):
    """A stream that the peer opened."""

    def accept(self, sink: StreamSink, *, window: int = 0) -> None:
        """Reads the stream with `sink`. `window` is the credit to grant (0: the peer sends
        nothing). Raises `Overloaded` if no credit is left.
        """
        ...


class StreamOpener(StreamLink, Protocol):
    """A link of either kind, to open streams on."""

    def open_stream(
        self, method: int, body: Buffer, sink: StreamSink, *, window: int | None = None
    ) -> ItemStream:
        """As `Link.open_stream`, for streams on which both sides send."""
        ...


class Link(Protocol):
    """One authenticated peer, for one life of the connection to it."""

    @property
    def peer(self) -> Peer: ...

    @property
    def local(self) -> bool:
        """As `StreamLink.local`."""
        ...

    @property
    def down(self) -> LinkDownReason | None:
        """Why it ended; None while it is up."""
        ...

    @property
    def retiring(self) -> bool:
        """True if nothing new can be started on it; work under way goes on."""
        ...

    def tell(self, method: int, body: Buffer) -> None:
        """Sends a one-way message. Raises `LinkLost` (not sent), `Overloaded`,
        `PayloadTooLarge`.
        """
        ...

    async def request(
        self,
        method: Method[Q, R],
        message: Q,
        *,
        timeout: Seconds,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Sends a request and waits for the answer.

        Raises `DeadlineExceeded` after `timeout`; `LinkLost`, whose `sent` says whether the peer
        may have acted; `Overloaded` and `PayloadTooLarge` before anything is sent; the peer's
        error; `ProtocolError` for an answer of another type. Cancellation tells the peer. `late`
        is called with an answer that arrives after a cancellation or the deadline, for answers that
        grant a resource which must be released.
        """
        ...

    def open_stream(
        self,
        method: int,
        body: Buffer,
        sink: StreamSink,
        *,
        window: int | None = None,
        last: bool = False,
    ) -> ItemStream:
        """Opens a stream. `window` is the credit granted to the peer, 0 if it sends nothing.
        `last`: this side sends nothing more. Raises `LinkLost` (not sent), `Overloaded`,
        `PayloadTooLarge`.
        """
        ...

    async def open_bulk_stream(
        self,
        method: int,
        body: Buffer,
        sink: StreamSink,
        *,
        timeout: Seconds,
        window: int | None = None,
        last: bool = False,
    ) -> ItemStream:
        """Opens a stream on the bulk connection, which is dialled first if there is none. Raises
        what `open_stream` raises, `DeadlineExceeded`, `DialFailed`.
        """
        ...

    def close(self, message: str = "") -> None:
        """Starts nothing more; closes when work under way has ended, at the latest after
        `retire_after`.
        """
        ...

    def abort(self, message: str = "") -> None:
        """Ends the link now; work under way ends with `LinkLost`."""
        ...

    def stats(self) -> LinkStats: ...


class Network(Protocol):
    """One node's links."""

    @property
    def links(self) -> Mapping[NodeId, Link]:
        """A live view: the current link of each connected peer."""
        ...

    def link(self, node: NodeId) -> Link | None:
        """The current link to `node`; None: there is none."""
        ...

    async def listen(self, address: str) -> str:
        """Accepts peers at `address` (`host:port`, port 0: any); returns the address in use. Raises
        `ConfigError` if that is impossible.
        """
        ...

    async def dial(self, address: str, *, expect: NodeId | None = None) -> Link:
        """Returns the link to the node at `address`; one dial per address at a time.

        With `expect`, a usable link to that node is returned as it is. Otherwise a new connection
        is made, and if it leads to a linked node, one of the two stays. Raises `DialFailed` or one
        of its kinds; `WrongPeer` if another node than `expect` answers. Cancellation: only the
        waiting ends.
        """
        ...

    async def close(self, *, grace: Seconds = 0.0) -> None:
        """Refuses new links, lets work under way finish for up to `grace`, ends the rest."""
        ...


class NetListener(Protocol):
    """An open listening address."""

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        ...

    async def close(self) -> None:
        """Accepts no more connections; accepted ones go on."""
        ...


class ByteNetwork(Protocol):
    """Ordered byte connections between addresses. Transports behave like asyncio's: writes never
    block, `pause_writing` and `resume_writing` follow the limits, `connection_lost` comes
    exactly once.
    """

    async def listen(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> NetListener:
        """Listens at an address. Raises `ConfigError`."""
        ...

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        """Connects; returns after `connection_made`. Raises `DialFailed` or one of its kinds."""
        ...

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        """SHA-256 of the certificate that the accepting side showed; empty without TLS."""
        ...
