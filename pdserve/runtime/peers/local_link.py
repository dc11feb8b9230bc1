"""Passes requests, one-way messages and streams between nodes of one process, without a connection.

    Neighbours   the nodes of one process
    LocalLink    one node's way to ask and tell another one, and to open streams to it

To both nodes a local link is like a link: messages arrive in order, after the code that sent them
has run; each request has one answer, error or deadline; a caller that gives up cancels the work.
When a life of either node ends, requests and streams under way fail with `LinkLost`.

Records that cannot change are passed as they are (`wire.type_check.is_immutable`). Others are
encoded and decoded, so that no two nodes share what one of them may change. Items of streams are
passed as they are, and belong to the reader (`local_stream`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from pdserve.errors import DeadlineExceeded, LinkLost, Overloaded, PdserveError
from pdserve.ids import NodeLife, Seconds
from pdserve.net.base import Peer
from pdserve.net.lazy_deadline import LazyDeadline
from pdserve.net.timers import Timers
from pdserve.runtime.peers.local_stream import LocalLane, LocalStream
from pdserve.wire.codec import Method, encode
from pdserve.wire.error_codec import error_of, failure_of
from pdserve.wire.handshake import Versions
from pdserve.wire.limits import Limits
from pdserve.wire.type_check import is_immutable

if TYPE_CHECKING:
    from pdserve.ids import Epoch, NodeId
    from pdserve.net.base import IncomingCall, IncomingStream, StreamSink
    from pdserve.runtime.peers.handlers import ActorTable
    from pdserve.wire.codec import Notice
    from pdserve.wire.parser import Buffer

__all__ = ["LocalCall", "LocalLink", "LocalNode", "Neighbours"]

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")

_MOST: Final = Limits().pending
"""Most requests under way on a local link."""
_MOST_STREAMS: Final = Limits().streams
"""Most streams of a local link."""
_MOST_WAITING: Final = 1 << 16
"""Most messages that wait for the end of a turn. A link holds megabytes of them: when a worker
dies, a frontend ends and repeats thousands of requests in one turn."""


class LocalNode(Protocol):
    """The part of a node that is needed."""

    id: NodeId
    actors: ActorTable

    @property
    def epoch(self) -> Epoch: ...

    @property
    def address(self) -> str: ...

    def now(self) -> Seconds: ...

    def call_soon(self, callback: Callable[[], None]) -> None: ...

    def on_request(self, call: IncomingCall) -> None: ...

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None: ...


def _still() -> Seconds:
    return 0.0


class Neighbours:
    """The nodes of one process that take part in the cluster, and the local links between them."""

    def __init__(self, clock: Callable[[], Seconds] = _still) -> None:
        """`clock` measures how long messages occupy a turn of the event loop; with the default one,
        a turn takes all of them, as virtual time wants it."""
        self._clock = clock
        self._nodes: dict[NodeId, LocalNode] = {}
        self._links: dict[tuple[NodeId, NodeId], LocalLink] = {}
        """By the node that asks and the node that is asked."""

    def enter(self, node: LocalNode) -> None:
        """A life of the node has begun. An earlier node of its name takes part no more."""
        earlier = self._nodes.get(node.id)
        if earlier is not None:
            self.leave(earlier, f"another node has begun as {node.id}")
        self._nodes[node.id] = node

    def leave(self, node: LocalNode, why: str) -> None:
        """The node's life is over: its local links end. Idempotent."""
        if self._nodes.get(node.id) is not node:
            return
        del self._nodes[node.id]
        for pair in [pair for pair in self._links if node.id in pair]:
            self._links.pop(pair).end(why)

    def link(self, source: LocalNode, target: NodeId) -> LocalLink | None:
        """The local link from `source`; None: `target` is not in this process now."""
        if self._nodes.get(source.id) is not source:
            return None
        pair = source.id, target
        found = self._links.get(pair)
        if found is None and target != source.id:
            node = self._nodes.get(target)
            if node is not None:
                found = self._links[pair] = LocalLink(source, node, self._clock)
        return found


class LocalCall(msgspec.Struct, eq=False):
    """One request on a local link; implements `net.base.IncomingCall`."""

    way: LocalLink
    id: int
    kind: Method[Any, Any]
    message: Any
    deadline: Seconds
    future: asyncio.Future[Any]
    arrived: bool = False
    done: bool = False
    on_cancel: Callable[[], None] | None = None
    answer: Any = msgspec.UNSET

    @property
    def life(self) -> NodeLife:
        peer = self.way.source
        return NodeLife(peer.node, peer.epoch)

    @property
    def method(self) -> int:
        return self.kind.id

    def read(self, method: Method[Q, R]) -> Q:
        return self.message  # type: ignore[no-any-return]

    def reply(self, message: object) -> None:
        if self.done:
            return
        kind = self.kind
        answer = message if is_immutable(kind.reply) else kind.unpack_reply(encode(message))
        self.answer = answer
        if self._ends():
            self.future.set_result(answer)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PdserveError):
            _log.error("method %d failed", self.method, exc_info=error)
        if self._ends():
            # A copy without its cause, as a peer gets it: the exception may be kept and raised
            # again here.
            self.future.set_exception(error_of(failure_of(error)))

    def _ends(self) -> bool:
        """Ends the call; False if it has ended, or if its caller was cancelled in this turn."""
        if self.done:
            return False
        self.done = True
        self.way.calls.pop(self.id, None)
        return not self.future.done()

    def cancelled(self) -> None:
        """Ends the work: the answer is no longer needed."""
        self.done = True
        self.way.calls.pop(self.id, None)
        callback, self.on_cancel = self.on_cancel, None
        if callback is not None:
            try:
                callback()
            except Exception:  # a bug of the other node, which harms neither its caller nor others
                _log.exception("method %d failed when it was cancelled", self.method)

    def came_late(self, late: Callable[[Any], None]) -> None:
        """Passes on an answer that came in the turn in which its caller was cancelled."""
        if self.answer is not msgspec.UNSET:
            try:
                late(self.answer)
            except Exception:
                _log.exception("a late answer of method %d", self.method)


class LocalLink:
    """How `source` asks and tells `target`, and opens streams to it, for one life of each."""

    local: Final = True

    def __init__(self, source: LocalNode, target: LocalNode, clock: Callable[[], Seconds]) -> None:
        self.source = _peer(source)
        self.peer = _peer(target)
        """The node that is asked."""
        self.over = ""
        """Why it has ended; empty: it has not."""
        self.calls: dict[int, LocalCall] = {}
        """Requests without an answer."""
        self._target = target
        self._node = source
        loop = asyncio.get_running_loop()
        self._create_future = loop.create_future
        self._count = 0
        self.streams: dict[LocalStream, LocalStream] = {}
        """Open streams: the end of the node that asks, and the other one."""
        lanes = [LocalLane(source.call_soon, clock) for _ in range(3)]
        self._lane, self._there, self._back = lanes
        # The node's own timers end before its last tasks have asked what they ask at their end.
        self._timers = Timers(loop)
        self._due = LazyDeadline(self._timers, self._expire)

    async def request(
        self,
        method: Method[Q, R],
        message: Q,
        *,
        timeout: Seconds,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Sends a request and waits for the answer, as `net.base.Link.request`."""
        call = self._ask(method, message, self._node.now() + timeout)
        future: asyncio.Future[R] = call.future
        try:
            return await future
        except asyncio.CancelledError:
            if not call.done:
                call.cancelled()
            elif late is not None:
                call.came_late(late)
            raise

    def tell(self, notice: Notice[Q], message: Q) -> None:
        """Sends a one-way message. Errors: `LinkLost` (not sent), `Overloaded`."""
        if not is_immutable(notice.message):
            message = notice.decode(encode(message))
        self._put(partial(self._hear, notice.id, message))

    def end(self, why: str) -> None:
        """Ends all requests: those that have not arrived as not sent. Streams end after what was
        sent on them."""
        self._there.drain()
        self._back.drain()
        self.over = why
        for pair in tuple(self.streams.items()):
            for end in pair:
                end.lose(LinkLost(why))
        self.streams.clear()
        self._timers.close()
        for call in tuple(self.calls.values()):
            if not call.future.done():
                call.future.set_exception(LinkLost(why, sent=call.arrived))
            call.cancelled()

    def open_stream(
        self, method: int, body: Buffer, sink: StreamSink, *, window: int | None = None
    ) -> LocalStream:
        """Opens a stream, as `net.base.Link.open_stream`. Errors: `LinkLost` (not sent),
        `Overloaded`."""
        if self.over:
            raise LinkLost(self.over, sent=False)
        if len(self.streams) >= _MOST_STREAMS:
            raise Overloaded(f"{len(self.streams)} streams are open to {self.peer.node}")
        ours = LocalStream(self, self._there, self._sink_failed)
        theirs = LocalStream(_Back(self.source), self._back, self._sink_failed)

        def over() -> None:
            self.streams.pop(ours, None)

        LocalStream.join(ours, theirs, sink, reads=window != 0, over=over)
        self.streams[ours] = theirs
        self._there.put(partial(self._opened, theirs, method, body))
        return ours

    def _ask(self, method: Method[Q, R], message: Q, deadline: Seconds) -> LocalCall:
        if len(self.calls) >= _MOST:
            raise Overloaded(f"{len(self.calls)} requests are under way with {self.peer.node}")
        if not is_immutable(method.request):
            message = method.decode_request(encode(message))
        self._count += 1
        call = LocalCall(self, self._count, method, message, deadline, self._create_future())
        self._put(partial(self._serve, call))
        self.calls[call.id] = call
        if deadline < self._due.due:
            self._due.watch(deadline)
        return call

    # ------------------------------------------------------------------ arrivals

    def _put(self, arrival: Callable[[], None]) -> None:
        """Passes a message on in a later turn, after those before it."""
        if self.over:
            raise LinkLost(self.over, sent=False)
        if len(self._lane) >= _MOST_WAITING:
            raise Overloaded(
                f"{_MOST_WAITING} messages to {self.peer.node} wait for the event loop"
            )
        self._lane.put(arrival)

    def _serve(self, call: LocalCall) -> None:
        if call.done:
            return
        call.arrived = True
        try:
            self._target.on_request(call)
        except Exception as error:
            call.fail(error)

    def _hear(self, number: int, message: object) -> None:
        hear = self._target.actors.records.get(number)
        if hear is None or self.over:
            _log.debug("a one-way message to %s is not heard: %d", self.peer.node, number)
            return
        try:
            hear(message, self.source)
        except Exception:
            _log.exception("a one-way message of method %d to %s", number, self.peer.node)

    def _opened(self, stream: LocalStream, method: int, body: Buffer) -> None:
        try:
            self._target.on_stream(stream, method, body)
        except Exception as error:
            self._sink_failed(stream, error)

    def _sink_failed(self, stream: LocalStream, error: Exception) -> None:
        """Handles an exception of a sink: ends its stream only."""
        if not isinstance(error, PdserveError):
            _log.error("the reader of a local stream failed", exc_info=error)
        stream.abort(error)

    def _expire(self, now: Seconds) -> Seconds:
        """Ends requests that are past their deadlines; returns the earliest one left."""
        earliest = inf
        for call in tuple(self.calls.values()):
            if call.deadline > now:
                earliest = min(earliest, call.deadline)
                continue
            if not call.future.done():
                call.future.set_exception(DeadlineExceeded("the peer did not answer in time"))
            call.cancelled()
        return earliest


@dataclass(frozen=True, slots=True)
class _Back:
    """The link of a stream, at the node that did not open it."""

    peer: Peer
    local: bool = True


def _peer(node: LocalNode) -> Peer:
    newest = Versions()
    return Peer(node.id, node.epoch, node.address, newest.most, newest.features)
