"""One connection between two nodes, sans-I/O: bytes and verbs in, events and bytes out.

    receive_data, receive_eof, receive_buffer + received, place     what came; return events
    send_*, respond, fail, grant, abort, accept, refuse ...         what to say; they only append
    data_to_send                                                    what to write now

    state     may receive                    goes on to
    GREETING  CHALLENGE | HELLO              PROVING
    PROVING   READY | AUTH                   OPEN (dialler) | JUDGING (acceptor)
    JUDGING   nothing                        OPEN by `accept`, ENDED by `refuse`
    OPEN      every kind from PING on        ENDED
    ENDED     whatever comes is dropped

Any state goes to ENDED when the peer breaks the rules or refuses, or when the bytes end; the event
is `Violated`, and what is left in `data_to_send` says so to the peer.

Last words. A request ends by RESPONSE or ERROR, a half of a stream by END, RESET or LAST. A slot is
used again only when both sides have said theirs, also after a cancellation: so a frame always meets
the entry it belongs to, and one that meets none is a violation, not a guess. Only CANCEL and CREDIT
may cross the other side's last word, and are then ignored.

It does no I/O, reads no clock, draws no randomness, keeps no deadline: its owner does. The bodies
of requests and streams are opaque to it.
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
from pdserve.wire.failure import decode_failure, encode_failure, error_of, failure_of
from pdserve.wire.flow import Budget, Stream, cost_of
from pdserve.wire.handshake import Acceptor, Dialler, Refusal, Why, refusal_error
from pdserve.wire.header import HEADER, HEADER_BYTES, Flag, Kind
from pdserve.wire.limits import (
    FRAME_COST,
    HANDSHAKE_FRAMES,
    HANDSHAKE_TABLE,
    LARGE,
    META,
    Limits,
)
from pdserve.wire.parser import FrameParser
from pdserve.wire.slots import ACCEPTORS, GENERATION, Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes
    from pdserve.wire.header import Header
    from pdserve.wire.parser import Buffer, Frame

__all__ = ["Connection", "Goodbye", "Leaving", "State"]


class State(Enum):
    """See the table above."""

    GREETING = "greeting"
    PROVING = "proving"
    JUDGING = "judging"
    OPEN = "open"
    ENDED = "ended"


class Leaving(IntEnum):
    """Codes of GOAWAY. From `REPLACED` on, the sender does not wait for what is under way."""

    SHUTDOWN = 0
    """The node is going away."""
    DUPLICATE = 1
    """Another connection between the two nodes takes over."""
    REPLACED = 16
    """A later life of the same node has connected."""
    VIOLATION = 17
    """The receiver of this frame broke the rules."""
    SILENT = 18
    """The receiver of this frame did not answer in time."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True):
    """Body of GOAWAY."""

    code: int
    message: str = ""


_decode_goodbye = decoder(Goodbye)
# Module globals of plain ints: an enum's member costs a hot path two attribute lookups.
_OPEN: Final = State.OPEN
_REQUEST: Final = int(Kind.REQUEST)
_RESPONSE: Final = int(Kind.RESPONSE)
_DATA: Final = int(Kind.DATA)
_LAST: Final = int(Flag.LAST)
_RAW: Final = int(Flag.RAW)

_pack = HEADER.pack
_MISSING: Final = object()
_LONGEST_MESSAGE: Final = 1000


class Connection:
    """One side of one connection. `queued` and `taken` count the bytes of its whole life."""

    def __init__(self, handshake: Dialler | Acceptor, limits: Limits) -> None:
        self._set_limits(limits)
        self.state = State.GREETING
        self.dialled = isinstance(handshake, Dialler)
        self.leaving = False
        """We said GOAWAY."""
        self.left = False
        """The peer said GOAWAY."""

        # What is to be written.
        self.queued: Bytes = 0
        """Bytes ever appended; less `taken`, what waits for `data_to_send`."""
        self.taken: Bytes = 0
        """Bytes ever handed out by `data_to_send`."""
        self._out: list[Buffer] = []
        self._bulky = False  # one of them is worth not being copied

        # What is under way.
        self._slots = Slots(dialled=self.dialled)
        self._free = self._slots.free
        self.calls: dict[int, object] = {}
        """Requests of ours, by id: the context, None once cancelled. The owner may look."""
        self._asked: set[int] = set()  # the peer's requests that we owe an answer
        self._streams: dict[int, Stream] = {}
        self._own_streams = 0
        self._payload: tuple[Stream, bytes] | None = None  # being received in place

        self._handshake = handshake
        self._greetings = 0
        self._parser = FrameParser(HANDSHAKE_TABLE, single=True)
        self._rules: dict[int, Callable[[Header, Buffer, list[ev.Event]], None]] = {
            Kind.TELL: self._on_tell,
            Kind.ERROR: self._on_error,
            Kind.CANCEL: self._on_cancel,
            Kind.OPEN: self._on_open,
            Kind.DATA: self._on_data,
            Kind.END: self._on_end,
            Kind.RESET: self._on_reset,
            Kind.CREDIT: self._on_credit,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_pong,
            Kind.GOAWAY: self._on_goaway,
            Kind.BULK: self._on_bulk,
        }
        if isinstance(handshake, Dialler):
            self._put(Kind.HELLO, body=handshake.hello)

    def _set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.budget = Budget(limits.budget)
        self._pending, self._incoming = limits.pending, limits.incoming

    # ------------------------------------------------------------------ what goes out

    @property
    def unsent(self) -> Bytes:
        """Bytes that wait for `data_to_send`."""
        return self.queued - self.taken

    def data_to_send(self, most: Bytes = 1 << 62) -> list[Buffer]:
        """What to write, in order, as few buffers; they must not change before they are written.

        Stops after `most` bytes, though not inside a body. Small pieces come joined; a large body
        is the very object that was given.
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
        """Queue a body, or a part of one, behind its header."""
        self._out.append(body)
        self.queued += len(body)
        if len(body) >= LARGE:
            self._bulky = True

    def _check_start(self, length: Bytes) -> None:
        """Raise unless something new may be sent: `LinkLost`, `PayloadTooLarge`, `Overloaded`."""
        if self.state is not State.OPEN or self.leaving or self.left:
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
        """Acceptor: admit the peer, under other limits if it is to carry bulk.

        `session` is what READY calls this connection. False: the connection has ended in the
        meantime."""
        if self.state is State.ENDED:
            return False
        handshake = self._handshake
        if self.state is not State.JUDGING or not isinstance(handshake, Acceptor):
            raise RuntimeError(f"accept() in state {self.state.value}")
        if limits is not None:
            self._set_limits(limits)
        self._put(Kind.READY, body=handshake.ready(session))
        self._open()
        return True

    def refuse(self, why: Why, error: HandshakeRefused) -> None:
        """Acceptor: turn an unfinished handshake away."""
        if self.state is State.OPEN or self.dialled:
            raise RuntimeError(f"refuse() in state {self.state.value}")
        if self.state is State.ENDED:
            return
        self._put(Kind.REFUSE, body=Refusal(why, error).body())
        self.state = State.ENDED

    def _open(self) -> None:
        self.state = State.OPEN
        self._parser.table = self.limits.table()
        self._parser.single = False

    def _greet(self, data: bytes, events: list[ev.Event]) -> None:
        """Frames before authentication, one at a time: each changes what may follow."""
        frames = self._parser.feed(data)
        while frames:
            if self._greetings == HANDSHAKE_FRAMES:
                raise ProtocolError("the handshake has too many frames")
            self._greetings += 1
            header, body = frames[0]
            self._on_greeting(header[1], body, events)
            frames = self._parser.feed(b"")
            if self.state is State.OPEN:
                self._on_frames(frames, events)
                return
        if self.state is State.JUDGING and self._parser.pending:
            raise ProtocolError("the peer spoke before it was admitted")

    def _on_greeting(self, kind: int, body: Buffer, events: list[ev.Event]) -> None:
        handshake, state = self._handshake, self.state
        if isinstance(handshake, Dialler):
            if kind == Kind.CHALLENGE and state is State.GREETING:
                self._put(Kind.AUTH, body=handshake.on_challenge(body))
                self.state = State.PROVING
            elif kind == Kind.READY and state is State.PROVING:
                claim = handshake.on_ready(body)
                self._open()
                events.append(ev.Ready(claim, handshake.spoken))
            elif kind == Kind.REFUSE:
                raise refusal_error(body)
            else:
                raise ProtocolError(f"a frame of kind {kind} while {state.value}")
        elif kind == Kind.HELLO and state is State.GREETING:
            self._put(Kind.CHALLENGE, body=handshake.on_hello(body))
            self.state = State.PROVING
        elif kind == Kind.AUTH and state is State.PROVING:
            claim = handshake.on_auth(body)
            self.state = State.JUDGING
            events.append(ev.Authenticated(claim, handshake.spoken))
        else:
            raise ProtocolError(f"a frame of kind {kind} while {state.value}")

    # ------------------------------------------------------------------ what comes in

    def receive_data(self, data: bytes) -> list[ev.Event]:
        """The events that `data` completes. After `PayloadBegins`, call `place` first."""
        events: list[ev.Event] = []
        try:
            if self.state is State.OPEN:
                self._on_frames(self._parser.feed(data), events)
            elif self.state is not State.ENDED:
                self._greet(data, events)
        except (PdserveError, Refusal) as error:
            self._violate(error, events)
        return events

    @property
    def in_place(self) -> bool:
        """`receive_buffer` may have something: what is to be asked before each read."""
        return self._parser.large is not None

    def receive_buffer(self) -> memoryview | None:
        """Where the next bytes belong, if they can be received in place; then call `received`."""
        return self._parser.wanted()

    def received(self, count: Bytes) -> list[ev.Event]:
        """`count` bytes are in `receive_buffer()`."""
        events: list[ev.Event] = []
        if self.state is State.OPEN:
            try:
                self._on_frames(self._parser.filled(count), events)
            except PdserveError as error:
                self._violate(error, events)
        return events

    def receive_eof(self) -> list[ev.Event]:
        """No more bytes will come."""
        if self.state is State.ENDED:
            return []
        error: PdserveError
        if self.state is not State.OPEN:
            text = "the peer ended the connection during the handshake"
            tls = "; does it use TLS, and this node not?" * (self.dialled and not self._greetings)
            error = HandshakeRefused(text + tls)
        elif self._parser.pending or self._payload:
            error = LinkLost("the connection ended inside a frame")
        else:
            error = LinkLost("the peer ended the connection")
        self._end()
        return [ev.Violated(error)]

    def place(self, destination: memoryview | None) -> list[ev.Event]:
        """Where the payload of the last `PayloadBegins` goes: bytes, writable, of its size.

        None drops the payload. The memory is written to until the `Raw` event, until `abort` of
        the stream, or until the end of the connection, whichever comes first.
        """
        events: list[ev.Event] = []
        if self.state is State.OPEN:
            try:
                self._on_frames(self._parser.place(destination), events)
            except PdserveError as error:
                self._violate(error, events)
        return events

    def _violate(self, error: PdserveError | Refusal, events: list[ev.Event]) -> None:
        """End the connection for what the peer did, and tell it so as far as it may know."""
        ours: PdserveError = error.error if isinstance(error, Refusal) else error
        if self.state is State.OPEN:
            self._say_goodbye(Leaving.VIOLATION, ours.message)
        else:
            if not isinstance(ours, HandshakeRefused):
                # The first bytes tell other protocols from this one: HTTP on a wrong port, mostly.
                strange = "this is not pdserve's cluster protocol: " * (self._greetings == 0)
                ours = HandshakeRefused(f"{strange}{ours.message}")
            refusal = error if isinstance(error, Refusal) else Refusal(Why.MALFORMED, ours)
            if not self.dialled:
                self._put(Kind.REFUSE, body=refusal.body())
        self._end()
        events.append(ev.Violated(ours))

    def _end(self) -> None:
        self.state = State.ENDED
        self._parser.drop()

    def _on_frames(self, frames: list[Frame], events: list[ev.Event]) -> None:
        """Turn frames into events; the kinds a busy connection is full of come first."""
        if self.queued - self.taken > self.limits.unsent_hard:
            raise ProtocolError(f"the peer leaves {self.unsent} bytes unread")
        announced = frames.pop() if self._parser.placing else None
        calls, asked, free, ids_end = self.calls, self._asked, self._free, self._slots.end
        streams, dialled = self._streams, self.dialled
        answers: list[tuple[object, Buffer]] | None = None  # runs that the next frame may join
        requests: list[tuple[int, int, int, Buffer]] | None = None
        current: Stream | None = None  # whose items `data` has
        data: ev.Data
        items: list[Buffer]
        for (length, kind, flags, tag, stream_id, value), body in frames:
            if kind == _RESPONSE:
                context = calls.pop(stream_id, _MISSING)
                if context is _MISSING:
                    raise ProtocolError("an answer to nothing that was asked")
                following = stream_id + GENERATION
                free.append(following if following < ids_end else following - ACCEPTORS)
                if context is not None:
                    if answers is None:
                        answers, requests, current = [], None, None
                        events.append(ev.Answered(answers))
                    answers.append((context, body))
            elif kind == _REQUEST:
                if (
                    stream_id in asked
                    or (stream_id < ACCEPTORS) is dialled  # ours to give out
                    or len(asked) + len(streams) >= self._incoming
                    or stream_id in streams
                ) and not self._admit(stream_id, Kind.ERROR):
                    continue
                asked.add(stream_id)
                if requests is None:
                    answers, requests, current = None, [], None
                    events.append(ev.Asked(requests))
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
                    data = ev.Data(stream, items, 0, False)
                    events.append(data)
                items.append(body)
                data.cost += cost
            else:
                answers = requests = current = None
                rule = self._rules.get(kind)
                if rule is not None:  # else: it may be ignored, or the parser had refused it
                    rule((length, kind, flags, tag, stream_id, value), body, events)
        if announced is not None:
            self._on_payload(announced, events)

    # ------------------------------------------------------------------ connection-wide

    def send_ping(self, value: int) -> None:
        """The peer echoes `value` (32 bits) in a `Pong`."""
        self._put(Kind.PING, value=value)

    def send_bulk_wanted(self) -> None:
        """Acceptor: ask the dialler for a bulk connection."""
        self._put(Kind.BULK)

    def send_goaway(self, code: Leaving, message: str = "") -> None:
        """Start nothing more here. Said once; from `REPLACED` on the connection ends with it."""
        if self.state is not State.OPEN:
            return
        if not self.leaving:
            self._say_goodbye(code, message)
        if code >= Leaving.REPLACED:
            self._end()

    def _say_goodbye(self, code: Leaving, message: str) -> None:
        self._put(Kind.GOAWAY, body=encode(Goodbye(code, message[:_LONGEST_MESSAGE])))
        self.leaving = True

    @property
    def pending(self) -> int:
        """Requests of ours without an answer, cancelled ones included."""
        return len(self.calls)

    @property
    def serving(self) -> int:
        """Requests of the peer's that we owe an answer."""
        return len(self._asked)

    @property
    def busy(self) -> int:
        """Requests and streams under way, in both directions."""
        return len(self.calls) + len(self._asked) + len(self._streams)

    @property
    def finished(self) -> bool:
        """Both sides have said GOAWAY, and nothing is under way or unsent: close the transport."""
        return self.leaving and self.left and not self.busy and not self.unsent

    def _on_ping(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        self._put(Kind.PONG, value=header[5])

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
            self._say_goodbye(Leaving.SHUTDOWN, "")
        events.append(ev.GoingAway(goodbye.code, goodbye.message))

    # ------------------------------------------------------------------ tells and requests

    def send_tell(self, method: int, body: Buffer) -> None:
        """One way. Raises `LinkLost` (not sent), `Overloaded`, `PayloadTooLarge`."""
        self._check_start(len(body))
        self._put(Kind.TELL, tag=method, body=body)

    def send_request(self, method: int, body: Buffer, milliseconds: int, context: object) -> int:
        """Ask; `Answered` or `Failed` will carry `context` (not None). Returns the request's id.

        Raises `LinkLost` (not sent), `Overloaded`, `PayloadTooLarge`.
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
        """The answer to a request of ours is no longer wanted: no event will come, or, with another
        `context`, the one event that ends it carries that.

        The slot stays taken until the peer confirms.
        """
        if self.calls.get(stream_id) is not None:
            self.calls[stream_id] = context
            self._put(Kind.CANCEL, stream=stream_id)

    def respond(self, stream_id: int, body: Buffer) -> bool:
        """Answer a request. False: it is no longer wanted. Raises `PayloadTooLarge`."""
        length = len(body)
        if length >= LARGE:
            self._check_size(length)
            self._bulky = True
        if stream_id not in self._asked or self.state is not _OPEN:
            return False
        self._asked.remove(stream_id)
        out = self._out
        out.append(_pack(length, _RESPONSE, 0, 0, stream_id, 0))
        out.append(body)
        self.queued += HEADER_BYTES + length
        return True

    def fail(self, stream_id: int, error: BaseException) -> bool:
        """Answer a request by an error. False: it is no longer wanted."""
        if stream_id not in self._asked or self.state is not State.OPEN:
            return False
        self._asked.remove(stream_id)
        self._put(Kind.ERROR, stream=stream_id, body=encode_failure(failure_of(error)))
        return True

    def abandon(self) -> list[object]:
        """The connection is lost: nothing can be started on it any more. Returns the contexts of
        requests that will get no answer, each once."""
        self._end()
        contexts = [context for context in self.calls.values() if context is not None]
        self.calls.clear()
        self._asked.clear()
        return contexts

    def _admit(self, stream_id: int, refusal: Kind) -> bool:
        """Whether the peer may start another; if it has too many, answers `Overloaded`."""
        asked, streams = self._asked, self._streams
        theirs = stream_id & ACCEPTORS != self._slots.side
        if not theirs or stream_id in asked or stream_id in streams:
            raise ProtocolError("the peer started something in a slot that is not free")
        under_way = len(asked) + len(streams) - self._own_streams
        if under_way < self._incoming:
            return True
        if under_way >= 2 * self._incoming:
            raise ProtocolError(f"the peer has {under_way} requests and streams under way")
        error = Overloaded(f"the peer has {under_way} requests and streams under way here")
        self._put(refusal, stream=stream_id, body=encode_failure(failure_of(error)))
        return False

    def _on_tell(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        events.append(ev.Told(header[3], body))

    def _on_error(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        context = self.calls.pop(header[4], _MISSING)
        if context is _MISSING:
            raise ProtocolError("an error for nothing that was asked")
        self._slots.give(header[4])
        error = error_of(decode_failure(body))
        if context is not None:
            events.append(ev.Failed(context, error))

    def _on_cancel(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        """Confirm at once, by the last word that is still owed."""
        stream_id = header[4]
        if stream_id in self._asked:
            self.fail(stream_id, Cancelled("the caller no longer waits"))
            if not _unask(events, stream_id):
                events.append(ev.RequestCancelled(stream_id))
        elif (stream := self._streams.get(stream_id)) is not None and stream.sending:
            error = Cancelled("the peer no longer listens")
            self._end_sending(stream, Kind.RESET, encode_failure(failure_of(error)))
            events.append(ev.Reset(stream, error))

    # ------------------------------------------------------------------ streams

    def open_stream(
        self, method: int, body: Buffer, *, window: int, context: object, last: bool = False
    ) -> Stream:
        """Open a stream on which the peer may send data worth `window`, or what is left of it.

        `last`: nothing follows from our side. Raises `LinkLost` (not sent), `Overloaded`,
        `PayloadTooLarge`.
        """
        self._check_start(len(body))
        if self._own_streams >= self.limits.streams:
            raise Overloaded(f"{self._own_streams} streams are open to the peer")
        granted = self.budget.take(window, self.limits.least_window)
        if window and not granted:
            raise Overloaded("no credit is left for another stream of the peer")
        stream = Stream(self._slots.take(), credit=0, context=context)
        stream.window = stream.allowance = granted
        stream.sending = not last
        self._streams[stream.id] = stream
        self._own_streams += 1
        flags = _LAST if last else 0
        self._put(Kind.OPEN, flags=flags, tag=method, stream=stream.id, value=granted, body=body)
        return stream

    def grant(self, stream: Stream, window: int) -> bool:
        """Acceptor of a stream: let the peer send data worth `window`. False: no credit is left."""
        if not stream.receiving:
            return True
        granted = self.budget.take(window, self.limits.least_window)
        if granted:
            stream.window += granted
            stream.allowance += granted
            self._put(Kind.CREDIT, stream=stream.id, value=granted)
        return granted > 0

    def consumed(self, stream: Stream, cost: int) -> None:
        """Data worth `cost` (see `cost_of`) was taken by whoever reads the stream."""
        if not stream.receiving:
            self.budget.give(stream.reclaim(cost))
        elif (grant := stream.refill(cost)) and stream.listening and self.state is State.OPEN:
            self._put(Kind.CREDIT, stream=stream.id, value=grant)

    def send_data(self, stream: Stream, body: Buffer, *, last: bool = False) -> bool:
        """Send if there is credit; False: wait for `Unblocked`.

        Raises `LinkLost` if our half has ended, `PayloadTooLarge`.
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

    def send_raw(self, stream: Stream, meta: bytes, payload: Buffer, *, last: bool = False) -> bool:
        """Like `send_data`, for bytes as they are; `meta` is a msgpack body of at most 4 KiB.

        The payload is not copied: it must not change before `data_to_send`'s buffers are written.
        """
        length = len(meta) + len(payload)
        self._check_half(stream, length)
        if len(meta) > META:
            raise PayloadTooLarge(f"a meta of {len(meta)} bytes; the limit is {META}")
        if stream.credit <= 0:
            return False
        stream.credit -= cost_of(length)
        flags = _RAW | (_LAST if last else 0)
        self._out.append(_pack(length, _DATA, flags, 0, stream.id, len(meta)))
        self.queued += HEADER_BYTES
        self._append(meta)
        self._append(payload)
        if last:
            self._sent_last(stream)
        return True

    def end(self, stream: Stream) -> None:
        """Our half is complete. Nothing happens if it has ended."""
        if stream.sending and self.state is State.OPEN:
            self._end_sending(stream, Kind.END)

    def abort(self, stream: Stream, error: BaseException) -> None:
        """Want nothing more of a stream, in either direction: no event of it will come."""
        if stream.listening:
            stream.listening = False
            if self._payload is not None and self._payload[0] is stream:
                self._parser.drop()
            if not stream.receiving:
                self.budget.give(stream.reclaim(stream.window))
        if self.state is not State.OPEN:
            return
        if stream.sending:
            self._end_sending(stream, Kind.RESET, encode_failure(failure_of(error)))
        elif stream.receiving:
            self._put(Kind.CANCEL, stream=stream.id)

    def streams(self) -> list[Stream]:
        """Those that are not over."""
        return list(self._streams.values())

    def _check_half(self, stream: Stream, length: Bytes) -> None:
        if not stream.sending or self.state is not State.OPEN:
            raise LinkLost("this side of the stream has ended", sent=False)
        self._check_size(length)

    def _end_sending(self, stream: Stream, kind: Kind, body: bytes = b"") -> None:
        self._put(kind, stream=stream.id, body=body)
        self._sent_last(stream)

    def _sent_last(self, stream: Stream) -> None:
        stream.sending = False
        if not stream.receiving:
            self._forget(stream)

    def _end_receiving(self, stream: Stream) -> None:
        stream.receiving = False
        freed = stream.release()
        stream.allowance = 0  # more would be a violation
        self.budget.give(freed)
        if not stream.sending:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if self._slots.ours(stream.id):
            self._own_streams -= 1
            self._slots.give(stream.id)

    def _receiving(self, header: Header) -> Stream:
        stream = self._streams.get(header[4])
        if stream is None or not stream.receiving:
            raise ProtocolError("a frame for a stream that is not open")
        return stream

    def _unexpected(self, stream: Stream | None) -> ProtocolError:
        """What is wrong with a DATA frame."""
        if stream is None or not stream.receiving:
            return ProtocolError("a frame for a stream that is not open")
        return ProtocolError("data beyond the credit that was granted")

    def _on_open(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        admitted = self._admit(header[4], Kind.RESET)
        stream = Stream(header[4], credit=header[5])
        stream.receiving = not header[2] & _LAST
        stream.sending = stream.listening = admitted
        if not stream.over:
            self._streams[stream.id] = stream
        if admitted:
            events.append(ev.Opened(stream, header[3], body, not stream.receiving))

    def _spend(self, header: Header) -> Stream:
        """The stream a DATA frame is for, its credit taken."""
        stream = self._streams.get(header[4])
        if stream is None or stream.allowance <= 0:
            raise self._unexpected(stream)
        stream.allowance -= header[0] + FRAME_COST
        return stream

    def _on_data(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        last = bool(header[2] & _LAST)
        if header[2] & _RAW:
            stream = self._on_raw(header, body, last, events)
        else:
            stream = self._spend(header)
            if stream.listening:
                events.append(ev.Data(stream, [body], cost_of(len(body)), last))
        if last:
            self._end_receiving(stream)

    def _on_raw(self, header: Header, body: Buffer, last: bool, events: list[ev.Event]) -> Stream:
        """A raw frame in one piece, or the payload of one that was announced."""
        if self._payload is not None:
            (stream, meta), self._payload = self._payload, None
            payload = body
        else:
            stream = self._spend(header)
            meta, payload = bytes(body[: header[5]]), body[header[5] :]
        if stream.listening:
            events.append(ev.Raw(stream, meta, payload, header[0], last))
        return stream

    def _on_payload(self, frame: Frame, events: list[ev.Event]) -> None:
        """A large payload waits; without a listener it is dropped, and reading goes on."""
        header, meta = frame
        stream = self._spend(header)
        self._payload = (stream, bytes(meta))
        if stream.listening:
            events.append(ev.PayloadBegins(stream, bytes(meta), self._parser.placing))
        else:
            self._on_frames(self._parser.place(None), events)

    def _on_end(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        stream = self._receiving(header)
        if stream.listening:
            events.append(ev.Ended(stream))
        self._end_receiving(stream)

    def _on_reset(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        """The stream is over; if our half was not, the confirmation is its last word."""
        stream = self._receiving(header)
        error = error_of(decode_failure(body))
        if stream.listening:
            events.append(ev.Reset(stream, error))
        if stream.sending:
            confirmed = Cancelled("the peer ended the stream")
            self._end_sending(stream, Kind.RESET, encode_failure(failure_of(confirmed)))
        self._end_receiving(stream)

    def _on_credit(self, header: Header, body: Buffer, events: list[ev.Event]) -> None:
        stream = self._streams.get(header[4])
        if stream is None or not stream.sending:
            return  # it crossed our last word
        blocked = stream.credit <= 0
        stream.credit += header[5]
        if blocked and stream.credit > 0 and stream.listening:
            events.append(ev.Unblocked(stream))


def _unask(events: list[ev.Event], stream_id: int) -> bool:
    """Take back a request that came in the same read as its cancellation: nobody has seen it. False
    if it is not among `events`."""
    for event in events:
        if isinstance(event, ev.Asked):
            for request in event.requests:
                if request[0] == stream_id:
                    event.requests.remove(request)
                    return True
    return False


def _join_small(pieces: list[Buffer]) -> list[Buffer]:
    """Runs of small pieces joined, large ones as they are."""
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
