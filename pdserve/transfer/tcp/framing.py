"""Reads and writes frames with payload over a non-blocking socket.

    frame    header · record (msgpack) · payload · CRC-32 of the payload, or of a range of it
    header   magic, length of the record, CRC-32 of the record, length of the payload

A record is checked before it is acted on, a payload before it is used, as far as its checksum goes.
Payload is written from and read to its place in memory, many runs per system call. Reading is a
generator that pauses where bytes are missing: the event loop or a thread runs it, one at a time,
and waits in its own way. Writing waits in a thread; a small frame that needs no wait leaves from
any thread. Within a frame every step must make progress before the deadline. It does not know the
records' meaning.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from pdserve.ids import Bytes, Seconds

__all__ = ["BulkError", "BulkSocket", "Range", "ReadPause", "Sent"]

T = TypeVar("T")

Range = tuple[int, int]
"""A half-open range of a payload's bytes."""

_HEADER: Final = struct.Struct("<4sIIQ")
_MAGIC: Final = b"pdKV"
_TRAILER: Final = struct.Struct("<I")
_RECORD: Final[Bytes] = 64 * 1024
_AT_ONCE: Final[Bytes] = 1 << 20
"""Most bytes of one system call: for so long a guard is held, and a checksum is computed while the
bytes are still in the cache."""
_VIEWS: Final = 256
"""Most runs of one system call."""


class ReadPause(Enum):
    """Where a reader pauses."""

    IDLE = "no frame has begun"
    INSIDE = "the rest of a frame is not here"
    FRAME = "a frame has ended"
    LARGE = "a large payload follows"


class Sent(Enum):
    """What became of a frame that must not wait."""

    ALL = "the socket has all of it"
    REST = "`flush` sends the rest"
    NOTHING = "another frame is under way: call `send`"


class BulkError(Exception):
    """The connection cannot be used any more; the text says why."""


class BulkSocket:
    """A connected socket, owned by this object."""

    def __init__(self, connection: socket.socket, progress: Seconds) -> None:
        """`progress`: seconds that a step inside a frame may take."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # of another family: nothing is held back there
            # A frame ends in a few bytes, which would wait until all before them are acknowledged.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.progress = progress
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._rest: list[memoryview] = []
        """What `send_now` has left, under the lock."""
        self.taken: Bytes = 0
        """Bytes received so far, to observe progress."""
        self.sent: Bytes = 0
        """Bytes sent so far, to observe progress."""

    def end(self) -> None:
        """Make both threads' calls fail soon; callable from any thread. Does not close the
        socket."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the peer was faster
            # Not the method of a TLS socket: that one would go on in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket, and let go of what was not sent; both threads must have ended."""
        self._rest.clear()
        self._socket.close()

    # ------------------------------------------------------------------ writing

    def send(
        self, record: bytes, views: Sequence[memoryview] = (), checked: Range | None = None
    ) -> None:
        """Send one frame; its checksum covers that range of the payload, None: all of it. Errors:
        `BulkError`."""
        size = sum(map(len, views))
        self.send_payload(record, [views], size, checked or (0, size))

    def send_payload(
        self, record: bytes, payload: Iterable[Sequence[memoryview]], size: Bytes, checked: Range
    ) -> None:
        """Send one frame whose payload of `size` bytes comes in batches. The socket has all of a
        batch before the next one is asked for. Errors: `BulkError`, and those of `payload`, after
        which the connection cannot be used any more."""
        with self._writing:
            self._flush()
            unsent, running = _head(record, size), _Checksum(checked)
            for batch in itertools.chain.from_iterable(map(_batches, payload)):
                running.add(batch)
                self._send_all([*unsent, *batch])
                unsent = []
            self._send_all([*unsent, *running.trailer(size)])

    def send_now(
        self, record: bytes, views: Sequence[memoryview] = (), checked: Range | None = None
    ) -> Sent:
        """Send a small frame without waiting, as far as the socket takes it. Errors:
        `BulkError`."""
        if len(views) > _VIEWS or not self._writing.acquire(blocking=False):
            return Sent.NOTHING
        try:
            if self._rest:
                return Sent.NOTHING
            size = sum(map(len, views))
            running = _Checksum(checked or (0, size))
            running.add(views)
            self._rest = self._take([*_head(record, size), *views, *running.trailer(size)])
            return Sent.REST if self._rest else Sent.ALL
        finally:
            self._writing.release()

    def flush(self) -> None:
        """Send what `send_now` has left. Errors: `BulkError`."""
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        rest, self._rest = self._rest, []
        self._send_all(rest)

    def _take(self, views: list[memoryview]) -> list[memoryview]:
        """Send what the socket takes; returns the rest."""
        try:
            while views and (sent := self._write(views)):
                self.sent += sent
                views = _after(views, sent)
        except OSError as error:
            raise BulkError(str(error)) from error
        return views

    def _send_all(self, views: list[memoryview]) -> None:
        while views := self._take(views):
            self._wait(select.POLLOUT, self.progress)

    def _write(self, views: list[memoryview]) -> Bytes:
        """Send; returns the bytes taken, 0 if there was no room. Errors: `OSError`."""
        try:
            return self._socket.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0

    # ------------------------------------------------------------------ reading

    def receive(self) -> Generator[ReadPause, None, tuple[bytes, Bytes]]:
        """Receive the next frame's record and the length of its payload. Errors: `BulkError`, also
        at the end of the connection."""
        head = bytearray(_HEADER.size)
        yield from self._fill(memoryview(head), ReadPause.IDLE)
        magic, length, expected, size = _HEADER.unpack(head)
        if magic != _MAGIC or length > _RECORD:
            raise BulkError("the peer sent data that is not a frame")
        record = bytearray(length)
        yield from self._fill(memoryview(record))
        if crc32(record) != expected:
            raise BulkError("a record's checksum is wrong")
        return bytes(record), size

    def receive_payload(
        self, payload: Iterable[Sequence[memoryview]], guard: WriteGuard, checked: Range
    ) -> Generator[ReadPause, None, bool]:
        """Read the payload while the guard allows it, else discard it; returns whether the checksum
        of that range is right. Each batch of views is full before the next one is asked for.
        Errors: `BulkError`, and those of `payload`."""
        running = _Checksum(checked)
        for batch in itertools.chain.from_iterable(map(_batches, payload)):
            left = batch
            while left:
                count = self._read_guarded(left, guard)
                if count:
                    left = _after(left, count)
                else:
                    yield ReadPause.INSIDE
            running.add(batch)
        return (yield from self._trailer()) == running.total

    def skip_payload(self, size: Bytes) -> Generator[ReadPause, None, None]:
        """Read a payload and discard it. Errors: `BulkError`."""
        scratch = memoryview(bytearray(min(size, _AT_ONCE)))
        while size:
            step = min(size, len(scratch))
            yield from self._fill(scratch[:step])
            size -= step
        yield from self._trailer()

    def wait(self, steps: Generator[ReadPause, None, T]) -> T:
        """Run a reader to its end, in a thread, waiting where it pauses. Errors: `BulkError`."""
        try:
            while True:
                self.wait_for(next(steps))
        except StopIteration as ended:
            result: T = ended.value
            return result

    def wait_for(self, pause: ReadPause) -> None:
        """Wait, in a thread, until a reader that paused here may go on. Errors: `BulkError`."""
        if pause is ReadPause.IDLE:
            self._wait(select.POLLIN, None)
        elif pause is ReadPause.INSIDE:
            self._wait(select.POLLIN, self.progress)

    def _trailer(self) -> Generator[ReadPause, None, int]:
        trailer = bytearray(_TRAILER.size)
        yield from self._fill(memoryview(trailer))
        value: int = _TRAILER.unpack(trailer)[0]
        return value

    def _fill(
        self, view: memoryview, pause: ReadPause = ReadPause.INSIDE
    ) -> Generator[ReadPause, None, None]:
        """Fill the view; `pause`: what to say before its first byte."""
        while view:
            count = self._received([view])
            if count:
                view, pause = view[count:], ReadPause.INSIDE
            else:
                yield pause

    def _read_guarded(self, views: list[memoryview], guard: WriteGuard) -> int:
        """Bytes taken off the connection, into the views only while the guard holds; 0: there are
        none."""
        with guard.lock:
            if not guard.allowed():
                views = [memoryview(bytearray(min(sum(map(len, views)), _AT_ONCE)))]
            return self._received(views)

    def _received(self, views: list[memoryview]) -> Bytes:
        """Bytes taken off the connection; 0: there are none. Errors: `BulkError`."""
        if self._closing.is_set():
            raise BulkError("closed here")
        try:
            count = self._read(views)
        except OSError as error:
            raise BulkError(str(error)) from error
        if count == 0:
            raise BulkError("the peer has closed the connection")
        self.taken += count or 0
        return count or 0

    def _read(self, views: list[memoryview]) -> Bytes | None:
        """Receive; returns the bytes read, None if there are none yet, 0 at the end. Errors:
        `OSError`."""
        try:
            return self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return None

    def _wait(self, events: int, patience: Seconds | None) -> None:
        ready = self._is_ready(events, patience)
        if self._closing.is_set():
            raise BulkError("closed here")
        if not ready:
            raise BulkError(f"no progress for {patience:g} s")

    def _is_ready(self, events: int, patience: Seconds | None) -> bool:
        """True if the socket became readable or writable in time."""
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(None if patience is None else patience * 1000))


class _Checksum:
    """CRC-32 of a range of a payload's bytes."""

    def __init__(self, checked: Range) -> None:
        self.total = 0
        self._first, self._last = checked
        self._at = 0

    def add(self, views: Sequence[memoryview]) -> None:
        """Add the next bytes."""
        for view in views:
            if self._at >= self._last:
                return
            piece = view[max(0, self._first - self._at) : self._last - self._at]
            if piece:
                self.total = crc32(piece, self.total)
            self._at += len(view)

    def trailer(self, size: Bytes) -> list[memoryview]:
        """What follows a payload of this size."""
        return [memoryview(_TRAILER.pack(self.total))] if size else []


def _head(record: bytes, size: Bytes) -> list[memoryview]:
    """What precedes a payload of this size."""
    head = _HEADER.pack(_MAGIC, len(record), crc32(record), size)
    return [memoryview(head), memoryview(record)]


class WriteGuard:
    """Whether bytes may be placed; checked under its lock before each system call that places some.

    To fence, take the lock and make `allowed` false: no byte is placed afterwards.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def allowed(self) -> bool:
        raise NotImplementedError


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Splits the bytes into batches of bounded size."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        for piece in _pieces(view):
            batch.append(piece)
            size += len(piece)
            if size >= _AT_ONCE or len(batch) == _VIEWS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(view: memoryview) -> Sequence[memoryview]:
    """The view in pieces of bounded size; usually the view itself."""
    if 0 < len(view) <= _AT_ONCE:
        return (view,)
    return [view[at : at + _AT_ONCE] for at in range(0, len(view), _AT_ONCE)]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The bytes after the first `count`."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []
