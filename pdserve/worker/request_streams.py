"""Serves requests from frontends: one stream per frontend, many requests on each stream.

A request lives from its `OpenRequest` to its last delta, its rejection, its `AbortRequest`, or the
end of the stream; a frontend that dies frees everything it had here. The output of a step is
collected and leaves as one frame at the end of the event-loop turn. A frontend that does not read
is cut off at a bound, which ends only its own requests. A request that is asked to move goes on
until its frontend has another worker and aborts it here.

It knows nothing of engines beyond the `RequestEngine` it is given.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from pdserve.errors import (
    EngineError,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
    WorkerLost,
)
from pdserve.messages.engine_errors import rejected_event
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.messages.worker_stream import (
    WORKER_STREAM,
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    OutputBatch,
    WorkerMigrationHint,
    split_message,
)
from pdserve.runtime.peers.handlers import accepts
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from pdserve.engine.port import Handle, RequestEngine
    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.messages.engine import Rejected
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.net.base import IncomingStream
    from pdserve.wire.parser import Buffer

__all__ = ["RequestStreams"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 4 << 20
"""Flow-control credit in bytes for a frontend's requests; a larger single request still passes."""
_MOST_WAITING: Final = 65_536
"""Most deltas and answers queued for a frontend that does not read; one more cuts it off."""
_MOST_HEAVY: Final[Bytes] = 256 << 20
"""Most bytes of logprobs in the queued deltas; beyond it the frontend is cut off. Four times what a
request may have for its prompt.
"""
_LOGPROB: Final[Bytes] = 128
"""Estimated size of one logprob."""
_BATCH: Final = 4096
"""Most deltas, or errors, in one message."""

_decode: Callable[[Buffer], OpenRequest | AbortRequest | Fragment] = decoder(
    cast("Any", OpenRequest | AbortRequest | Fragment)
)


class RequestStreams:
    """All frontend streams of one worker."""

    def __init__(
        self,
        engine: RequestEngine,
        *,
        on_begin: Callable[[int], None] = lambda booking: None,
        on_start: Callable[[int, FirstTokenStats], None] = lambda booking, started: None,
        on_end: Callable[[int], None] = lambda booking: None,
    ) -> None:
        """`on_begin` and `on_end` are called once for each booking held here; in between `on_start`
        is called if its first token comes.
        """
        self.engine = engine
        self._on_begin = on_begin
        self._on_start = on_start
        self._on_end = on_end
        self._open: dict[_FrontendStream, None] = {}
        self._idle: asyncio.Event | None = None
        """Set when the last request has ended, for `wait_idle`."""

    @accepts(WORKER_STREAM)
    def opened(self, stream: IncomingStream, body: Buffer) -> None:
        """Takes a new stream from a frontend."""
        channel = _FrontendStream(self, stream)
        self._open[channel] = None
        try:
            stream.accept(channel, window=_WINDOW)
        except Overloaded:
            del self._open[channel]
            raise

    @property
    def requests(self) -> int:
        """Requests in progress, over all streams."""
        return sum(len(channel.requests) for channel in self._open)

    @property
    def choices(self) -> int:
        """Sequences that have not ended; a request has one per choice."""
        return sum(r.choices for channel in self._open for r in channel.requests.values())

    def ask_to_move(self, handles: Collection[Handle] | None, reason: MigrationHintReason) -> int:
        """Asks the frontends of these requests (None: all) to move them to another worker.

        Returns how many were asked. A request goes on here until its frontend aborts it.
        """
        asked = 0
        for channel in self._open:
            for request in channel.requests.values():
                if handles is None or request.handle in handles:
                    channel.ask_to_move(request, reason)
                    asked += 1
        return asked

    def victims(self) -> list[Handle]:
        """Requests that have produced a token, in the order in which the scheduler would preempt
        them, the least important first, and the latest first among equals.
        """
        begun = [
            (request.priority, -request.handle)
            for channel in self._open
            for request in channel.requests.values()
            if request.started is not None and request.handle is not None
        ]
        return [-handle for _, handle in sorted(begun)]

    @property
    def idle(self) -> bool:
        """True if no request is in progress and all output has been sent."""
        return not any(channel.busy for channel in self._open)

    async def wait_idle(self, timeout: Seconds) -> bool:
        """Waits until `idle`; returns False if `timeout` seconds pass first."""
        if self.idle:
            return True
        self._idle = self._idle or asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def gone(self, node: NodeId, epoch: Epoch) -> None:
        """Ends the streams of this frontend life, which has left the cluster, even if its
        connection still looks alive.
        """
        for channel in tuple(self._open):
            if (channel.peer.node, channel.peer.epoch) == (node, epoch):
                channel.cut(WorkerLost(f"{node} was declared dead, and its requests dropped"))

    def close(self, error: PdserveError) -> None:
        """Ends every stream; frontends receive `error`."""
        for channel in tuple(self._open):
            channel.cut(error)

    # ------------------------------------------------------------------ for channels

    def submit(self, request: _Request, wanted: GenerateRequest) -> Handle:
        """Submits a request to the engine.

        Errors: those of the engine, and `Overloaded` for a request suspected of killing workers
        while another suspect has not produced a token yet.
        """
        if request.suspect and any(
            other.suspect and other.started is None and other is not request
            for channel in self._open
            for other in channel.requests.values()
        ):
            raise Overloaded(
                "another suspect request is being tried on this worker; retry in a moment",
                retry_after=1.0,
            )
        return self.engine.submit(wanted, request)

    def began(self, request: _Request) -> None:
        if request.booking:
            self._on_begin(request.booking)

    def started(self, request: _Request, started: FirstTokenStats) -> None:
        if request.booking:
            self._on_start(request.booking, started)

    def ended(self, request: _Request) -> None:
        if request.booking:
            self._on_end(request.booking)

    def over(self, channel: _FrontendStream) -> None:
        self._open.pop(channel, None)
        self.settled()

    def settled(self) -> None:
        """Called when a request or a stream has ended, or all output has been sent."""
        if self._idle is not None and self.idle:
            self._idle.set()
            self._idle = None


class _Request:
    """One request of a frontend, and the engine's sink for it."""

    __slots__ = (
        *("begun", "booking", "channel", "choices", "handle", "number"),
        *("priority", "started", "suspect"),
    )

    def __init__(self, channel: _FrontendStream, opening: OpenRequest) -> None:
        self.channel = channel
        self.number = opening.number
        self.booking = opening.booking
        self.choices = len(opening.request.live)
        """Choices that have not ended."""
        self.priority = opening.request.priority
        self.handle: Handle | None = None
        """The engine handle; None until the request is submitted."""
        self.begun = False
        """True once `on_begin` was called for its booking."""
        self.suspect = opening.request.suspect
        self.started: FirstTokenStats | None = None
        """Statistics of the first token, of whichever choice came first."""

    def on_delta(self, delta: TokenDelta) -> None:
        channel = self.channel
        if delta.started is not None and self.started is None:
            self.started = delta.started
            if self.begun:
                channel.start(self)
        channel.deltas.append(delta)
        if delta.logprobs or delta.prompt_logprobs:
            channel.heavy += _heavy(delta)
        if not channel.due:
            channel.wake()
        if delta.finish is not None:
            self.choices -= 1
            if self.choices == 0:
                channel.end(self)

    def on_error(self, error: PdserveError) -> None:
        self.channel.reject(self.number, error)
        self.channel.end(self)


class _FrontendStream:
    """One frontend's stream. Implements `net.base.StreamSink`."""

    def __init__(self, owner: RequestStreams, stream: IncomingStream) -> None:
        self.peer = stream.link.peer
        self._local = stream.link.local
        self.requests: dict[int, _Request] = {}
        self.deltas: list[TokenDelta] = []
        self.heavy: Bytes = 0
        """Bytes of logprobs in the queued deltas."""
        self.due = False
        self._owner = owner
        self._stream = stream
        self._accepted: list[tuple[int, int]] = []
        self._rejected: list[Rejected] = []
        self._moving: list[WorkerMigrationHint] = []
        self._frames: deque[Any] = deque()
        self._assembler = FragmentAssembler()
        self._over = False
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------ from the frontend

    def on_data(self, body: Any) -> None:
        """Reads requests. Any failure has to end the requests: the link would only end the
        stream."""
        try:
            self._take(body)
        except PdserveError as error:  # one of the two does not keep to the protocol
            _log.warning("closing the stream of %s, and its requests: %s", self.peer.node, error)
            self.cut(error)
        except Exception as error:
            _log.exception("channel of %s", self.peer.node)
            self.cut(EngineError(f"{type(error).__name__} in the worker"))

    def _take(self, body: Any) -> None:
        message: OpenRequest | AbortRequest | Fragment = body if self._local else _decode(body)
        if type(message) is Fragment:
            whole = self._assembler.take(message)
            if whole is None:
                return
            message = _decode(whole)
        if type(message) is OpenRequest:
            self._begin(message)
        elif type(message) is AbortRequest:
            self._abort(message.number)

    def _begin(self, opening: OpenRequest) -> None:
        """Registers a request before it is submitted: the engine may answer before `submit`
        returns.
        """
        number = opening.number
        if number in self.requests:
            raise ProtocolError(f"request {number} was opened twice")
        request = self.requests[number] = _Request(self, opening)
        try:
            request.handle = self._owner.submit(request, opening.request)
        except PdserveError as error:
            del self.requests[number]
            self.reject(number, error)
            return
        except Exception as error:
            _log.exception("a request could not be submitted")
            del self.requests[number]
            self.reject(number, EngineError(f"{type(error).__name__} in the worker"))
            return
        self._accepted.append((number, request.handle))
        self.wake()
        self._owner.began(request)
        request.begun = True
        self.start(request)
        if number not in self.requests:
            self._owner.ended(request)

    def _abort(self, number: int) -> None:
        request = self.requests.get(number)
        if request is not None:
            self._give_up(request)

    def on_end(self, error: BaseException | None) -> None:
        """Ends all requests: the frontend has closed its half or is gone, so no one reads."""
        self._finish()
        self._stream.end()

    def cut(self, error: PdserveError) -> None:
        """Ends the stream and sends the reason to the frontend."""
        if not self._over:
            self._finish()
            self._stream.abort(error)

    def _finish(self) -> None:
        self._over = True
        for request in tuple(self.requests.values()):
            self._give_up(request)
        self.deltas.clear()
        self.heavy = 0
        self._accepted.clear()
        self._rejected.clear()
        self._moving.clear()
        self._frames.clear()
        self._owner.over(self)

    def _give_up(self, request: _Request) -> None:
        if request.handle is not None:
            self._owner.engine.abort(request.handle)
        self.end(request)

    # ------------------------------------------------------------------ to the frontend

    def start(self, request: _Request) -> None:
        """Reports the first token of a request, if it has come."""
        if request.started is not None:
            self._owner.started(request, request.started)

    def end(self, request: _Request) -> None:
        """Ends a request: no further output follows."""
        if self.requests.pop(request.number, None) is not None and request.handle is not None:
            self._owner.ended(request)
            self._owner.settled()

    def reject(self, number: int, error: PdserveError) -> None:
        """Ends the frontend's request with `error`."""
        self._rejected.append(rejected_event(number, error))
        self.wake()

    def ask_to_move(self, request: _Request, reason: MigrationHintReason) -> None:
        """Asks the frontend to move this request to another worker."""
        self._moving.append(WorkerMigrationHint(request.number, reason))
        self.wake()

    @property
    def busy(self) -> bool:
        """True if a request is in progress or output has not been sent."""
        unsaid = self.deltas or self._accepted or self._rejected or self._moving or self._frames
        return bool(self.requests or unsaid)

    def wake(self) -> None:
        """Schedules a send at the end of this event-loop turn, together with later output."""
        if not self.due and not self._over:
            self.due = True
            self._loop.call_soon(self._flush)

    def on_unblocked(self) -> None:
        self._flush()

    def _flush(self) -> None:
        self.due = False
        while not self._over and self._stream.sendable:
            if not self._frames and not self._encode():
                self._owner.settled()
                return
            try:
                self._stream.try_send(self._frames.popleft())
            except PdserveError:  # the stream has ended: `on_end` is on its way
                return
        waiting = len(self.deltas) + len(self._accepted) + len(self._rejected)
        if waiting > _MOST_WAITING or self.heavy > _MOST_HEAVY:
            self.cut(Overloaded("the frontend does not read its tokens", retry_after=1.0))

    def _encode(self) -> bool:
        """Encodes the next frames; False if there is nothing to send."""
        deltas, self.deltas = self.deltas[:_BATCH], self.deltas[_BATCH:]
        if self.heavy:
            self.heavy -= sum(map(_heavy, deltas))
        accepted, self._accepted = self._accepted, []
        moving, self._moving = self._moving, []
        # An error must not overtake the deltas before it.
        refused: list[Rejected] = []
        if not self.deltas:
            refused, self._rejected = self._rejected[:_BATCH], self._rejected[_BATCH:]
        if deltas or accepted or refused:
            self._pack(deltas, accepted, refused)
        if moving:  # few, and after the word that they were accepted
            self._frames.extend(self._frames_of(OutputBatch(moving=moving)))
        return bool(self._frames)

    def _pack(
        self,
        deltas: list[TokenDelta],
        accepted: list[tuple[int, int]],
        refused: list[Rejected],
    ) -> None:
        """Packs output into as few messages as possible; a delta that fits none ends its
        request."""
        try:
            self._frames.extend(self._frames_of(OutputBatch(deltas, accepted, refused)))
        except PayloadTooLarge as error:
            half = len(deltas) // 2
            if half:
                self._pack(deltas[:half], accepted, [])
                self._pack(deltas[half:], [], refused)
            else:
                self._pack([self._too_large(deltas[0], error)], accepted, refused)

    def _frames_of(self, batch: OutputBatch) -> Sequence[object]:
        """The items that carry the batch; a frontend in this process gets it as it is. Errors:
        `PayloadTooLarge`."""
        return (batch,) if self._local else split_message(encode(batch))

    def _too_large(self, delta: TokenDelta, error: PayloadTooLarge) -> TokenDelta:
        _log.warning("a request ended: one of its deltas is too large to send: %s", error.message)
        for request in tuple(self.requests.values()):
            if request.handle == delta.handle:
                self._give_up(request)
        return TokenDelta(
            handle=delta.handle,
            choice=delta.choice,
            tokens=[],
            finish=Finish(reason="error", message=f"the answer is too large: {error.message}"),
        )


def _heavy(delta: TokenDelta) -> Bytes:
    """Estimated bytes of a delta's logprobs."""
    found = 0
    for logprobs in (delta.logprobs, delta.prompt_logprobs):
        found += sum(1 + len(each.top) for each in logprobs or ())
    return found * _LOGPROB
