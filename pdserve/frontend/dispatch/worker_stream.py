"""Multiplexes requests over one stream to a worker; this is the frontend's end.

`open` waits until the worker has accepted the request; then its deltas go to its sink.
When the stream ends, every request on it ends with one error that gives the reason. Owned by
`cluster_client`, which makes one per worker, life and link.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from pdserve.errors import (
    EngineError,
    LinkLost,
    Overloaded,
    PdserveError,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pdserve.messages.engine_errors import error_of
from pdserve.messages.worker_stream import (
    FRAGMENT_BYTES,
    WORKER_STREAM,
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    OutputBatch,
    split_message,
)
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pdserve.engine.port import TokenSink
    from pdserve.ids import Bytes, NodeId, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RequestOutcome
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.net.base import Link, Stream
    from pdserve.net.timers import Timers
    from pdserve.wire.parser import Buffer

__all__ = ["RemoteSequence", "WorkerStream"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 1 << 20
"""Credit for the worker's batches."""
_MOST_WAITING: Final[Bytes] = 16 << 20
"""Requests that wait for the worker to read; one more is `Overloaded`."""

_decode: Callable[[Buffer], OutputBatch | Fragment] = decoder(cast("Any", OutputBatch | Fragment))


class RemoteSequence:
    """One request at a worker; see `backend.RequestHandle`."""

    __slots__ = (
        *("_channel", "accepted", "choices", "handle", "number", "on_moving", "on_over"),
        *("past", "sink", "tick"),
    )

    def __init__(
        self,
        channel: WorkerStream,
        number: int,
        request: GenerateRequest,
        sink: TokenSink,
        on_over: Callable[[RequestOutcome], None],
        on_moving: Callable[[MigrationHintReason], None],
        accepted: asyncio.Future[None],
    ) -> None:
        self._channel = channel
        self.number = number
        self.choices = len(request.live)
        """Those that have not ended."""
        self.past = request.ended
        """Those that had; an older worker goes on with them nevertheless."""
        self.sink = sink
        self.on_over = on_over
        """Hears once how it ended: finished, cancelled, failed."""
        self.on_moving = on_moving
        """Hears that the worker would rather not have it."""
        self.handle: int | None = None
        """None until the worker has accepted it."""
        self.accepted = accepted
        self.tick = 0

    @property
    def worker(self) -> NodeId:
        """Who has it."""
        return self._channel.worker

    def cancel(self) -> None:
        """See `backend.RequestHandle`."""
        self._channel.cancel(self)

    def expire(self) -> None:
        """See `net.timers.Expiring`: it was not accepted in time."""
        if not self.accepted.done():
            error = WorkerLost(f"worker {self._channel.worker} does not answer", retry_after=1.0)
            self.accepted.set_exception(error)


class WorkerStream:
    """See above. Made on a link that is up."""

    def __init__(self, link: Link, timers: Timers) -> None:
        """Raises `LinkLost` (not sent), `Overloaded`."""
        self.worker: NodeId = link.peer.node
        self.link = link
        self.over: PdserveError | None = None
        """Why it ended; None while it has not."""
        self.on_over: Callable[[], None] = lambda: None
        """Hears once that it has ended."""
        self._timers = timers
        self._create_future = asyncio.get_running_loop().create_future
        self._retired = False
        self._by_number: dict[int, RemoteSequence] = {}
        self._by_handle: dict[int, RemoteSequence] = {}
        self._numbers = 0
        self._frames: deque[bytes] = deque()
        self._waiting: Bytes = 0
        """Of all in `_frames`."""
        self._assembler = FragmentAssembler()
        self._stream: Stream = link.open_stream(WORKER_STREAM, b"", self, window=_WINDOW)

    @property
    def requests(self) -> int:
        """In progress."""
        return len(self._by_number)

    async def open(
        self,
        request: GenerateRequest,
        booking: int,
        sink: TokenSink,
        on_over: Callable[[RequestOutcome], None],
        *,
        timeout: Seconds,
        on_moving: Callable[[MigrationHintReason], None] = lambda reason: None,
    ) -> RemoteSequence:
        """Hand a request on; returns when the worker has taken it.

        Raises what the worker's engine raises; `WorkerLost` if it is gone or does not answer;
        `LinkLost` with `sent` False if the request never left; `Overloaded` if the worker does not
        read. Cancellation, a timeout: the worker is told. After an exception neither `sink` nor
        `on_over` is called; before it `sink` is called only if this call was cancelled.
        """
        if self.over is not None:
            raise LinkLost(self.over.message, sent=False)
        if self._retired:
            raise LinkLost(f"another channel to {self.worker} has taken over", sent=False)
        self._numbers += 1
        accepted: asyncio.Future[None] = self._create_future()
        sequence = RemoteSequence(self, self._numbers, request, sink, on_over, on_moving, accepted)
        self._post(encode(OpenRequest(sequence.number, booking, request)))
        self._by_number[sequence.number] = sequence
        timers = self._timers
        timers.add(sequence, timers.now() + timeout)
        try:
            await accepted
        except BaseException:
            if accepted.done() and not accepted.cancelled():
                accepted.exception()  # both happened in one turn: this one tells enough
            self._withdraw(sequence)
            raise
        finally:
            timers.remove(sequence)
        return sequence

    def cancel(self, sequence: RemoteSequence) -> None:
        """Want nothing more of it. Idempotent."""
        if self._withdraw(sequence):
            sequence.on_over("cancelled")

    def retire(self) -> None:
        """Take nothing new; end when the last request has ended."""
        self._retired = True
        self._finish_if_idle()

    def close(self, error: PdserveError) -> None:
        """End the channel; every request on it ends with `error`."""
        if self.over is None:
            self._stream.abort(error)
            self._end(error)

    def _withdraw(self, sequence: RemoteSequence) -> bool:
        """Forget it here and tell the worker; False if it was over."""
        if not self._forget(sequence):
            return False
        if self.over is None:
            try:
                self._post(encode(AbortRequest(sequence.number)), always=True)
            except PdserveError as error:  # the stream has ended, and with it all that it carried
                _log.debug("an abort was not sent to %s: %s", self.worker, error)
        return True

    def _forget(self, sequence: RemoteSequence) -> bool:
        if self._by_number.pop(sequence.number, None) is None:
            return False
        if sequence.handle is not None:
            self._by_handle.pop(sequence.handle, None)
        if self._retired:
            self._finish_if_idle()
        return True

    def _finish_if_idle(self) -> None:
        if self.over is None and not self._by_number:
            self._stream.end()
            self._end(WorkerLost(f"another channel to {self.worker} has taken over"))

    # ------------------------------------------------------------------ to the worker

    def _post(self, body: bytes, *, always: bool = False) -> None:
        """`always`: whatever waits already. Raises `Overloaded`, `PayloadTooLarge`, `LinkLost`."""
        if not self._frames and len(body) <= FRAGMENT_BYTES and self._stream.try_send(body):
            return
        if self._frames and self._waiting + len(body) > _MOST_WAITING and not always:
            raise Overloaded(f"worker {self.worker} does not keep up", retry_after=1.0)
        for frame in split_message(body):
            self._frames.append(frame)
            self._waiting += len(frame)
        self._flush()

    def _flush(self) -> None:
        frames = self._frames
        while frames and self._stream.try_send(frames[0]):
            self._waiting -= len(frames.popleft())

    def on_unblocked(self) -> None:
        if self.over is None:
            try:
                self._flush()
            except PdserveError as error:  # the stream has ended: `on_end` is on its way
                _log.debug("channel to worker %s: %s", self.worker, error)

    # ------------------------------------------------------------------ from the worker

    def on_data(self, body: Buffer) -> None:
        """Whatever goes wrong must end the requests: the link would only end the stream."""
        try:
            self._take(body)
        except PdserveError as error:
            _log.warning("channel to worker %s: %s", self.worker, error)
            self.close(WorkerLost(f"worker {self.worker} is not understood: {error.message}"))
        except Exception:
            _log.exception("channel to worker %s", self.worker)
            self.close(WorkerLost(f"the channel to worker {self.worker} has failed"))

    def _take(self, body: Buffer) -> None:
        message = _decode(body)
        if type(message) is Fragment:
            whole = self._assembler.take(message)
            if whole is None:
                return
            message = _decode(whole)
        if type(message) is not OutputBatch:
            raise ProtocolError("a piece in pieces")
        for number, handle in message.accepted:
            self._accept(number, handle)
        by_handle = self._by_handle
        for delta in message.deltas:
            sequence = by_handle.get(delta.handle)
            if sequence is not None:  # else: cancelled, the worker had not heard
                self._deliver(sequence, delta)
        for record in message.rejected:
            rejected = self._by_number.get(record.handle)
            if rejected is not None:
                self._reject(rejected, error_of(record))
        for moving in message.moving:
            unwanted = self._by_number.get(moving.number)
            if unwanted is not None:
                unwanted.on_moving(moving.reason)

    def _accept(self, number: int, handle: int) -> None:
        """Too late for one that was given up in this turn: its sink may be another worker's."""
        sequence = self._by_number.get(number)
        if sequence is not None and not sequence.accepted.done():
            sequence.handle = handle
            self._by_handle[handle] = sequence
            sequence.accepted.set_result(None)

    def _deliver(self, sequence: RemoteSequence, delta: TokenDelta) -> None:
        if sequence.past and delta.choice in sequence.past:
            return
        if delta.finish is not None:
            sequence.choices -= 1
            if sequence.choices == 0:
                (self._withdraw if sequence.past else self._forget)(sequence)
                sequence.on_over("finished")
        try:
            sequence.sink.on_delta(delta)
        except Exception as error:
            _log.exception("a token sink raised; its request is dropped")
            self.cancel(sequence)
            self._tell(sequence, EngineError(f"{type(error).__name__} in the frontend"))

    def _reject(self, sequence: RemoteSequence, error: PdserveError) -> None:
        self._forget(sequence)
        if sequence.handle is None:
            if not sequence.accepted.done():
                sequence.accepted.set_exception(error)
            return
        sequence.on_over("failed")
        self._tell(sequence, error)

    def _tell(self, sequence: RemoteSequence, error: PdserveError) -> None:
        try:
            sequence.sink.on_error(error)
        except Exception:
            _log.exception("a token sink raised")

    def on_payload(self, meta: bytes, size: int) -> memoryview | None:
        return None

    def on_raw(self, meta: bytes, payload: Buffer) -> None:
        """Nothing travels raw here."""

    def on_end(self, error: BaseException | None) -> None:
        """The worker ended the stream, or is gone. Unless it says that it goes away, another may
        serve what was on it: whatever is wrong is wrong with the channel."""
        if isinstance(error, Unavailable):
            self._end(error)
        else:
            self._end(WorkerLost(f"worker {self.worker} is gone: {error or 'it closed'}"))
        self._stream.end()

    def _end(self, error: PdserveError) -> None:
        if self.over is not None:
            return
        self.over = error
        self._frames.clear()
        self._waiting = 0
        for sequence in tuple(self._by_number.values()):
            self._reject(sequence, error)
        self.on_over()
