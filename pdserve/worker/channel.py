"""The worker's end of the channels: one stream per frontend, many requests on each.

A request lives from its `Open` to its last delta, its rejection, its `Abort`, or the end of the
stream: a frontend that dies frees everything it had here. What a step yields is collected and
leaves as one frame at the end of the loop's turn. A frontend that does not read is cut off at a
bound, which ends its requests and nobody else's. A request may be asked to move: it goes on until
its frontend has another place for it and aborts it here.

It knows nothing of engines beyond the function it is given.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

from pdserve.engine.rejection import rejected
from pdserve.errors import (
    EngineError,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
    WorkerLost,
)
from pdserve.messages.channel import Abort, Assembler, Batch, Moving, Open, Piece, split
from pdserve.messages.request import Finish, Started, TokenDelta
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from pdserve.engine.api import Handle, TokenSink
    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.messages.channel import MoveReason
    from pdserve.messages.engine import Rejected
    from pdserve.messages.request import GenerateRequest
    from pdserve.net.base import Incoming
    from pdserve.wire.parser import Buffer

__all__ = ["Channels", "Engine"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 4 << 20
"""Credit for the frontend's requests; one larger than this still passes."""
_MOST_WAITING: Final = 65_536
"""Deltas and answers for a frontend that does not read; one more cuts it off."""
_MOST_HEAVY: Final[Bytes] = 256 << 20
"""What the logprobs of those deltas may take; beyond it the frontend is cut off, too. Four times
what a request may have of its prompt."""
_LOGPROB: Final[Bytes] = 128
"""What one logprob takes, about."""
_BATCH: Final = 4096
"""Deltas, or errors, in one message."""

_decode: Callable[[Buffer], Open | Abort | Piece] = decoder(cast("Any", Open | Abort | Piece))


class Engine(Protocol):
    """What runs the requests; see `engine.api.Engine`."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle: ...

    def abort(self, handle: Handle) -> None: ...


class Channels:
    """All channels of one worker."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_begin: Callable[[int], None] = lambda booking: None,
        on_start: Callable[[int, Started], None] = lambda booking, started: None,
        on_end: Callable[[int], None] = lambda booking: None,
    ) -> None:
        """`on_begin` and `on_end` hear of each booking that is held here, once each; in between
        `on_start`, if its first token comes."""
        self._engine = engine
        self._on_begin = on_begin
        self._on_start = on_start
        self._on_end = on_end
        self._open: dict[_Channel, None] = {}
        self._idle: asyncio.Event | None = None
        """Somebody waits for the last request to end."""

    def opened(self, stream: Incoming, body: Buffer) -> None:
        """A frontend's stream: see `Node.serve_stream`."""
        channel = _Channel(self, stream)
        self._open[channel] = None
        try:
            stream.accept(channel, window=_WINDOW)
        except Overloaded:
            del self._open[channel]
            raise

    @property
    def requests(self) -> int:
        """In progress, over all channels."""
        return sum(len(channel.requests) for channel in self._open)

    @property
    def choices(self) -> int:
        """Sequences of those that have not ended."""
        return sum(r.choices for channel in self._open for r in channel.requests.values())

    def ask_to_move(self, handles: Collection[Handle] | None, reason: MoveReason) -> int:
        """Ask the frontends of these requests (None: of all) to have them served elsewhere; how
        many that were. Until a frontend aborts one, it goes on here."""
        asked = 0
        for channel in self._open:
            for request in channel.requests.values():
                if handles is None or request.handle in handles:
                    channel.ask_to_move(request, reason)
                    asked += 1
        return asked

    def victims(self) -> list[Handle]:
        """Requests whose first token has come, whom the engine's scheduler would preempt first
        first: the least important, of those the latest."""
        begun = [
            (request.priority, -request.handle)
            for channel in self._open
            for request in channel.requests.values()
            if request.started is not None and request.handle is not None
        ]
        return [-handle for _, handle in sorted(begun)]

    @property
    def idle(self) -> bool:
        """No request is in progress, and all that was to be said of them has been sent."""
        return not any(channel.busy for channel in self._open)

    async def wait_idle(self, timeout: Seconds) -> bool:
        """Until that is so; False if `timeout` came first."""
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
        """That life of a frontend is over: nobody waits for what its channels carry, whatever its
        connection looks like."""
        for channel in tuple(self._open):
            if (channel.peer.node, channel.peer.epoch) == (node, epoch):
                channel.cut(WorkerLost(f"{node} was held for dead, and its work dropped"))

    def close(self, error: PdserveError) -> None:
        """End every channel; frontends hear `error`."""
        for channel in tuple(self._open):
            channel.cut(error)

    # ------------------------------------------------------------------ for channels

    def submit(self, request: _Request, wanted: GenerateRequest) -> Handle:
        """Raises what the engine raises, and `Overloaded` for one that workers may have died of
        while another such has not begun."""
        if request.suspect and any(
            other.suspect and other.started is None and other is not request
            for channel in self._open
            for other in channel.requests.values()
        ):
            raise Overloaded("another request that may be deadly is tried here", retry_after=1.0)
        return self._engine.submit(wanted, request)

    def abort(self, handle: Handle) -> None:
        self._engine.abort(handle)

    def began(self, request: _Request) -> None:
        if request.booking:
            self._on_begin(request.booking)

    def started(self, request: _Request, started: Started) -> None:
        if request.booking:
            self._on_start(request.booking, started)

    def ended(self, request: _Request) -> None:
        if request.booking:
            self._on_end(request.booking)

    def over(self, channel: _Channel) -> None:
        self._open.pop(channel, None)
        self.settled()

    def settled(self) -> None:
        """A request or a channel has ended, or there is nothing more to say."""
        if self._idle is not None and self.idle:
            self._idle.set()
            self._idle = None


class _Request:
    """One request of a frontend; the engine's sink for it."""

    __slots__ = (
        *("begun", "booking", "channel", "choices", "handle", "number"),
        *("priority", "started", "suspect"),
    )

    def __init__(self, channel: _Channel, opening: Open) -> None:
        self.channel = channel
        self.number = opening.number
        self.booking = opening.booking
        self.choices = len(opening.request.live)
        """Those that have not ended."""
        self.priority = opening.request.priority
        self.handle: Handle | None = None
        """None until it is submitted."""
        self.begun = False
        """Its booking was said to be here."""
        self.suspect = opening.request.suspect
        self.started: Started | None = None
        """How its first token came about, of whatever choice."""

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


class _Channel:
    """One frontend's stream: see `net.base.Sink`."""

    def __init__(self, owner: Channels, stream: Incoming) -> None:
        self.peer = stream.link.peer
        self.requests: dict[int, _Request] = {}
        self.deltas: list[TokenDelta] = []
        self.heavy: Bytes = 0
        """What their logprobs take."""
        self.due = False
        self._owner = owner
        self._stream = stream
        self._accepted: list[tuple[int, int]] = []
        self._rejected: list[Rejected] = []
        self._moving: list[Moving] = []
        self._frames: deque[bytes] = deque()
        self._assembler = Assembler()
        self._over = False
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------ from the frontend

    def on_data(self, body: Buffer) -> None:
        """Whatever goes wrong must end the requests: the link would only end the stream."""
        try:
            self._take(body)
        except PdserveError as error:  # one of the two does not keep to the protocol
            _log.warning("channel of %s: %s", self.peer.node, error)
            self.cut(error)
        except Exception as error:
            _log.exception("channel of %s", self.peer.node)
            self.cut(EngineError(f"{type(error).__name__} in the worker"))

    def _take(self, body: Buffer) -> None:
        message = _decode(body)
        if type(message) is Piece:
            whole = self._assembler.take(message)
            if whole is None:
                return
            message = _decode(whole)
        if type(message) is Open:
            self._begin(message)
        elif type(message) is Abort:
            self._abort(message.number)

    def _begin(self, opening: Open) -> None:
        """From here on the engine may answer, even before `submit` returns."""
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
        """The frontend has ended its half, or is gone: nobody reads any more."""
        self._finish()
        self._stream.end()

    def cut(self, error: PdserveError) -> None:
        """End the channel; the frontend hears why."""
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
            self._owner.abort(request.handle)
        self.end(request)

    # ------------------------------------------------------------------ to the frontend

    def start(self, request: _Request) -> None:
        """Say that its first token has come, if it has."""
        if request.started is not None:
            self._owner.started(request, request.started)

    def end(self, request: _Request) -> None:
        """Nothing more comes of it."""
        if self.requests.pop(request.number, None) is not None and request.handle is not None:
            self._owner.ended(request)
            self._owner.settled()

    def reject(self, number: int, error: PdserveError) -> None:
        """The frontend's request ended in `error`."""
        self._rejected.append(rejected(number, error))
        self.wake()

    def ask_to_move(self, request: _Request, reason: MoveReason) -> None:
        """Its frontend had better look for another worker."""
        self._moving.append(Moving(request.number, reason))
        self.wake()

    @property
    def busy(self) -> bool:
        """Something is in progress, or has not been sent."""
        unsaid = self.deltas or self._accepted or self._rejected or self._moving or self._frames
        return bool(self.requests or unsaid)

    def wake(self) -> None:
        """Send at the end of this turn of the loop, with whatever else comes until then."""
        if not self.due and not self._over:
            self.due = True
            self._loop.call_soon(self._flush)

    def on_unblocked(self) -> None:
        self._flush()

    def on_payload(self, meta: bytes, size: int) -> memoryview | None:
        return None

    def on_raw(self, meta: bytes, payload: Buffer) -> None:
        """Nothing travels raw here."""

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
        """The next frames; False if there is nothing to say."""
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
            self._frames.extend(split(encode(Batch(moving=moving))))
        return bool(self._frames)

    def _pack(
        self,
        deltas: list[TokenDelta],
        accepted: list[tuple[int, int]],
        refused: list[Rejected],
    ) -> None:
        """As few messages as their size allows; a delta that fits none ends its request."""
        try:
            self._frames.extend(split(encode(Batch(deltas, accepted, refused))))
        except PayloadTooLarge as error:
            half = len(deltas) // 2
            if half:
                self._pack(deltas[:half], accepted, [])
                self._pack(deltas[half:], [], refused)
            else:
                self._pack([self._too_large(deltas[0], error)], accepted, refused)

    def _too_large(self, delta: TokenDelta, error: PayloadTooLarge) -> TokenDelta:
        _log.warning("a request is given up: %s", error.message)
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
    """What a delta's logprobs take."""
    found = 0
    for logprobs in (delta.logprobs, delta.prompt_logprobs):
        found += sum(1 + len(each.top) for each in logprobs or ())
    return found * _LOGPROB
