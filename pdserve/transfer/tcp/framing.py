"""Reads and writes frames with payload over a blocking socket, from threads.

    frame    header · record (msgpack) · payload · CRC-32 of the payload, or of a range of it
    header   magic, length of the record, CRC-32 of the record, length of the payload

A record is checked before it is acted on, a payload before it is used, as far as its checksum goes.
Payload is written from and read to its place in memory, many runs per system call. Within a frame
every step must make progress before the deadline; between frames the reader waits until `end`. It
does not know the records' meaning. One thread reads, another one writes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Bytes, Seconds

__all__ = ["BulkError", "BulkSocket", "Range"]

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
        self._progress = progress
        self._closing = threading.Event()
        self.sent: Bytes = 0
        """Bytes sent so far, to observe progress."""

    def end(self) -> None:
        """Make both threads' calls fail soon; callable from any thread. Does not close the
        socket."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the peer was faster
            # Not the method of a TLS socket: that one would go on in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; both threads must have ended."""
        self._socket.close()

    # ------------------------------------------------------------------ writing

    def send(
        self, record: bytes, views: Sequence[memoryview] = (), checked: Range | None = None
    ) -> None:
        """Send one frame; its checksum covers that range of the payload, None: all of it. Errors:
        `BulkError`."""
        size = sum(map(len, views))
        head = _HEADER.pack(_MAGIC, len(record), crc32(record), size)
        self._send_all([memoryview(head), memoryview(record)])
        if size:
            running = _Checksum(checked or (0, size))
            for batch in _batches(views):
                running.add(batch)
                self._send_all(batch)
            self._send_all([memoryview(_TRAILER.pack(running.total))])

    def _send_all(self, views: list[memoryview]) -> None:
        while views:
            try:
                sent = self._write(views)
            except OSError as error:
                raise BulkError(str(error)) from error
            if not sent:
                self._wait(select.POLLOUT, self._progress)
                continue
            self.sent += sent
            views = _after(views, sent)

    def _write(self, views: list[memoryview]) -> Bytes:
        """Send; returns the bytes taken, 0 if there was no room. Errors: `OSError`."""
        try:
            return self._socket.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0

    # ------------------------------------------------------------------ reading

    def receive(self) -> tuple[bytes, Bytes]:
        """Receive the next frame's record and the length of its payload. Errors: `BulkError`, also
        at the end of the connection."""
        head = bytearray(_HEADER.size)
        self._fill(memoryview(head)[:1], None)
        self._fill(memoryview(head)[1:], self._progress)
        magic, length, expected, size = _HEADER.unpack(head)
        if magic != _MAGIC or length > _RECORD:
            raise BulkError("the peer sent data that is not a frame")
        record = bytearray(length)
        self._fill(memoryview(record), self._progress)
        if crc32(record) != expected:
            raise BulkError("a record's checksum is wrong")
        return bytes(record), size

    def receive_payload(
        self, views: Sequence[memoryview], guard: WriteGuard, checked: Range | None = None
    ) -> bool:
        """Read the payload into `views` while the guard allows it, else discard it; returns whether
        the checksum of that range is right. Errors: `BulkError`."""
        running = _Checksum(checked or (0, sum(map(len, views))))
        for batch in _batches(views):
            left = batch
            while left:
                count = self._read_guarded(left, guard)
                if count:
                    left = _after(left, count)
                else:
                    self._wait(select.POLLIN, self._progress)
            running.add(batch)
        return self._trailer() == running.total

    def skip_payload(self, size: Bytes) -> None:
        """Read a payload and discard it. Errors: `BulkError`."""
        scratch = memoryview(bytearray(min(size, _AT_ONCE)))
        while size:
            step = min(size, len(scratch))
            self._fill(scratch[:step], self._progress)
            size -= step
        self._trailer()

    def _trailer(self) -> int:
        trailer = bytearray(_TRAILER.size)
        self._fill(memoryview(trailer), self._progress)
        value: int = _TRAILER.unpack(trailer)[0]
        return value

    def _read_guarded(self, views: list[memoryview], guard: WriteGuard) -> int:
        """Bytes taken off the connection, into the views only while the guard holds; 0: there are
        none."""
        if self._closing.is_set():
            raise BulkError("closed here")
        try:
            with guard.lock:
                if not guard.allowed():
                    views = [memoryview(bytearray(min(sum(map(len, views)), _AT_ONCE)))]
                count = self._read(views)
        except OSError as error:
            raise BulkError(str(error)) from error
        if count is None:
            return 0
        if not count:
            raise BulkError("the connection ended inside a frame")
        return count

    def _read(self, views: list[memoryview]) -> Bytes | None:
        """Receive; returns the bytes read, None if there are none yet, 0 at the end. Errors:
        `OSError`."""
        try:
            return self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return None

    def _fill(self, view: memoryview, patience: Seconds | None) -> None:
        while view:
            self._wait(select.POLLIN, patience)
            try:
                count = self._read([view])
            except OSError as error:
                raise BulkError(str(error)) from error
            if count == 0:
                raise BulkError("the peer has closed the connection")
            view = view[count or 0 :]

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
