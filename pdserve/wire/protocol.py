"""The protocol of one connection between nodes, sans-I/O: bytes and method calls in, events out.

    receive_data, receive_eof, receive_buffer + received      take bytes; return events
    send_*, respond, fail, grant, abort, accept, refuse ...   only queue frames
    data_to_send                                              returns the bytes to write

    state     may receive                    goes on to
    GREETING  CHALLENGE | HELLO              PROVING
    PROVING   READY | AUTH                   OPEN (dialler) | JUDGING (acceptor)
    JUDGING   nothing                        OPEN by `accept`, ENDED by `refuse`
    OPEN      every kind from PING on        ENDED
    ENDED     every frame, and drops it

Any state goes to ENDED when the peer breaks the rules or refuses, or when the bytes end. The event
is `ProtocolViolated`; after a violation, `data_to_send` returns the frame that tells the peer.

Last frames. RESPONSE or ERROR ends a request; END, RESET or LAST ends a half of a stream. A slot is
used again only when both sides have sent their last frames, also after a cancellation. So each
frame finds the entry that it belongs to, and a frame without an entry is a violation. Only CANCEL
and CREDIT may cross the other side's last frame; then they are ignored.

It does no I/O, reads no clock, draws no randomness and keeps no deadline: its owner does that. It
does not decode the bodies of requests and streams.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import (
    Cancelled,
    HandshakeRefused,
    LinkLost,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
)
from pdserve.wire import events as ev
from pdserve.wire.codec import decoder, encode
from pdserve.wire.error_codec import decode_failure, encode_failure, error_of, failure_of
from pdserve.wire.flow import BodyBudget, CreditBudget, StreamState, cost_of
from pdserve.wire.handshake import (
    AcceptorHandshake,
    DialerHandshake,
    HandshakeRefusal,
    HandshakeRefusalReason,
    refusal_error,
)
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.limits import (
    FRAME_COST,
    HANDSHAKE_FRAMES,
    HANDSHAKE_TABLE,
    LARGE,
    Limits,
)
from pdserve.wire.parser import FrameParser
from pdserve.wire.stream_ids import ACCEPTORS, GENERATION, StreamIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes
    from pdserve.wire.header import Header
    from pdserve.wire.parser import Buffer, Frame

__all__ = ["Connection", "ConnectionState", "GoAway", "GoAwayCode"]


class ConnectionState(Enum):
    """The states in the module docstring's table."""

    GREETING = "greeting"
    PROVING = "proving"
    JUDGING = "judging"
    OPEN = "open"
    ENDED = "ended"


class GoAwayCode(IntEnum):
    """Codes of GOAWAY. From `REPLACED` on, the sender does not wait for work under way."""

    SHUTDOWN = 0
    """The node shuts down."""
    DUPLICATE = 1
    """Another connection between the two nodes takes over."""
    REPLACED = 16
    """A later life of the same node has connected."""
    VIOLATION = 17
    """The receiver of this frame broke the protocol."""
    SILENT = 18
    """The receiver of this frame did not answer in time."""


class GoAway(msgspec.Struct, frozen=True, array_like=True):
    """Body of GOAWAY."""

    code: int
    message: str = ""


_decode_goodbye = decoder(GoAway)
# Module globals of plain ints: an enum's member costs a hot path two attribute lookups.
_OPEN: Final = ConnectionState.OPEN
_REQUEST: Final = int(FrameKind.REQUEST)
_RESPONSE: Final = int(FrameKind.RESPONSE)
_DATA: Final = int(FrameKind.DATA)
_LAST: Final = int(FrameFlag.LAST)
_RAW: Final = int(FrameFlag.RAW)

_pack = HEADER.pack
_MISSING: Final = object()
_LONGEST_MESSAGE: Final = 1000


class Connection:
    """One side of one connection. `queued` and `taken` count the bytes of its whole life."""

    def __init__(
        self,
        handshake: DialerHandshake | AcceptorHandshake,
        limits: Limits,
        bodies: BodyBudget | None = None,
    ) -> None:
        """Args: `bodies` is shared by all connections of a node; None: nothing is shared."""
        self._bodies = BodyBudget(limits.asked) if bodies is None else bodies
        self._set_limits(limits)
        self.state = ConnectionState.GREETING
        self.dialled = isinstance(handshake, DialerHandshake)
        self.leaving = False
        """True once this side sent GOAWAY."""
        self.left = False
        """True once the peer sent GOAWAY."""

        # Bytes to send.
        self.queued: Bytes = 0
        """Bytes ever appended; minus `taken`, those that wait for `data_to_send`."""
        self.taken: Bytes = 0
        """Bytes ever handed out by `data_to_send`."""
        self._out: list[Buffer] = []
        self._bulky = False  # a piece is `LARGE`

        # Requests and streams under way.
        self._slots = StreamIds(dialled=self.dialled)
        self._free = self._slots.free
        self.calls: dict[int, object] = {}
        """Own requests by id: the context, None once cancelled. The owner may read it."""
        self._asked: dict[int, Bytes] = {}
        """The peer's unanswered requests, with the size of their bodies."""
        self.asked_bytes: Bytes = 0
        """Bytes of the bodies of the peer's unanswered requests."""
        self._streams: dict[int, StreamState] = {}
        self._own_streams = 0

        self._handshake = handshake
        self._greetings = 0
        self._parser = FrameParser(HANDSHAKE_TABLE, single=True)
        self._rules: dict[int, Callable[[Header, Buffer, list[ev.Event]], None]] = {
            FrameKind.TELL: self._on_tell,
            FrameKind.ERROR: self._on_error,
            FrameKind.CANCEL: self._on_cancel,
            FrameKind.OPEN: self._on_open,
            FrameKind.DATA: self._on_data,
            FrameKind.END: self._on_end,
            FrameKind.RESET: self._on_reset,
            FrameKind.CREDIT: self._on_credit,
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOAWAY: self._on_goaway,
            FrameKind.BULK: self._on_bulk,
        }
        if isinstance(handshake, DialerHandshake):
            self._put(FrameKind.HELLO, body=handshake.hello)

    def _set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.budget = CreditBudget(limits.budget)
        self._pending, self._incoming = limits.pending, limits.incoming
        self._asked_least = limits.asked_least

    # ------------------------------------------------------------------ sending

    @property
    def unsent(self) -> Bytes:
        """Bytes that wait for `data_to_send`."""
        return self.queued - self.taken

    def data_to_send(self, most: Bytes = 1 << 62) -> list[Buffer]:
        """The next bytes to write, in few buffers, which must not change before they are written.
        Stops after `most` bytes, though not inside a body. Small pieces are joined; a large body
        is not copied.
        """
        if self.queued - self.taken > most:
            return _join_small(self._take(most))
        out, self._out = self._out, []
        self.taken = self.queued
        if not self._bulky:
            return [b"".join(out)] if out else out
        self._bulky = False
        return _join_small(out)

    def _take(self, most: Bytes) -> list[Buffer]:
        """The first pieces that make up `most` bytes."""
        count = total = 0
        for piece in self._out:
            count += 1
            total += len(piece)
            if total >= most:
                break
        taken = self._out[:count]
        del self._out[:count]
        self.taken += total
        return taken

    def _put(
        self,
        kind: int,
        *,
        flags: int = 0,
        tag: int = 0,
        stream: int = 0,
        value: int = 0,
        body: Buffer = b"",
    ) -> None:
        self._out.append(_pack(len(body), kind, flags, tag, stream, value))
        if body:
            self._append(body)
        self.queued += HEADER_BYTES

    def _append(self, body: Buffer) -> None:
        """Queues a body, or a part of one, behind its header."""
        self._out.append(body)
        self.queued += len(body)
        if len(body) >= LARGE:
            self._bulky = True

    def _check_start(self, length: Bytes) -> None:
        """Raises unless something new may be sent: `LinkLost`, `PayloadTooLarge`, `Overloaded`."""
        if self.state is not ConnectionState.OPEN or self.leaving or self.left:
            raise LinkLost("the link is closed or closing", sent=False)
        self._check_size(length)
        if length >= LARGE:
            self._bulky = True
        if self.queued - self.taken > self.limits.unsent:
            raise Overloaded(f"{self.unsent} bytes wait for a peer that reads slowly")

    def _check_pending(self) -> None:
        if self.leaving or self.left:
            raise LinkLost("the link is closed or closing", sent=False)
        raise Overloaded(f"{len(self.calls)} requests are under way with the peer")

    def _check_size(self, length: Bytes) -> None:
        if length > self.limits.body:
            raise PayloadTooLarge(f"a message of {length} bytes; the limit is {self.limits.body}")

    # ------------------------------------------------------------------ handshake

    def accept(self, session: bytes = b"", *, limits: Limits | None = None) -> bool:
        """Acceptor: admits the peer, under other limits for a bulk connection. `session` names this
        connection in READY. False: the connection has ended meanwhile.
        """
        if self.state is ConnectionState.ENDED:
            return False
        handshake = self._handshake
        if self.state is not ConnectionState.JUDGING or not isinstance(
            handshake, AcceptorHandshake
        ):
            raise RuntimeError(f"accept() in state {self.state.value}")
        if limits is not None:
            self._set_limits(limits)
        self._put(FrameKind.READY, body=handshake.ready(session))
        self._open()
        return True

    def refuse(self, why: HandshakeRefusalReason, error: HandshakeRefused) -> None:
        """Acceptor: refuses an unfinished handshake."""
        if self.state is ConnectionState.OPEN or self.dialled:
            raise RuntimeError(f"refuse() in state {self.state.value}")
        if self.state is ConnectionState.ENDED:
            return
        self._put(FrameKind.REFUSE, body=HandshakeRefusal(why, error).body())
        self.state = ConnectionState.ENDED

    def _open(self) -> None:
        self.state = ConnectionState.OPEN
        self._parser.table = self.limits.table()
        self._parser.single = False

    def _greet(self, data: bytes, events: list[ev.Event]) -> None:
        """Handles frames before authentication, one at a time, because each changes which frames
        may follow.
        """
        frames = self._parser.feed(data)
        while frames:
            if self._greetings == HANDSHAKE_FRAMES:
                raise ProtocolError("the handshake has too many frames")
            self._greetings += 1
            header, body = frames[0]
            self._on_greeting(header[1], body, events)
            frames = self._parser.feed(b"")
            if self.state is ConnectionState.OPEN:
                self._on_frames(frames, events)
                return
        if self.state is ConnectionState.JUDGING and self._parser.pending:
            raise ProtocolError("the peer sent a frame before the handshake ended")

    def _on_greeting(self, kind: int, body: Buffer, events: list[ev.Event]) -> None:
        handshake, state = self._handshake, self.state
        if isinstance(handshake, DialerHandshake):
            if kind == FrameKind.CHALLENGE and state is ConnectionState.GREETING:
                self._put(FrameKind.AUTH, body=handshake.on_challenge(body))
                self.state = ConnectionState.PROVING
            elif kind == FrameKind.READY and state is ConnectionState.PROVING:
                claim = handshake.on_ready(body)
                self._open()
                events.append(ev.ConnectionReady(claim, handshake.spoken))
            elif kind == FrameKind.REFUSE:
                raise refusal_error(body)
            else:
                raise ProtocolError(f"a frame of kind {kind} while {state.value}")
        elif kind == FrameKind.HELLO and state is ConnectionState.GREETING:
            self._put(FrameKind.CHALLENGE, body=handshake.on_hello(body))
            self.state = ConnectionState.PROVING
        elif kind == FrameKind.AUTH and state is ConnectionState.PROVING:
            claim = handshake.on_auth(body)
            self.state = ConnectionState.JUDGING
            events.append(ev.Authenticated(claim, handshake.spoken))
        else:
            raise ProtocolError(f"a frame of kind {kind} while {state.value}")

    # ------------------------------------------------------------------ receiving

    def receive_data(self, data: bytes) -> list[ev.Event]:
        """The events that `data` completes."""
        events: list[ev.Event] = []
        try:
            if self.state is ConnectionState.OPEN:
                self._on_frames(self._parser.feed(data), events)
            elif self.state is not ConnectionState.ENDED:
                self._greet(data, events)
        except (PdserveError, HandshakeRefusal) as error:
            self._violate(error, events)
        return events

    @property
    def in_place(self) -> bool:
        """True if `receive_buffer` may return memory; check it before each read."""
        return self._parser.large is not None

    def receive_buffer(self) -> memoryview | None:
        """Memory for the next bytes, if they can be received in place; then call `received`."""
        return self._parser.wanted()

    def received(self, count: Bytes) -> list[ev.Event]:
        """Notes `count` bytes received into `receive_buffer()`; returns events."""
        events: list[ev.Event] = []
        if self.state is ConnectionState.OPEN:
            try:
                self._on_frames(self._parser.filled(count), events)
            except PdserveError as error:
                self._violate(error, events)
        return events

    def receive_eof(self) -> list[ev.Event]:
        """Notes that no more bytes will come; returns events."""
        if self.state is ConnectionState.ENDED:
            return []
        error: PdserveError
        if self.state is not ConnectionState.OPEN:
            text = "the peer ended the connection during the handshake"
            tls = "; does it use TLS, and this node not?" * (self.dialled and not self._greetings)
            error = HandshakeRefused(text + tls)
        elif self._parser.pending:
            error = LinkLost("the connection ended inside a frame")
        else:
            error = LinkLost("the peer ended the connection")
        self._end()
        return [ev.ProtocolViolated(error)]

    def _violate(self, error: PdserveError | HandshakeRefusal, events: list[ev.Event]) -> None:
        """Ends the connection for a violation; an unauthenticated peer gets only a fixed text."""
        ours: PdserveError = error.error if isinstance(error, HandshakeRefusal) else error
        if self.state is ConnectionState.OPEN:
            self._say_goodbye(GoAwayCode.VIOLATION, ours.message)
        else:
            if not isinstance(ours, HandshakeRefused):
                # If the first frame is bad, the peer uses another protocol, most often HTTP.
                strange = "this is not pdserve's cluster protocol: " * (self._greetings == 0)
                ours = HandshakeRefused(f"{strange}{ours.message}")
            refusal = (
                error
                if isinstance(error, HandshakeRefusal)
                else HandshakeRefusal(HandshakeRefusalReason.MALFORMED, ours)
            )
            if not self.dialled:
                self._put(FrameKind.REFUSE, body=refusal.body())
        self._end()
        events.append(ev.ProtocolViolated(ours))

    def _end(self) -> None:
        self.state = ConnectionState.ENDED
        self._parser.drop()

    def _on_frames(self, frames: list[Frame], events: list[ev.Event]) -> None:
        """Turns frames into events; the most frequent kinds come first."""
        if self.queued - self.taken > self.limits.unsent_hard:
            raise ProtocolError(f"the peer leaves {self.unsent} bytes unread")
        calls, asked, free, ids_end = self.calls, self._asked, self._free, self._slots.end
        streams, dialled, bodies = self._streams, self.dialled, self._bodies
        # Runs that the next frame may extend; `data` holds the items of stream `current`.
        answers: list[tuple[object, Buffer]] | None = None
        requests: list[tuple[int, int, int, Buffer]] | None = None
        current: StreamState | None = None
        data: ev.DataReceived
        items: list[Buffer]
        for (length, kind, flags, tag, stream_id, value), body in frames:
            if kind == _RESPONSE:
                context = calls.pop(stream_id, _MISSING)
                if context is _MISSING:
                    raise ProtocolError("a response to an unknown request")
                following = stream_id + GENERATION
                free.append(following if following < ids_end else following - ACCEPTORS)
                if context is not None:
                    if answers is None:
                        answers, requests, current = [], None, None
                        events.append(ev.AnswersReceived(answers))
                    answers.append((context, body))
            elif kind == _REQUEST:
                if (
                    stream_id in asked
                    or (stream_id < ACCEPTORS) is dialled  # own id
                    or len(asked) + len(streams) >= self._incoming
                    or stream_id in streams
                    or self.asked_bytes + length > self._asked_least
                ) and not self._admit(stream_id, FrameKind.ERROR, length):
                    continue
                asked[stream_id] = length
                self.asked_bytes += length
                bodies.used += length
                if requests is None:
                    answers, requests, current = None, [], None
                    events.append(ev.RequestsReceived(requests))
                requests.append((stream_id, tag, value, body))
            elif kind == _DATA and not flags:
                stream = streams.get(stream_id)
                if stream is None or stream.allowance <= 0:
                    raise self._unexpected(stream)
                cost = length + FRAME_COST
                stream.allowance -= cost
                if not stream.listening:
                    continue
                if stream is not current:
                    current, items, answers, requests = stream, [], None, None
                    data = ev.DataReceived(stream, items, 0, False)
                    events.append(data)
                items.append(body)
                data.cost += cost
            else:
                answers = requests = current = None
                # A kind without a rule is ignorable: the parser refuses all others.
                rule = self._rules.get(kind)
                if rule is not None:
                    rule((length, kind, flags, tag, stream_id, value), body, events)

    # ------------------------------------------------------------------ pings, GOAWAY, counts

    def send_ping(self, value: int) -> None:
        """Sends a ping; the peer returns `value` (32 bits) in a `Pong`."""
        self._put(FrameKind.PING, value=value)

    def send_bulk_wanted(self) -> None:
        """Acceptor: asks the dialler for a bulk connection."""
        self._put(FrameKind.BULK)

    def send_goaway(self, code: GoAwayCode, message: str = "") -> None:
        """Announces that this side starts nothing more. Sent once; from `REPLACED` on it ends the
        connection.
        """
        if self.state is not ConnectionState.OPEN:
            return
        if not self.leaving:
            self._say_goodbye(code, message)
        if code >= GoAwayCode.REPLACED:
            self._end()

    def _say_goodbye(self, code: GoAwayCode, message: str) -> None:
        self._put(FrameKind.GOAWAY, body=encode(GoAway(code, message[:_LONGEST_MESSAGE])))
        self.leaving = True

    @property
    def pending(self) -> int:
        """Own requests without an answer, cancelled ones included."""
        return len(self.calls)

    @property
    def serving(self) -> int:
        """Requests of the peer that are not answered."""
        return len(self._asked)

    @property
    def busy(self) -> int:
        """Requests and streams under way, in both directions."""
        return len(self.calls) + len(self._asked) + len(self._streams)

    @property
    def finished(self) -> bool:
        """True if both sides have sent GOAWAY and nothing is under way or unsent: close the
        transport.
        """
        return self.leaving and self.left and not self.busy and not self.unsent

    def _on_ping(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        self._put(FrameKind.PONG, value=header[5])

    def _on_pong(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        events.append(ev.Pong(header[5]))

    def _on_bulk(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        if not self.dialled:
            raise ProtocolError("the dialler asked for a bulk connection instead of dialling it")
        events.append(ev.BulkWanted())

    def _on_goaway(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        goodbye = _decode_goodbye(body)
        self.left = True
        if not self.leaving:
            self._say_goodbye(GoAwayCode.SHUTDOWN, "")
        events.append(ev.GoingAway(goodbye.code, goodbye.message))

    # ------------------------------------------------------------------ one-way messages, requests

    def send_tell(self, method: int, body: Buffer) -> None:
        """Sends a one-way message. Raises `LinkLost` (not sent), `Overloaded`,
        `PayloadTooLarge`.
        """
        self._check_start(len(body))
        self._put(FrameKind.TELL, tag=method, body=body)

    def send_request(self, method: int, body: Buffer, milliseconds: int, context: object) -> int:
        """Sends a request and returns its id; `AnswersReceived` or `RequestFailed` will carry
        `context` (not None). Raises `LinkLost` (not sent), `Overloaded`, `PayloadTooLarge`.
        """
        length = len(body)
        if length >= LARGE or self.queued - self.taken > LARGE or self.state is not _OPEN:
            self._check_start(length)
        if len(self.calls) >= self._pending or self.leaving or self.left:
            self._check_pending()
        stream_id = self._free.pop() if self._free else self._slots.take()
        self.calls[stream_id] = context
        out = self._out
        out.append(_pack(length, _REQUEST, 0, method, stream_id, milliseconds))
        out.append(body)
        self.queued += HEADER_BYTES + length
        return stream_id

    def cancel(self, stream_id: int, context: object = None) -> None:
        """Cancels an own request. Without `context` no event follows; with one, the last event of
        the request carries it. The slot stays taken until the peer confirms.
        """
        if self.calls.get(stream_id) is not None:
            self.calls[stream_id] = context
            self._put(FrameKind.CANCEL, stream=stream_id)

    def respond(self, stream_id: int, body: Buffer) -> bool:
        """Answers a request. False: the answer is no longer wanted. Raises `PayloadTooLarge`."""
        length = len(body)
        if length >= LARGE:
            self._check_size(length)
            self._bulky = True
        if stream_id not in self._asked or self.state is not _OPEN:
            return False
        size = self._asked.pop(stream_id)
        self.asked_bytes -= size
        self._bodies.used -= size
        out = self._out
        out.append(_pack(length, _RESPONSE, 0, 0, stream_id, 0))
        out.append(body)
        self.queued += HEADER_BYTES + length
        return True

    def fail(self, stream_id: int, error: BaseException) -> bool:
        """Answers a request with an error. False: the answer is no longer wanted."""
        if stream_id not in self._asked or self.state is not ConnectionState.OPEN:
            return False
        self._answered(stream_id)
        self._put(FrameKind.ERROR, stream=stream_id, body=encode_failure(failure_of(error)))
        return True

    def abandon(self) -> list[object]:
        """Notes that the connection is lost: nothing new can be started. Returns the contexts of
        requests that will get no answer, each once.
        """
        self._end()
        contexts = [context for context in self.calls.values() if context is not None]
        self.calls.clear()
        self._asked.clear()
        self._bodies.used -= self.asked_bytes
        self.asked_bytes = 0
        return contexts

    def _answered(self, stream_id: int) -> None:
        size = self._asked.pop(stream_id)
        self.asked_bytes -= size
        self._bodies.used -= size

    def _admit(self, stream_id: int, refusal: FrameKind, size: Bytes = 0) -> bool:
        """True if the peer may start another request, whose body of `size` bytes is counted until
        it is answered; otherwise answers `Overloaded`.
        """
        asked, streams = self._asked, self._streams
        theirs = stream_id & ACCEPTORS != self._slots.side
        if not theirs or stream_id in asked or stream_id in streams:
            raise ProtocolError("the peer started something in a slot that is not free")
        under_way = len(asked) + len(streams) - self._own_streams
        if under_way >= 2 * self._incoming:
            raise ProtocolError(f"the peer has {under_way} requests and streams under way")
        words = self._over_budget(size)
        if under_way >= self._incoming:
            words = f"the peer has {under_way} requests and streams under way here"
        if not words:
            return True
        self._bodies.refused += 1
        body = encode_failure(failure_of(Overloaded(words, retry_after=1.0)))
        self._put(refusal, stream=stream_id, body=body)
        return False

    def _over_budget(self, size: Bytes) -> str:
        """Why a body of `size` bytes exceeds a limit; empty: it does not. Each peer has a reserved
        share and its own limit.
        """
        own, bodies = self.asked_bytes + size, self._bodies
        if own <= self._asked_least:
            return ""
        if own > self.limits.asked:
            return f"the peer's requests under way here hold {self.asked_bytes} bytes"
        if bodies.used + size > bodies.most:
            return f"requests under way here hold {bodies.used} bytes, of all peers"
        return ""

    def _on_tell(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        events.append(ev.TellReceived(header[3], body))

    def _on_error(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        context = self.calls.get(header[4], _MISSING)
        if context is _MISSING:
            raise ProtocolError("an error for an unknown request")
        # If the body does not decode, the request ends with the connection.
        error = error_of(decode_failure(body))
        del self.calls[header[4]]
        self._slots.give(header[4])
        if context is not None:
            events.append(ev.RequestFailed(context, error))

    def _on_cancel(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        """Confirms a cancellation at once, by the last frame of the request or stream half."""
        stream_id = header[4]
        if stream_id in self._asked:
            self.fail(stream_id, Cancelled("the caller no longer waits"))
            if not _unask(events, stream_id):
                events.append(ev.RequestCancelled(stream_id))
        elif (stream := self._streams.get(stream_id)) is not None and stream.sending:
            error = Cancelled("the peer no longer listens")
            self._end_sending(stream, FrameKind.RESET, encode_failure(failure_of(error)))
            events.append(ev.StreamReset(stream, error))

    # ------------------------------------------------------------------ streams

    def open_stream(
        self, method: int, body: Buffer, *, window: int, context: object, last: bool = False
    ) -> StreamState:
        """Opens a stream on which the peer may send data worth `window`, or what is left of it.
        `last`: this side sends nothing more. Raises `LinkLost` (not sent), `Overloaded`,
        `PayloadTooLarge`.
        """
        self._check_start(len(body))
        if self._own_streams >= self.limits.streams:
            raise Overloaded(f"{self._own_streams} streams are open to the peer")
        granted = self.budget.take(window, self.limits.least_window)
        if window and not granted:
            raise Overloaded("no credit is left for another stream of the peer")
        stream = StreamState(self._slots.take(), credit=0, context=context)
        stream.window = stream.allowance = granted
        stream.sending = not last
        self._streams[stream.id] = stream
        self._own_streams += 1
        flags = _LAST if last else 0
        self._put(
            FrameKind.OPEN, flags=flags, tag=method, stream=stream.id, value=granted, body=body
        )
        return stream

    def grant(self, stream: StreamState, window: int) -> bool:
        """Acceptor of a stream: grants credit of `window`. False: no credit is left."""
        if not stream.receiving:
            return True
        granted = self.budget.take(window, self.limits.least_window)
        if granted:
            stream.window += granted
            stream.allowance += granted
            self._put(FrameKind.CREDIT, stream=stream.id, value=granted)
        return granted > 0

    def consumed(self, stream: StreamState, cost: int) -> None:
        """Notes that the stream's reader took data worth `cost` (`cost_of`)."""
        if not stream.receiving:
            self.budget.give(stream.reclaim(cost))
        elif (
            (grant := stream.refill(cost))
            and stream.listening
            and self.state is ConnectionState.OPEN
        ):
            self._put(FrameKind.CREDIT, stream=stream.id, value=grant)

    def send_data(self, stream: StreamState, body: Buffer, *, last: bool = False) -> bool:
        """Sends an item if there is credit; False: wait for `StreamUnblocked`. Raises `LinkLost` if
        our half has ended, `PayloadTooLarge`.
        """
        length = len(body)
        if length >= LARGE or not stream.sending or self.state is not _OPEN:
            self._check_half(stream, length)
            self._bulky = True
        if stream.credit <= 0:
            return False
        stream.credit -= length + FRAME_COST
        out = self._out
        out.append(_pack(length, _DATA, _LAST if last else 0, 0, stream.id, 0))
        out.append(body)
        self.queued += HEADER_BYTES + length
        if last:
            self._sent_last(stream)
        return True

    def end(self, stream: StreamState) -> None:
        """Completes our half of a stream; does nothing if it has ended."""
        if stream.sending and self.state is ConnectionState.OPEN:
            self._end_sending(stream, FrameKind.END)

    def abort(self, stream: StreamState, error: BaseException) -> None:
        """Ends a stream in both directions: no event of it will come."""
        if stream.listening:
            stream.listening = False
            if not stream.receiving:
                self.budget.give(stream.reclaim(stream.window))
        if self.state is not ConnectionState.OPEN:
            return
        if stream.sending:
            self._end_sending(stream, FrameKind.RESET, encode_failure(failure_of(error)))
        elif stream.receiving:
            self._put(FrameKind.CANCEL, stream=stream.id)

    def streams(self) -> list[StreamState]:
        """Streams that are not over."""
        return list(self._streams.values())

    def _check_half(self, stream: StreamState, length: Bytes) -> None:
        if not stream.sending or self.state is not ConnectionState.OPEN:
            raise LinkLost("this side of the stream has ended", sent=False)
        self._check_size(length)

    def _end_sending(self, stream: StreamState, kind: FrameKind, body: bytes = b"") -> None:
        self._put(kind, stream=stream.id, body=body)
        self._sent_last(stream)

    def _sent_last(self, stream: StreamState) -> None:
        stream.sending = False
        if not stream.receiving:
            self._forget(stream)

    def _end_receiving(self, stream: StreamState) -> None:
        stream.receiving = False
        freed = stream.release()
        # Further data is a violation.
        stream.allowance = 0
        self.budget.give(freed)
        if not stream.sending:
            self._forget(stream)

    def _forget(self, stream: StreamState) -> None:
        del self._streams[stream.id]
        if self._slots.ours(stream.id):
            self._own_streams -= 1
            self._slots.give(stream.id)

    def _receiving(self, header: Header) -> StreamState:
        stream = self._streams.get(header[4])
        if stream is None or not stream.receiving:
            raise ProtocolError("a frame for a stream that is not open")
        return stream

    def _unexpected(self, stream: StreamState | None) -> ProtocolError:
        """Describes what is wrong with a DATA frame."""
        if stream is None or not stream.receiving:
            return ProtocolError("a frame for a stream that is not open")
        return ProtocolError("data beyond the credit that was granted")

    def _on_open(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        admitted = self._admit(header[4], FrameKind.RESET)
        stream = StreamState(header[4], credit=header[5])
        stream.receiving = not header[2] & _LAST
        stream.sending = stream.listening = admitted
        if not stream.over:
            self._streams[stream.id] = stream
        if admitted:
            events.append(ev.StreamOpened(stream, header[3], body, not stream.receiving))

    def _spend(self, header: Header) -> StreamState:
        """The stream of a DATA frame, after charging its credit."""
        stream = self._streams.get(header[4])
        if stream is None or stream.allowance <= 0:
            raise self._unexpected(stream)
        stream.allowance -= header[0] + FRAME_COST
        return stream

    def _on_data(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        last = bool(header[2] & _LAST)
        if header[2] & _RAW:
            raise ProtocolError("a raw payload, which no release sends")
        stream = self._spend(header)
        if stream.listening:
            events.append(ev.DataReceived(stream, [body], cost_of(len(body)), last))
        if last:
            self._end_receiving(stream)

    def _on_end(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        stream = self._receiving(header)
        if stream.listening:
            events.append(ev.StreamEnded(stream))
        self._end_receiving(stream)

    def _on_reset(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        """Handles RESET: the stream is over. If our half has not ended, a RESET confirms and ends
        it.
        """
        stream = self._receiving(header)
        error = error_of(decode_failure(body))
        if stream.listening:
            events.append(ev.StreamReset(stream, error))
        if stream.sending:
            confirmed = Cancelled("the peer ended the stream")
            self._end_sending(stream, FrameKind.RESET, encode_failure(failure_of(confirmed)))
        self._end_receiving(stream)

    def _on_credit(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        stream = self._streams.get(header[4])
        # The credit has crossed the last frame of our half.
        if stream is None or not stream.sending:
            return
        blocked = stream.credit <= 0
        stream.credit += header[5]
        if blocked and stream.credit > 0 and stream.listening:
            events.append(ev.StreamUnblocked(stream))


def _unask(events: list[ev.Event], stream_id: int) -> bool:
    """Removes a request that came in the same read as its cancellation, before the owner saw it.
    False if it is not among `events`.
    """
    for event in events:
        if isinstance(event, ev.RequestsReceived):
            for request in event.requests:
                if request[0] == stream_id:
                    event.requests.remove(request)
                    return True
    return False


def _join_small(pieces: list[Buffer]) -> list[Buffer]:
    """Joins runs of small pieces; large ones stay as they are."""
    out: list[Buffer] = []
    small: list[Buffer] = []
    for piece in pieces:
        if len(piece) < LARGE:
            small.append(piece)
            continue
        if small:
            out.append(b"".join(small))
            small = []
        out.append(piece)
    if small:
        out.append(b"".join(small))
    return out
