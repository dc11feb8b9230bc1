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
from pdserve.wire.codec import decoder, encoder_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pdserve.engine.port import TokenSink
    from pdserve.ids import Bytes, NodeId, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RequestOutcome
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.net.base import ItemStream, StreamOpener
    from pdserve.net.timers import Timers
    from pdserve.wire.parser import Buffer

__all__ = ["ACCEPT_TIMEOUT", "RemoteSequence", "WorkerStream"]

_log = logging.getLogger(__name__)

ACCEPT_TIMEOUT: Final[Seconds] = 5.0
"""A worker's node accepts a request within one turn of its event loop."""
_WINDOW: Final = 1 << 20
"""Flow-control credit in bytes for the worker's output."""
_MOST_WAITING: Final[Bytes] = 64 << 20
"""Most bytes of requests that wait for the worker to read; one more request fails with
`Overloaded`. As much as one message may have: images make some requests large."""

_decode: Callable[[Buffer], OutputBatch | Fragment] = decoder(cast("Any", OutputBatch | Fragment))
_decode_request: Callable[[Buffer], OpenRequest | AbortRequest] = decoder(
    cast("Any", OpenRequest | AbortRequest)
)


class _Nobody:
    """The sink of a request that has ended."""

    def on_delta(self, delta: TokenDelta) -> None: ...
    def on_error(self, error: PdserveError) -> None: ...


_NOBODY: Final = _Nobody()


def _nothing(_: object) -> None:
    pass


class RemoteSequence:
    """One request at a worker. Implements `backend.RequestHandle`."""

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
        """Number of choices that have not ended."""
        self.past = request.ended
        """Choices that had ended before; a worker of an earlier release computes them again, and
        their output is dropped."""
        self.sink = sink
        self.on_over = on_over
        """Called once when the request ends: finished, cancelled or failed. The sink has been told
        before."""
        self.on_moving = on_moving
        """Called when the worker asks to move the request."""
        self.handle: int | None = None
        """The engine's handle; None until the worker has accepted the request."""
        self.accepted = accepted
        self.tick = 0

    @property
    def worker(self) -> NodeId:
        """The worker that has the request."""
        return self._channel.worker

    def cancel(self) -> None:
        """Cancels the request at its worker. Idempotent; the sink gets no further calls."""
        self._channel.cancel(self)

    def release(self) -> None:
        """Drops the references to the sink and the callbacks, because the request has ended. They
        refer to this object: the cycle would keep it until the garbage collector runs."""
        self.sink, self.on_over, self.on_moving = _NOBODY, _nothing, _nothing

    def expire(self) -> None:
        """Fails the request with `WorkerLost`, because the worker did not accept it in time."""
        if not self.accepted.done():
            error = WorkerLost(f"worker {self._channel.worker} does not answer", retry_after=1.0)
            self.accepted.set_exception(error)


class WorkerStream:
    """One stream to a worker. The link must be up. To a worker in the same process, messages travel
    as they are."""

    def __init__(self, link: StreamOpener, timers: Timers) -> None:
        """Opens the stream. Errors: `LinkLost` (with `sent` False), `Overloaded`."""
        self.worker: NodeId = link.peer.node
        self.link = link
        self.over: PdserveError | None = None
        """The error that ended the stream; None while it is open."""
        self.on_over: Callable[[], None] = lambda: None
        """Called once when the stream ends."""
        self._encode = encoder_for(link.peer.features)
        self._timers = timers
        self._create_future = asyncio.get_running_loop().create_future
        self._retired = False
        self._by_number: dict[int, RemoteSequence] = {}
        self._by_handle: dict[int, RemoteSequence] = {}
        self._numbers = 0
        self._frames: deque[tuple[Any, Bytes]] = deque()
        self._waiting: Bytes = 0
        """Bytes in `_frames`."""
        self._assembler = FragmentAssembler()
        self._stream: ItemStream = link.open_stream(WORKER_STREAM, b"", self, window=_WINDOW)

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
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
        """Sends a request; returns when the worker has accepted it.

        Errors: those of the worker's engine; `WorkerLost` if the worker is gone or does not answer;
        `LinkLost` with `sent` False if the request never left; `Overloaded` if the worker does not
        read. Cancellation and timeout: the request is aborted at the worker. After an exception
        neither `sink` nor `on_over` is called. Before it, `sink` is called only if this call was
        cancelled.
        """
        if self.over is not None:
            raise LinkLost(self.over.message, sent=False)
        if self._retired:
            raise LinkLost(f"a newer stream to {self.worker} has replaced this one", sent=False)
        self._numbers += 1
        accepted: asyncio.Future[None] = self._create_future()
        sequence = RemoteSequence(self, self._numbers, request, sink, on_over, on_moving, accepted)
        self._post(OpenRequest(sequence.number, booking, request))
        self._by_number[sequence.number] = sequence
        timers = self._timers
        timers.add(sequence, timers.now() + timeout)
        try:
            await accepted
        except BaseException:
            if accepted.done() and not accepted.cancelled():
                # If a cancellation came in the same turn, this marks the refusal as retrieved.
                accepted.exception()
            self._withdraw(sequence)
            raise
        finally:
            timers.remove(sequence)
        return sequence

    def cancel(self, sequence: RemoteSequence) -> None:
        """Cancels a request. Idempotent."""
        if self._withdraw(sequence):
            _over(sequence, "cancelled")

    def retire(self) -> None:
        """Takes no new requests; the stream ends with its last request."""
        self._retired = True
        self._finish_if_idle()

    def close(self, error: PdserveError) -> None:
        """Ends the stream; every request on it ends with `error`."""
        if self.over is None:
            self._stream.abort(error)
            self._end(error)

    def _withdraw(self, sequence: RemoteSequence) -> bool:
        """Drops a request and tells the worker; returns False if it had ended."""
        if not self._forget(sequence):
            return False
        if self.over is None:
            try:
                self._post(AbortRequest(sequence.number), always=True)
            except PdserveError as error:
                # The stream has ended, and with it every request that it carried.
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
            self._end(WorkerLost(f"a newer stream to {self.worker} has replaced this one"))

    # ------------------------------------------------------------------ to the worker

    def _post(self, message: OpenRequest | AbortRequest, *, always: bool = False) -> None:
        """Sends a message. `always`: even if too much waits already. Errors: `Overloaded`,
        `PayloadTooLarge`, `LinkLost`."""
        body = self._encode(message)
        size, local = len(body), self.link.local
        # The worker gets a copy: the request's lists stay those of this node.
        whole: Any = _decode_request(body) if local else body
        small = local or size <= FRAGMENT_BYTES
        if not self._frames and small and self._stream.try_send(whole):
            return
        if self._frames and self._waiting + size > _MOST_WAITING and not always:
            raise Overloaded(f"worker {self.worker} reads requests too slowly", retry_after=1.0)
        for frame in (body,) if local else split_message(body):
            self._frames.append((whole if local else frame, len(frame)))
            self._waiting += len(frame)
        self._flush()

    def _flush(self) -> None:
        frames = self._frames
        while frames and self._stream.try_send(frames[0][0]):
            self._waiting -= frames.popleft()[1]

    def on_unblocked(self) -> None:
        if self.over is None:
            try:
                self._flush()
            except PdserveError as error:
                # The stream has ended, and `on_end` follows.
                _log.debug("stream to worker %s: %s", self.worker, error)

    # ------------------------------------------------------------------ from the worker

    def on_data(self, body: Any) -> None:
        """Reads the worker's output. Any failure has to end the requests: the link would only end
        the stream."""
        try:
            self._take(body)
        except PdserveError as error:
            _log.warning("stream to worker %s: %s", self.worker, error)
            self.close(WorkerLost(f"worker {self.worker} sent an invalid message: {error.message}"))
        except Exception:
            _log.exception("stream to worker %s", self.worker)
            self.close(WorkerLost(f"the stream to worker {self.worker} has failed"))

    def _take(self, body: Any) -> None:
        message: OutputBatch | Fragment = body if self.link.local else _decode(body)
        if type(message) is Fragment:
            whole = self._assembler.take(message)
            if whole is None:
                return
            message = _decode(whole)
        if type(message) is not OutputBatch:
            raise ProtocolError("a fragment contains a fragment")
        for number, handle in message.accepted:
            self._accept(number, handle)
        by_handle = self._by_handle
        for delta in message.deltas:
            sequence = by_handle.get(delta.handle)
            # Deltas of a cancelled request arrive until the worker has read the abort.
            if sequence is not None:
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
        """Records that the worker accepted the request. Ignored if it was given up in the same
        turn: its sink may already belong to another worker."""
        sequence = self._by_number.get(number)
        if sequence is not None and not sequence.accepted.done():
            sequence.handle = handle
            self._by_handle[handle] = sequence
            sequence.accepted.set_result(None)

    def _deliver(self, sequence: RemoteSequence, delta: TokenDelta) -> None:
        if sequence.past and delta.choice in sequence.past:
            return
        over = False
        if delta.finish is not None:
            sequence.choices -= 1
            over = sequence.choices == 0
            if over:
                (self._withdraw if sequence.past else self._forget)(sequence)
        try:
            sequence.sink.on_delta(delta)
        except Exception as error:
            _log.exception("a token sink raised; its request is dropped")
            sink = sequence.sink
            self.cancel(sequence)
            _tell(sink, EngineError(f"{type(error).__name__} in the frontend"))
        if over:  # only now does the sink know how the request ended
            _over(sequence, "finished")

    def _reject(self, sequence: RemoteSequence, error: PdserveError) -> None:
        self._forget(sequence)
        if sequence.handle is None:
            if not sequence.accepted.done():
                sequence.accepted.set_exception(error)
            return
        _tell(sequence.sink, error)
        _over(sequence, "failed")

    def on_end(self, error: BaseException | None) -> None:
        """Ends all requests: the worker ended the stream or is gone. Unless it said `Unavailable`,
        the requests get `WorkerLost`, so that another worker can continue them."""
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


def _tell(sink: TokenSink, error: PdserveError) -> None:
    try:
        sink.on_error(error)
    except Exception:
        _log.exception("a token sink raised")


def _over(sequence: RemoteSequence, outcome: RequestOutcome) -> None:
    """Releases a request that has ended, and reports its outcome."""
    on_over = sequence.on_over
    sequence.release()
    on_over(outcome)
