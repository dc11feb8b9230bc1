"""Connects two in-memory transports by a pipe in each direction.

A pipe does for these transports what kernels and a network do for TCP. It takes bytes while there
is room, carries them in order, delivers them as the reader reads, and reports how the connection
ends. It copies bytes when it takes them. Until then the writer's transport only refers to the
writer's memory, as with a socket, so a test of pinned memory is valid for both.

    writer's transport       pipe: at most `capacity`         reader's protocol
    buffered (references) -> segments on their way (copies) -> data_received, eof_received

All times come from the event loop's clock: `call_soon` without delay, `call_at` with one. A
protocol is called in the context that made it, and pipes run in the context of their world, so that
a loop can tell which process a callback belongs to. Owned by a `MemoryWorld`, which gives the
present `Conditions` of a direction and counts the effects of faults.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextvars import Context
    from random import Random

    from pdserve.ids import Bytes, Seconds

__all__ = ["Conditions", "MemoryTransport", "Pipe", "PipeWorld", "connect"]

A = TypeVar("A")
R = TypeVar("R")

_HIGH_WATER: Final[Bytes] = 64 * 1024
_PIECES: Final = (2, 50, 4000)
"""Mean sizes of random pieces in bytes: some cut headers, some bodies, some neither."""


@dataclass(slots=True)
class Conditions:
    """Properties of one direction between two hosts; may change at any time."""

    delay_min: Seconds = 0.0
    delay_max: Seconds = 0.0
    """Upper bound of a segment's random delay; order is kept."""
    bandwidth: float = 0.0
    """Bytes per second; 0: unlimited."""
    capacity: Bytes = 256 * 1024
    """Most bytes under way or unread: the buffers of two kernels."""
    segment: Bytes = 64 * 1024
    """Most bytes delivered at a time."""
    split: bool = False
    """Delivers in random pieces, down to single bytes."""
    silent: bool = False
    """Delivers nothing. What is under way arrives when this ends: packets are sent again."""


class PipeWorld(Protocol):
    """The part of the world that pipes need."""

    random: Random
    context: Context
    """The context in which pipes run."""

    def conditions(self, source: str, target: str) -> Conditions: ...

    def held(self, host: str) -> bool:
        """True if the host is paused: nothing is delivered to it."""
        ...

    def fired(self, fault: str) -> None:
        """Notes that a fault had an effect."""
        ...

    def over(self, transport: MemoryTransport) -> None:
        """Notes that one end is gone."""
        ...


class _Mark(Enum):
    EOF = "the writer has finished"
    RESET = "the connection is reset"


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, world: PipeWorld, loop: asyncio.AbstractEventLoop, source: str, target: str
    ) -> None:
        self.source = source
        self.target = target
        self.writer: MemoryTransport
        self.reader: MemoryTransport
        self.reset_after: Bytes | None = None
        """Resets the connection once this many more bytes have been delivered."""
        self._world = world
        self._loop = loop
        self._waiting: deque[memoryview] = deque()  # in the writer's transport
        self._waiting_bytes: Bytes = 0
        self._segments: deque[tuple[Seconds, bytes | _Mark]] = deque()  # under way
        self._carried: Bytes = 0
        self._last: Seconds = 0.0
        self._finishing = False
        self._timer: asyncio.Handle | None = None

    @property
    def conditions(self) -> Conditions:
        return self._world.conditions(self.source, self.target)

    # ------------------------------------------------------------------ writing end

    @property
    def waiting(self) -> Bytes:
        """Bytes in the writer's transport."""
        return self._waiting_bytes

    def put(self, data: memoryview) -> None:
        self._waiting.append(data)
        self._waiting_bytes += data.nbytes

    def finish(self) -> None:
        """Sends EOF once everything has been taken."""
        self._finishing = True
        self.pump()

    def drop(self, *, reset: bool) -> None:
        """Handles the writer's abort: waiting bytes are lost; the reader gets the bytes under way
        and then the end.
        """
        self._waiting.clear()
        self._waiting_bytes = 0
        self._finishing = False
        self._send(_Mark.RESET if reset else _Mark.EOF)

    @property
    def unread(self) -> bool:
        """True if there are bytes that the reader has not taken."""
        return self._carried > 0

    def pump(self) -> None:
        """Takes bytes from the writer while there is room."""
        if self._world.held(self.source):
            return
        conditions = self.conditions
        while self._waiting and (room := conditions.capacity - self._carried) > 0:
            head = self._waiting[0]
            taken = head[: min(room, conditions.segment)]
            if taken.nbytes == head.nbytes:
                self._waiting.popleft()
            else:
                self._waiting[0] = head[taken.nbytes :]
            self._waiting_bytes -= taken.nbytes
            self._carried += taken.nbytes
            self._send(bytes(taken))
        if self._finishing and not self._waiting:
            self._finishing = False
            self._send(_Mark.EOF)
        self.writer.drained()

    def _send(self, what: bytes | _Mark) -> None:
        conditions = self.conditions
        delay = conditions.delay_min
        if conditions.delay_max > delay:
            delay = self._world.random.uniform(delay, conditions.delay_max)
            self._world.fired("delay")
        start = max(self._loop.time() + delay, self._last)
        if conditions.bandwidth and isinstance(what, bytes):
            start += len(what) / conditions.bandwidth
            self._world.fired("slow")
        self._last = start
        self._segments.append((start, what))
        self._schedule()

    # ------------------------------------------------------------------ reading end

    def _schedule(self) -> None:
        """Sets a timer for the first segment."""
        if self._timer is not None or not self._segments:
            return
        due = self._segments[0][0]
        if due <= self._loop.time():
            self._timer = self._loop.call_soon(self._arrive, context=self._world.context)
        else:
            self._timer = self._loop.call_at(due, self._arrive, context=self._world.context)

    def look(self) -> None:
        """Continues after a possible obstacle has changed."""
        self._schedule()
        self.pump()

    def _arrive(self) -> None:
        """Delivers what is due and may be delivered."""
        self._timer = None
        if self.conditions.silent or self._world.held(self.target):
            # `look` continues when the host or the direction delivers again.
            self._world.fired("silence" if self.conditions.silent else "pause")
            return
        now = self._loop.time()
        while self._segments and self._segments[0][0] <= now:
            if not self.reader.is_reading() and not self._reset_is_due(now):
                return
            due, what = self._segments.popleft()
            if isinstance(what, bytes):
                self._hand_over(due, what)
            elif what is _Mark.EOF:
                self.reader.was_ended()
            else:
                self.reader.was_reset()
        self._schedule()
        self.pump()

    def _reset_is_due(self, now: Seconds) -> bool:
        """Applies a due reset, which does not wait for the reader; unread bytes are lost."""
        due, what = self._segments[-1]
        if what is not _Mark.RESET or due > now:
            return False
        self._segments = deque(((due, what),))
        return True

    def _hand_over(self, due: Seconds, data: bytes) -> None:
        """Delivers one read's worth; the rest stays in front."""
        size = self.reader.room(len(data))
        if self.conditions.split:
            numbers = self._world.random
            mean = numbers.choice(_PIECES)
            size = min(size, 1 + int(numbers.expovariate(1 / mean)))
        if self.reset_after is not None:
            size = min(size, self.reset_after)
        if size < len(data):
            self._segments.appendleft((due, data[size:]))
        self._carried -= size
        if size:
            self.reader.was_sent(data[:size])
        if self.reset_after is not None:
            self.reset_after -= size
            if self.reset_after <= 0:
                self.reset_after = None
                self._world.fired("reset inside a stream")
                self.break_off()

    def break_off(self) -> None:
        """Resets both ends now."""
        self._segments.clear()
        self.writer.was_reset()
        self.reader.was_reset()


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self,
        world: PipeWorld,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        outgoing: Pipe,
        incoming: Pipe,
        names: tuple[tuple[str, int], tuple[str, int]],
        context: Context,
    ) -> None:
        super().__init__({"sockname": names[0], "peername": names[1]})
        self._world = world
        self._context = context
        self._inside = False
        self._loop = loop
        self._protocol = protocol
        self._outgoing = outgoing
        self._incoming = incoming
        self._high, self._low = _HIGH_WATER, _HIGH_WATER // 4
        self._paused = False  # `pause_writing` was called
        self._reading = True
        self._eof_sent = False
        self._closing = False
        self._made = False
        self._lost = False
        self._buffer: memoryview | None = None

    def made(self) -> None:
        """Establishes the connection; does nothing if it is over already."""
        if not self._lost:
            self._made = True
            self._call(self._protocol.connection_made, self)
            self._incoming.look()

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        """Calls the protocol in the context of its maker."""
        if self._inside:
            return method(argument)
        self._inside = True
        try:
            return self._context.run(method, argument)
        finally:
            self._inside = False

    # ------------------------------------------------------------------ writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        if self._closing:
            return
        if self._eof_sent:
            raise RuntimeError("write() after write_eof()")
        for data in list_of_data:
            view = memoryview(data).cast("B")
            if view.nbytes:
                self._outgoing.put(view)
        self._outgoing.pump()
        self._pause_if_full()

    def write_eof(self) -> None:
        if not self._eof_sent and not self._closing:
            self._eof_sent = True
            self._outgoing.finish()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> Bytes:
        return self._outgoing.waiting

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low
        self._pause_if_full()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def _pause_if_full(self) -> None:
        if not self._paused and self._outgoing.waiting > self._high:
            self._paused = True
            self._call(lambda _: self._protocol.pause_writing(), None)

    def drained(self) -> None:
        """Notes that the pipe took bytes."""
        if self._paused and self._outgoing.waiting <= self._low:
            self._paused = False
            self._call(lambda _: self._protocol.resume_writing(), None)
        if self._closing and not self._lost and not self._outgoing.waiting:
            self._lose(None)

    # ------------------------------------------------------------------ reading

    def is_reading(self) -> bool:
        return self._made and (self._reading or self._closing)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._incoming.look)

    def room(self, available: Bytes) -> Bytes:
        """How many of `available` bytes the next read takes."""
        if self._closing or not isinstance(self._protocol, asyncio.BufferedProtocol):
            return available
        self._buffer = memoryview(self._call(self._protocol.get_buffer, available)).cast("B")
        return min(available, self._buffer.nbytes)

    def was_sent(self, data: bytes) -> None:
        """Delivers bytes to the protocol."""
        # A kernel answers bytes for a closed socket with a reset.
        if self._closing:
            self._outgoing.drop(reset=True)
        elif isinstance(self._protocol, asyncio.BufferedProtocol):
            assert self._buffer is not None
            self._buffer[: len(data)] = data
            self._buffer = None
            self._call(self._protocol.buffer_updated, len(data))
        else:
            self._call(cast("asyncio.Protocol", self._protocol).data_received, data)

    def was_ended(self) -> None:
        """Notes that the peer has finished writing."""
        if self._closing:
            return
        protocol = cast("asyncio.Protocol", self._protocol)
        if not self._call(lambda _: protocol.eof_received(), None):
            self.close()

    def was_reset(self) -> None:
        """Notes a reset by the peer or the network."""
        if not self._lost:
            self._closing = True
            self._lose(ConnectionResetError("connection reset by peer"))

    # ------------------------------------------------------------------ closing

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._eof_sent:
            self._eof_sent = True
            self._outgoing.finish()
        self.drained()

    def abort(self) -> None:
        if self._lost:
            return
        self._closing = True
        # A socket that is closed sends a reset only if there are unread bytes.
        self._outgoing.drop(reset=self._incoming.unread)
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self._lost = True
        self._world.over(self)
        if self._made:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pipes(self) -> tuple[Pipe, Pipe]:
        """The outgoing and the incoming pipe, for the world's faults."""
        return self._outgoing, self._incoming


PipeEnd = tuple[tuple[str, int], asyncio.BaseProtocol, contextvars.Context]
"""One end's address, its protocol, and the context for calling it."""


def connect(
    world: PipeWorld, loop: asyncio.AbstractEventLoop, dialler: PipeEnd, acceptor: PipeEnd
) -> tuple[MemoryTransport, MemoryTransport]:
    """Makes two connected transports; the caller calls `made`."""
    (ours, our_protocol, our_context), (theirs, their_protocol, their_context) = dialler, acceptor
    there = Pipe(world, loop, ours[0], theirs[0])
    back = Pipe(world, loop, theirs[0], ours[0])
    a = MemoryTransport(world, loop, our_protocol, there, back, (ours, theirs), our_context)
    b = MemoryTransport(world, loop, their_protocol, back, there, (theirs, ours), their_context)
    there.writer = back.reader = a
    there.reader = back.writer = b
    return a, b
