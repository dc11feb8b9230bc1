"""What the layers above need of the network, and what the network needs of bytes.

    Network      one node's links: listen, dial, look up          implemented by `endpoint`
    Link         one authenticated peer                           implemented by `link`
    Handler      what a node does with what its peers start       implemented by the runtime
    Sink         who reads a stream                               implemented by whoever opens one
    ByteNetwork  connections that carry bytes                     implemented by `tcp` and `memory`

Everything belongs to one event loop. Sending is synchronous: it appends, frames leave in the order
of the calls, and a cancelled task cannot leave half a frame behind. Waiting is apart: `drain`,
`send`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.wire.codec import Method
    from pdserve.wire.parser import Buffer

__all__ = [
    "ByteNetwork",
    "Call",
    "Down",
    "Handler",
    "Link",
    "LinkStatistics",
    "Listener",
    "Network",
    "Peer",
    "Sink",
    "Stream",
]

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: authenticated, fixed for the life of the link."""

    node: NodeId
    epoch: Epoch
    address: str
    """Where others dial it; empty: nobody can."""
    version: int
    """Of the protocol, as agreed."""
    features: int


@dataclass(frozen=True, slots=True)
class Down:
    """Why a link ended."""

    cause: str
    """One word: closed, shutdown, duplicate, replaced, silent, violation, reset, eof."""
    message: str


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """A snapshot of one link."""

    pending: int
    """Requests of ours that have no answer yet."""
    serving: int
    """Requests of the peer's that we have not answered yet."""
    streams: int
    queued_bytes: Bytes
    """Bytes ever handed to the link for sending, over all its connections."""
    unsent_bytes: Bytes
    """Bytes that have not been handed to the transport."""
    granted: int
    """Credit granted to the peer and not yet used up or returned."""
    bulk: bool
    """There is a bulk connection."""


class Stream(Protocol):
    """One stream of a link. Either side may end its half; the other half goes on."""

    @property
    def link(self) -> Link: ...

    @property
    def sendable(self) -> bool:
        """`try_send` would be accepted now."""
        ...

    def try_send(self, body: Buffer, *, last: bool = False) -> bool:
        """Send one item if the peer has granted credit; False: nothing was sent.

        Raises `LinkLost` (not sent) if this half has ended, `PayloadTooLarge`.
        """
        ...

    async def send(self, body: Buffer, *, timeout: Seconds, last: bool = False) -> None:
        """Send one item as soon as there is credit.

        Raises `DeadlineExceeded` and what `try_send` raises; then nothing was sent. Cancellation:
        nothing was sent.
        """
        ...

    def try_send_raw(
        self,
        meta: bytes,
        payload: Buffer,
        on_sent: Callable[[], None] | None = None,
        *,
        last: bool = False,
    ) -> bool:
        """Send bytes as they are, behind a small msgpack `meta`. Like `try_send` otherwise.

        `payload` is not copied. It must not change before `on_sent` is called, which happens
        exactly once if this returned True: when the transport has drained past it, or the link is
        gone."""
        ...

    async def send_raw(
        self, meta: bytes, payload: Buffer, *, timeout: Seconds, last: bool = False
    ) -> None:
        """Returns when the payload may be reused, having left this process.

        Raises `DeadlineExceeded`, `LinkLost`. Cancellation, a deadline: if it had been handed over,
        the link goes on reading it; use `try_send_raw` where memory is reused after a failure.
        """
        ...

    def end(self) -> None:
        """This half is complete; nothing happens if it has ended."""
        ...

    def abort(self, error: BaseException) -> None:
        """Want nothing more of the stream; the peer's sink gets `error`, ours falls silent."""
        ...

    def consumed(self, size: Bytes) -> None:
        """An item of `size` bytes was taken; for streams whose sink holds items back."""
        ...


class Sink(Protocol):
    """Who reads a stream. Called on the event loop; quick, must not raise."""

    def on_data(self, body: Buffer) -> None:
        """One item."""
        ...

    def on_payload(self, meta: bytes, size: Bytes) -> memoryview | None:
        """A large raw payload comes: where to put it (writable, `size` bytes); None drops it.

        The memory is written to until `on_raw`, `on_end`, or `abort` of the stream.
        """
        ...

    def on_raw(self, meta: bytes, payload: Buffer) -> None:
        """A raw payload is complete: small, or where `on_payload` said; empty if dropped."""
        ...

    def on_end(self, error: BaseException | None) -> None:
        """Nothing more comes: the peer's half is complete (None) or the stream failed. Once."""
        ...

    def on_unblocked(self) -> None:
        """`try_send` may succeed again."""
        ...


class Call(Protocol):
    """A peer's request. Answer it once; afterwards answers are dropped."""

    on_cancel: Callable[[], None] | None
    """Called once if the answer is no longer wanted: cancelled, past its deadline, link lost."""

    @property
    def link(self) -> Link: ...

    @property
    def method(self) -> int: ...

    @property
    def body(self) -> Buffer: ...

    @property
    def deadline(self) -> Seconds:
        """On the event loop's clock."""
        ...

    @property
    def done(self) -> bool:
        """Answered, cancelled, or past its deadline."""
        ...

    def reply(self, message: object) -> None:
        """Answer with a typed body."""
        ...

    def fail(self, error: BaseException) -> None:
        """Answer with an error; foreign ones arrive as `PdserveError`."""
        ...


class Handler(Protocol):
    """What a node does with what its peers start. Called on the event loop; quick.

    An exception from `on_request` or `on_stream` becomes the answer. An undecodable body is a
    `ProtocolError` and counts against the peer.
    """

    def on_link_up(self, link: Link) -> None:
        """The link is the one `Network.link` returns for its peer from now on."""
        ...

    def on_link_down(self, link: Link, down: Down) -> None:
        """The link is closed, after all that was under way on it has ended. The peer may have
        another link by now: ask `Network.link`."""
        ...

    def on_tell(self, link: Link, method: int, body: Buffer) -> None: ...

    def on_request(self, call: Call) -> None:
        """Answer now or later; what is not answered in time is answered by its deadline."""
        ...

    def on_stream(self, stream: Incoming, method: int, body: Buffer) -> None:
        """Call `accept` now or later, or `abort`."""
        ...


class Incoming(Stream, Protocol):
    """A stream that the peer opened."""

    def accept(self, sink: Sink, *, window: int = 0, hold: bool = False) -> None:
        """Read it; `window` is the credit to grant (0: the peer sends nothing).

        `hold`: items count as taken only by `consumed`. Raises `Overloaded` if no credit is left.
        """
        ...


class Link(Protocol):
    """One authenticated peer, for one life of the connection to it."""

    @property
    def peer(self) -> Peer: ...

    @property
    def down(self) -> Down | None:
        """Why it ended; None while it has not."""
        ...

    @property
    def retiring(self) -> bool:
        """Nothing more can be started on it; what is under way goes on."""
        ...

    def tell(self, method: int, body: Buffer) -> None:
        """Send one way. Raises `LinkLost` (not sent), `Overloaded`, `PayloadTooLarge`."""
        ...

    async def request(
        self,
        method: Method[Q, R],
        message: Q,
        *,
        timeout: Seconds,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Ask and wait for the answer.

        Raises `DeadlineExceeded` after `timeout`; `LinkLost`, whose `sent` says whether the peer
        may have acted; `Overloaded` and `PayloadTooLarge` before anything is sent; whatever the
        peer failed with; `ProtocolError` for an answer of another type. Cancellation: the peer is
        told. `late` hears the answer that comes all the same, if one was on its way when the wait
        ended by cancellation or deadline; for answers that give something which must be given
        back."""
        ...

    def open_stream(
        self,
        method: int,
        body: Buffer,
        sink: Sink,
        *,
        window: int | None = None,
        last: bool = False,
        hold: bool = False,
    ) -> Stream:
        """Open a stream; `window` is the credit granted to the peer, 0 if it is not to send.

        `last`: this side sends nothing more. `hold`: see `Incoming.accept`. Raises `LinkLost` (not
        sent), `Overloaded`, `PayloadTooLarge`.
        """
        ...

    async def open_bulk_stream(
        self,
        method: int,
        body: Buffer,
        sink: Sink,
        *,
        timeout: Seconds,
        window: int | None = None,
        last: bool = False,
        hold: bool = False,
    ) -> Stream:
        """The same on the bulk connection, which is dialled first if there is none.

        Raises `DeadlineExceeded`, `DialFailed` besides.
        """
        ...

    async def drain(self, *, timeout: Seconds) -> None:
        """Wait until the transport takes more. Raises `DeadlineExceeded`, `LinkLost`."""
        ...

    def close(self, message: str = "") -> None:
        """Start nothing more; close when what is under way has ended, at the latest after
        `retire_after`."""
        ...

    def abort(self, message: str = "") -> None:
        """End now; what is under way ends with `LinkLost`."""
        ...

    def statistics(self) -> LinkStatistics: ...


class Network(Protocol):
    """One node's links."""

    @property
    def links(self) -> Mapping[NodeId, Link]:
        """A live view: the current link of each connected peer."""
        ...

    def link(self, node: NodeId) -> Link | None:
        """The current link to `node`."""
        ...

    async def listen(self, address: str) -> str:
        """Accept peers at `address` (`host:port`, port 0: any); returns the address in use.

        Raises `ConfigError` if that is impossible.
        """
        ...

    async def dial(self, address: str, *, expect: NodeId | None = None) -> Link:
        """The link to the node at `address`; one dial per address at a time.

        With `expect`, a link to that node on which something can be started is returned as it is.
        Otherwise a new connection is made, and if it leads to a node that is linked, the two are
        resolved.

        Raises `DialFailed` or one of its kinds; `WrongPeer` if another node than `expect` answers.
        Cancellation: only the waiting ends.
        """
        ...

    async def close(self, *, grace: Seconds = 0.0) -> None:
        """Refuse new links, let what is under way finish for up to `grace`, end the rest."""
        ...


class Listener(Protocol):
    """An open listening address."""

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        ...

    async def close(self) -> None:
        """Accept no more; accepted connections go on."""
        ...


class ByteNetwork(Protocol):
    """Ordered bytes between addresses, with TCP's ways of ending.

    Transports behave like asyncio's: writes never block, `pause_writing` and `resume_writing`
    follow the limits, `connection_lost` comes exactly once."""

    async def listen(self, address: str, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        """Raises `ConfigError`."""
        ...

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        """Returns after `connection_made`. Raises `DialFailed` or one of its kinds."""
        ...

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        """SHA-256 of the certificate that the accepting side showed; empty without TLS."""
        ...
