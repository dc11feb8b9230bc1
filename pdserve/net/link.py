"""Runs one link: requests, one-way messages and streams over a control and a bulk connection.

The link ends when its control connection ends. The bulk connection is dialled when the first bulk
stream needs it, by the side that dialled the link; it may end and be dialled again.

When the link ends, everything under way on it ends exactly once, before `on_link_down`: each own
request with `LinkLost`, whose `sent` is False only if its frame never left this process; each
request of the peer through its `on_cancel`; each stream through its sink's `on_end`. Answers and
ends of streams that were read together with what ended the link still count.

The wire package decides about frames, `duplicate_links` about which link stays. Owned by one
`Endpoint`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from pdserve.errors import DeadlineExceeded, LinkLost, NoMethod, PdserveError, ProtocolError
from pdserve.net.base import LinkDownReason, LinkStats
from pdserve.net.connection_driver import IGNORE
from pdserve.net.lazy_deadline import LazyDeadline
from pdserve.net.link_call import LinkCall
from pdserve.net.link_stream import LinkStream
from pdserve.wire import events as ev
from pdserve.wire.codec import UNDECODABLE, encoder_for
from pdserve.wire.parser import Buffer
from pdserve.wire.protocol import GoAwayCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds
    from pdserve.net.base import LinkHandler, Peer, StreamSink
    from pdserve.net.connection_driver import ConnectionDriver
    from pdserve.net.settings import NetSettings
    from pdserve.net.timers import Timer, Timers
    from pdserve.wire.codec import Method
    from pdserve.wire.flow import StreamState

__all__ = ["PeerLink"]

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")

LateAnswerHandler = Callable[[Buffer], None]
"""Takes the body of an answer that arrives after its request was cancelled or timed out."""

PendingRequest = tuple["asyncio.Future[Buffer]", int, float, LateAnswerHandler | None]
"""An own request: the future for the answer's body, the bytes queued on the connection before the
request (below `taken`, it has left this process), the deadline, and the handler of a late
answer."""

_LONGEST: Final = 0xFFFF_FFFF
"""Longest timeout in milliseconds that the header can hold: 49 days."""
_UNSERVED: Final = "method {} is not served"
"""The text with which a peer of release 0.1 reports `NoMethod`, as a `ProtocolError`."""
_STREAMED: Final = (ev.DataReceived, ev.StreamEnded, ev.StreamReset)
_RECHECK: Final[Seconds] = 0.02
"""Interval at which a retiring link checks whether it may close."""


class PeerLink:
    """One authenticated connection to a peer; implements `net.base.Link`."""

    local: Final = False

    def __init__(
        self,
        peer: Peer,
        shell: ConnectionDriver,
        handler: LinkHandler,
        timers: Timers,
        settings: NetSettings,
        *,
        address: str,
        session: bytes,
        dial_bulk: Callable[[PeerLink], None],
        on_down: Callable[[PeerLink], None],
    ) -> None:
        self.peer = peer
        self.address = address
        """The address that this side dialled; empty: it accepted the connection."""
        self.dialled = bool(address)
        self.session = session
        """The id that the acceptor gave this link; a bulk connection names it."""
        self.down: LinkDownReason | None = None
        self.announced = False
        """True if the handler's `on_link_up` was called."""
        self.key = b""
        """The cluster key of its handshake."""

        self._loop = asyncio.get_running_loop()
        self.now: Callable[[], Seconds] = self._loop.time
        self._create_future = self._loop.create_future
        self._handler = handler
        self._timers = timers
        self._settings = settings
        self._dial_bulk = dial_bulk
        self._on_down = on_down

        # The control connection.
        self.shell = shell
        self.connection = shell.connection
        self.encode = encoder_for(self.peer.features)
        self._timeout: Seconds = 0.0
        self._milliseconds = 0  # `_timeout` in the header
        self._asking = LazyDeadline(timers, self._expire_asking)
        self._serving: dict[int, LinkCall] = {}
        self._served = LazyDeadline(timers, self._expire_serving)
        self._strikes: list[Seconds] = []  # times within `strike_window`
        # Methods that the peer, of release 0.1, does not serve and would count as a strike.
        self._unserved: set[int] = set()
        self._silence = 0  # keepalive intervals without a byte
        self._pings = 0
        # Why the link ends, as far as this is known before the transport is gone.
        self._farewell: LinkDownReason | None = None
        self._last_call: Timer | None = None
        self._next_look: Timer | None = None  # keepalive timer

        # The bulk connection.
        self.bulk: ConnectionDriver | None = None
        """The bulk connection, if there is one."""
        self._bulk_waiters: list[asyncio.Future[None]] = []
        self._bulk_error: BaseException | None = None
        self._bulk_queued: Bytes = 0  # on earlier bulk connections

        shell.rules = self._control_rules()
        self._keepalive()

    def __repr__(self) -> str:
        return f"<link to {self.peer.node}{'' if self.down is None else ', ' + self.down.cause}>"

    @property
    def retiring(self) -> bool:
        """True if nothing new can be started on it."""
        return self.connection.leaving or self.connection.left

    # ------------------------------------------------------------------ one-way messages, requests

    def tell(self, method: int, body: Buffer) -> None:
        self.connection.send_tell(method, body)
        if not self.shell.due:
            self.shell.wake()

    async def request(
        self,
        method: Method[Q, R],
        message: Q,
        *,
        timeout: Seconds,
        late: Callable[[R], None] | None = None,
    ) -> R:
        connection, shell = self.connection, self.shell
        if self._unserved and method.id in self._unserved:
            raise NoMethod(f"{self.peer.node} does not serve {method.name}")
        future: asyncio.Future[Buffer] = self._create_future()
        deadline = self.now() + timeout
        # Most requests have the same timeout as the one before.
        if timeout != self._timeout:
            self._milliseconds = min(max(0, int(timeout * 1000)), _LONGEST)
            self._timeout = timeout
        heir = None if late is None else partial(self._late, method, late)
        asking: PendingRequest = (future, connection.queued, deadline, heir)
        call = connection.send_request(method.id, self.encode(message), self._milliseconds, asking)
        if not shell.due:
            shell.wake()
        if deadline < self._asking.due:
            self._asking.watch(deadline)
        try:
            return method.unpack_reply(await future)
        except UNDECODABLE as error:
            raise method.bad_reply(error) from None
        except ProtocolError as error:
            if error.message.startswith(_UNSERVED.format(method.id)):
                raise self._note_unserved(method, error) from None
            raise
        except asyncio.CancelledError:
            if future.cancelled():
                self._withdraw(call, heir)
            # The answer and the cancellation came in the same turn of the loop.
            elif heir is not None and future.exception() is None:
                heir(future.result())
            raise

    def _note_unserved(self, method: Method[Q, R], error: ProtocolError) -> NoMethod:
        """Records that the peer does not serve a method. A peer of release 0.1 counts each such
        request as undecodable and ends the link at the third, so no more are sent."""
        if isinstance(error, NoMethod):
            return error
        self._unserved.add(method.id)
        return NoMethod(error.message)

    def _withdraw(self, call: int, heir: LateAnswerHandler | None) -> None:
        """Cancels an own request; its answer may already be on its way."""
        asking: PendingRequest | None = None
        if heir is not None:
            future: asyncio.Future[Buffer] = self._create_future()
            future.add_done_callback(partial(_inherit, heir))
            asking = (future, self.connection.queued, inf, None)
        self.connection.cancel(call, asking)
        self.wake()

    def _late(self, method: Method[Q, R], late: Callable[[R], None], body: Buffer) -> None:
        try:
            answer = method.unpack_reply(body)
        except UNDECODABLE as error:
            _log.debug("%r: a late answer of method %d: %s", self, method.id, error)
            return
        try:
            late(answer)
        except Exception:  # other requests of this link go on
            _log.exception("%r: a late answer of method %d", self, method.id)

    def _expire_asking(self, now: Seconds) -> Seconds:
        """Ends own requests that are past their deadlines: each is cancelled at the peer. Returns
        the earliest deadline that is left."""
        earliest = inf
        for call, asking in tuple(self.connection.calls.items()):
            if asking is None:
                continue  # cancelled, not yet confirmed
            future, _, deadline, heir = cast("PendingRequest", asking)
            if deadline > now:
                earliest = min(earliest, deadline)
                continue
            self._withdraw(call, heir)
            if not future.done():
                future.set_exception(DeadlineExceeded("the peer did not answer in time"))
        return earliest

    def _keep(self, serving: LinkCall) -> None:
        """Watches the deadline of a request that the handler answers later."""
        if self.down is not None:
            serving.cancelled()
            return
        serving.kept = serving.deadline
        self._serving[serving.id] = serving
        if serving.kept < self._served.due:
            self._served.watch(serving.kept)

    def served(self, serving: LinkCall) -> None:
        """Removes a request of the peer that was answered."""
        self._serving.pop(serving.id, None)

    def _expire_serving(self, now: Seconds) -> Seconds:
        earliest = inf
        for serving in tuple(self._serving.values()):
            if serving.kept <= now:
                serving.expire()
            else:
                earliest = min(earliest, serving.kept)
        return earliest

    # ------------------------------------------------------------------ streams

    def open_stream(
        self,
        method: int,
        body: Buffer,
        sink: StreamSink,
        *,
        window: int | None = None,
        last: bool = False,
    ) -> LinkStream:
        return self._open(self.shell, method, body, sink, window, last)

    async def open_bulk_stream(
        self,
        method: int,
        body: Buffer,
        sink: StreamSink,
        *,
        timeout: Seconds,
        window: int | None = None,
        last: bool = False,
    ) -> LinkStream:
        shell = self.bulk
        if self.retiring:
            raise LinkLost("the link is closed or closing", sent=False)
        if shell is None or shell.closed:
            shell = await self._wait_bulk(self.now() + timeout)
        return self._open(shell, method, body, sink, window, last)

    def _open(
        self,
        shell: ConnectionDriver,
        method: int,
        body: Buffer,
        sink: StreamSink,
        window: int | None,
        last: bool,
    ) -> LinkStream:
        if window is None:
            window = shell.connection.limits.window
        wire = shell.connection.open_stream(method, body, window=window, context=None, last=last)
        stream = LinkStream(self, shell, wire, sink)
        wire.context = stream
        if not shell.due:
            shell.wake()
        return stream

    # ------------------------------------------------------------------ the bulk connection

    async def _wait_bulk(self, deadline: Seconds) -> ConnectionDriver:
        """Waits for the bulk connection; requests it if no other task waits for it."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self.down is not None:
            raise LinkLost("the link is closed", sent=False)
        if not self._bulk_waiters:
            self._bulk_error = None
            self._ask_bulk()
        self._bulk_waiters.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=max(0.0, deadline - self.now()))
        finally:
            if waiter in self._bulk_waiters:
                self._bulk_waiters.remove(waiter)
        if not waiter.done():
            raise DeadlineExceeded("the bulk connection was not ready in time")
        if self.bulk is None:
            raise self._bulk_error or LinkLost("the link is closed", sent=False)
        return self.bulk

    def _ask_bulk(self) -> None:
        if self.dialled:
            self._dial_bulk(self)
        else:
            self.connection.send_bulk_wanted()
            self.wake()

    def bulk_ready(self, shell: ConnectionDriver) -> Callable[[BaseException | None], None]:
        """Takes a bulk connection for this link, in place of an earlier one. Returns the function
        to call when that connection ends."""
        if self.bulk is not None:
            self.bulk.abort()
        self.bulk = shell
        shell.rules = self._bulk_rules(shell)
        self._wake_bulk()
        return lambda error: self._bulk_lost(shell, error)

    def bulk_failed(self, error: BaseException) -> None:
        """Handles a failed dial of the bulk connection."""
        self._bulk_error = error
        self._wake_bulk()

    def _bulk_lost(self, shell: ConnectionDriver, error: BaseException | None) -> None:
        """Handles the end of the bulk connection: its streams end, the link goes on."""
        shell.rules = IGNORE
        if self.bulk is shell:
            self.bulk = None
        self._bulk_queued += shell.connection.queued
        lost = LinkLost(f"the bulk connection ended: {error or 'closed'}")
        self._settle_rest(shell, lost)
        shell.connection.abandon()
        self._end_streams(shell, lost)

    def _wake_bulk(self) -> None:
        waiters, self._bulk_waiters = self._bulk_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # ------------------------------------------------------------------ events

    def _control_rules(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            **self._stream_rules(self.shell),
            ev.AnswersReceived: self._on_answered,
            ev.RequestsReceived: self._on_asked,
            ev.TellReceived: self._on_told,
            ev.RequestFailed: self._on_failed,
            ev.RequestCancelled: self._on_cancelled,
            ev.GoingAway: self._on_going_away,
            ev.BulkWanted: lambda _: self._dial_bulk(self),
            ev.ProtocolViolated: self._on_violated,
        }

    def _bulk_rules(self, shell: ConnectionDriver) -> Mapping[type, Callable[[Any], None]]:
        """Rules that allow only streams: requests would bypass the limits of the control
        connection."""

        def refuse(event: ev.Event) -> None:
            _log.warning("%r: %s on the bulk connection", self, type(event).__name__)
            shell.abort()

        def violated(event: ev.ProtocolViolated) -> None:
            level = logging.WARNING if isinstance(event.error, ProtocolError) else logging.DEBUG
            _log.log(level, "%r: bulk connection: %s", self, event.error)
            shell.close()

        others = (
            ev.AnswersReceived,
            ev.RequestsReceived,
            ev.TellReceived,
            ev.RequestFailed,
            ev.RequestCancelled,
            ev.BulkWanted,
        )
        rules: dict[type, Callable[[Any], None]] = dict.fromkeys(others, refuse)
        rules |= {ev.GoingAway: lambda _: shell.close(), ev.ProtocolViolated: violated}
        return rules | dict(self._stream_rules(shell))

    def _stream_rules(self, shell: ConnectionDriver) -> Mapping[type, Callable[[Any], None]]:
        return {
            ev.DataReceived: self._on_data,
            ev.StreamOpened: lambda event: self._on_opened(shell, event),
            ev.StreamEnded: lambda event: _of(event.stream).on_end(None),
            ev.StreamReset: lambda event: _of(event.stream).on_end(event.error),
            ev.StreamUnblocked: lambda event: _of(event.stream).on_unblocked(),
            ev.Pong: lambda _: None,
        }

    def _on_answered(self, event: ev.AnswersReceived) -> None:
        # All contexts are of type `PendingRequest`; a cast would cost time for each answer.
        for asking, body in event.answers:
            future = asking[0]  # type: ignore[index]
            if not future.done():
                future.set_result(body)
                continue
            # The caller was cancelled in this turn of the loop and has not run yet.
            heir = asking[3]  # type: ignore[index]
            if heir is not None:
                heir(body)

    def _on_failed(self, event: ev.RequestFailed) -> None:
        future, *_ = cast("PendingRequest", event.context)
        if not future.done():
            future.set_exception(event.error)

    def _on_asked(self, event: ev.RequestsReceived) -> None:
        on_request = self._handler.on_request
        for call, method, milliseconds, body in event.requests:
            # An earlier request of this event may have ended the link.
            if self.down is not None:
                return
            serving = LinkCall(self, call, method, milliseconds, body)
            try:
                on_request(serving)
            except Exception as error:
                self._strike(error)
                serving.fail(error)
            if not serving.done:
                self._keep(serving)

    def _on_cancelled(self, event: ev.RequestCancelled) -> None:
        serving = self._serving.pop(event.stream, None)
        if serving is not None:
            serving.cancelled()

    def _on_told(self, event: ev.TellReceived) -> None:
        try:
            self._handler.on_tell(self, event.method, event.body)
        except Exception as error:
            self._strike(error)
            _log.exception("%r: tell of method %d", self, event.method)

    def _on_opened(self, shell: ConnectionDriver, event: ev.StreamOpened) -> None:
        stream = LinkStream(self, shell, event.stream, None)
        event.stream.context = stream
        if event.last:
            stream.on_end(None)
        try:
            self._handler.on_stream(stream, event.method, event.body)
        except Exception as error:
            self._strike(error)
            if not isinstance(error, PdserveError):
                _log.exception("%r: stream of method %d", self, event.method)
            stream.abort(error)

    def _on_data(self, event: ev.DataReceived) -> None:
        stream = _of(event.stream)
        try:
            stream.on_data(event.items, event.cost, last=event.last)
        except Exception as error:
            self._sink_failed(stream, error)

    def _sink_failed(self, stream: LinkStream, error: Exception) -> None:
        """Handles an exception of a sink: ends its stream only."""
        self._strike(error)
        if not isinstance(error, PdserveError):
            _log.error("%r: the reader of a stream failed", self, exc_info=error)
        stream.abort(error)

    def _strike(self, error: Exception) -> None:
        """Counts a body that could not be decoded: one may be a bug, several mean a faulty peer."""
        if not isinstance(error, ProtocolError) or isinstance(error, NoMethod):
            return
        now, settings = self.now(), self._settings
        self._strikes = [at for at in self._strikes if now - at < settings.strike_window]
        self._strikes.append(now)
        if len(self._strikes) >= settings.strikes:
            self._end(LinkDownReason("violation", error.message), GoAwayCode.VIOLATION)

    # ------------------------------------------------------------------ closing

    def close(self, message: str = "") -> None:
        self.retire(
            LinkDownReason("shutdown", message or "closed by this side"), GoAwayCode.SHUTDOWN
        )

    def abort(self, message: str = "") -> None:
        down = LinkDownReason("closed", message or "closed by this side")
        self._end(down, GoAwayCode.REPLACED)

    def retire(self, down: LinkDownReason, code: GoAwayCode) -> None:
        """Starts nothing more; closes when work under way has ended, at the latest after
        `retire_after`."""
        if self.down is not None or self.connection.leaving:
            return
        self._farewell = down
        self.connection.send_goaway(code, down.message)
        self._give_up_later(down.message)
        self.wake()
        self._check_finished()

    def replaced(self) -> None:
        """Ends this link because a later life of the peer has connected."""
        self._end(
            LinkDownReason("replaced", "a later life of the peer has connected"),
            GoAwayCode.REPLACED,
        )

    def _on_going_away(self, event: ev.GoingAway) -> None:
        causes: dict[int, str] = {
            GoAwayCode.SHUTDOWN: "shutdown",
            GoAwayCode.DUPLICATE: "duplicate",
            GoAwayCode.REPLACED: "replaced",
            GoAwayCode.VIOLATION: "violation",
            GoAwayCode.SILENT: "silent",
        }
        cause = causes.get(event.code, "closed")
        if self._farewell is None:
            self._farewell = LinkDownReason(cause, event.message or "closed by the peer")
            self._give_up_later("the peer went away")
        self._check_finished()

    def _give_up_later(self, message: str) -> None:
        later = self._settings.retire_after
        self._last_call = self._timers.call_later(later, lambda: self.abort(message))

    def _check_finished(self) -> None:
        """Closes a retiring link once nothing is under way on it."""
        connection = self.connection
        if self.down is not None or not (connection.leaving and connection.left):
            return
        if connection.busy or self._bulk_busy():
            self._timers.call_later(_RECHECK, self._check_finished)
        else:
            self.shell.close()

    def _bulk_busy(self) -> bool:
        return self.bulk is not None and self.bulk.connection.busy > 0

    def _on_violated(self, event: ev.ProtocolViolated) -> None:
        if isinstance(event.error, ProtocolError):
            _log.warning("%r: %s", self, event.error)
            self._farewell = LinkDownReason("violation", event.error.message)
        elif self._farewell is None:
            self._farewell = LinkDownReason("eof", str(event.error))
        self.shell.close()

    def _end(self, down: LinkDownReason, code: GoAwayCode) -> None:
        """Ends the link now. The reason is sent only if the transport takes it at once: what is
        reported as not sent must not be sent later."""
        if self._farewell is None or code is not GoAwayCode.SHUTDOWN:
            self._farewell = down
        self.connection.send_goaway(code, down.message)
        self.shell.end()
        self.lost(None)

    def lost(self, error: BaseException | None) -> None:
        """Handles the end of the control connection: ends everything under way, then reports the
        end of the link."""
        if self.down is not None:
            return
        if self._farewell is not None:
            self.down = self._farewell
        elif error is not None:
            self.down = LinkDownReason("reset", f"{type(error).__name__}: {error}")
        else:
            self.down = LinkDownReason("eof", "the connection was closed")
        for timer in (self._last_call, self._next_look):
            if timer is not None:
                self._timers.remove(timer)
        self.shell.rules = IGNORE
        ended = LinkLost(f"the link ended: {self.down.message}")
        self._settle_rest(self.shell, ended)
        self._fail_requests(self.down)
        for serving in tuple(self._serving.values()):
            serving.cancelled()
        self._serving.clear()
        self._asking.close()
        self._served.close()
        self._end_streams(self.shell, ended)
        if self.bulk is not None:
            self.bulk.abort()
        self._wake_bulk()
        self._on_down(self)

    def _settle_rest(self, shell: ConnectionDriver, error: LinkLost) -> None:
        """Handles what was read together with the event that ended the connection, and that the
        connection has forgotten: answers, and ends of streams. A stream whose items are not passed
        on any more ends with `error`."""
        for event in shell.rest:
            if isinstance(event, ev.AnswersReceived):
                self._on_answered(event)
            elif isinstance(event, ev.RequestFailed):
                self._on_failed(event)
            elif not isinstance(event, _STREAMED) or event.stream.context is None:
                continue
            elif isinstance(event, ev.StreamReset):
                _of(event.stream).on_end(event.error)
            else:
                ended = isinstance(event, ev.StreamEnded)
                _of(event.stream).on_end(None if ended else error)

    def _fail_requests(self, down: LinkDownReason) -> None:
        taken = self.connection.taken
        for asking in self.connection.abandon():
            future, mark, *_ = cast("PendingRequest", asking)
            if future.done():
                continue
            sent = mark < taken
            how = "it may have been received" if sent else "it was not sent"
            future.set_exception(LinkLost(f"the link ended: {down.message}; {how}", sent=sent))

    def _end_streams(self, shell: ConnectionDriver, error: LinkLost) -> None:
        for wire in shell.connection.streams():
            wire.sending = wire.receiving = False
            # Without a context the stream was refused, or its `StreamOpened` was not handled.
            if wire.context is not None:
                _of(wire).on_end(error)

    # ------------------------------------------------------------------ keepalive

    def _keepalive(self) -> None:
        """Pings a silent peer; ends the link after `silent_after`."""
        if self.down is not None:
            return
        interval = self._settings.ping_after
        if self.shell.heard:
            self._silence = 0
        else:
            self._silence += 1
            if self._silence * interval >= self._settings.silent_after:
                text = f"nothing was heard for {self._settings.silent_after:g} s"
                self._end(LinkDownReason("silent", text), GoAwayCode.SILENT)
                return
            self._pings += 1
            self.connection.send_ping(self._pings & _LONGEST)
            self.wake()
        self.shell.heard = False
        self._next_look = self._timers.call_later(interval, self._keepalive)

    # ------------------------------------------------------------------ statistics, flushing

    def stats(self) -> LinkStats:
        connections = [self.connection]
        if self.bulk is not None:
            connections.append(self.bulk.connection)
        return LinkStats(
            pending=self.connection.pending,
            serving=self.connection.serving,
            streams=sum(len(connection.streams()) for connection in connections),
            queued_bytes=self._bulk_queued + sum(c.queued for c in connections),
            unsent_bytes=sum(connection.unsent for connection in connections),
            granted=sum(connection.budget.granted for connection in connections),
            bulk=self.bulk is not None,
        )

    def wake(self) -> None:
        """Sends what is queued at the end of this turn of the event loop."""
        if not self.shell.due:
            self.shell.wake()


def _inherit(heir: LateAnswerHandler, ended: asyncio.Future[Buffer]) -> None:
    """Passes a late answer to its handler; an error means that there was no answer."""
    if not ended.cancelled() and ended.exception() is None:
        heir(ended.result())


def _of(wire: StreamState) -> LinkStream:
    """The link's record of a stream of the wire protocol."""
    stream = wire.context
    assert type(stream) is LinkStream
    return stream
