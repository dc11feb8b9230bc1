"""The core's end of its socket: receives commands and sends events, without blocking.

Used by the `CoreLoop` only, in one thread; only `nudge` may be called from others. Events that the
node has not read yet are kept here. While they are too many the loop computes no further step, so
no event is dropped, and the buffer holds at most `HIGH_WATER` plus the events of one step.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ProtocolError
from pdserve.messages.engine import Command, StepOutput
from pdserve.wire.length_prefixed import FrameDecoder, encode_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import Event

__all__ = ["HIGH_WATER", "CoreSocket", "CoreSocketClosed"]

HIGH_WATER: Bytes = 4 * 1024 * 1024
"""Unread bytes above which no step is computed until the node has read all of them."""

LARGE: Bytes = 1024 * 1024
"""A step's events with more bytes than this are sent in several frames: the reader's event loop
decodes a frame at once, and logprobs of prompts could otherwise exceed the size of a frame."""

_READ = 256 * 1024
_SELECT_LIMIT = 1024


class CoreSocketClosed(Exception):
    """The node has closed its end, so the core must end."""


class CoreSocket:
    """The core's end of a socket pair; takes ownership of the socket."""

    def __init__(self, sock: socket.socket, *, high_water: Bytes = HIGH_WATER) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameDecoder()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._unsent = bytearray()
        self._high_water = high_water
        self._draining = False
        self._nudged, self._nudge = socket.socketpair()
        self._nudged.setblocking(False)
        self._nudge.setblocking(False)
        self._nudging = False

    def receive(self) -> list[Command]:
        """Return all commands that have arrived. Raises `CoreSocketClosed`, `ProtocolError`."""
        return self._receive(self._sock.recv)

    def receive_first(self) -> tuple[list[Command], list[int]]:
        """`receive`, and the descriptors that came with the commands, which the caller owns. No
        process that this one starts inherits them."""
        fds: list[int] = []

        def read(size: Bytes) -> bytes:
            data, passed, _, _ = socket.recv_fds(self._sock, size, 1)
            for fd in passed:
                os.set_inheritable(fd, False)
            fds.extend(passed)
            return data

        try:
            return self._receive(read), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _receive(self, read: Callable[[Bytes], bytes]) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                data = read(_READ)
            except (BlockingIOError, InterruptedError):
                return commands
            except OSError as error:
                raise CoreSocketClosed from error
            if not data:
                raise CoreSocketClosed
            commands += map(self._decode, self._frames.feed(data))
            if len(data) < _READ:
                return commands

    def _decode(self, body: bytes) -> Command:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a command cannot be read: {error}") from error

    def send(self, events: Sequence[Event]) -> None:
        """Queue events and write what the socket accepts. Raises `CoreSocketClosed`."""
        blocked = bool(self._unsent)
        self.queue(events)
        if not blocked:
            self.flush()

    def queue(self, events: Sequence[Event]) -> None:
        """Queue events for the next `flush`, behind those that are unsent."""
        self._unsent += encode_frames(self._bodies(events))
        if len(self._unsent) > self._high_water:
            self._draining = True

    def _bodies(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            body = self._encoder.encode(event)
            if len(body) <= LARGE or type(event) is not StepOutput or len(event.deltas) < 2:
                yield body
            else:
                middle = len(event.deltas) // 2
                yield from self._bodies(
                    (StepOutput(event.deltas[:middle]), StepOutput(event.deltas[middle:]))
                )

    def flush(self) -> None:
        """Write what the socket accepts now. Raises `CoreSocketClosed`."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]
        if not self._unsent:
            self._draining = False

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise CoreSocketClosed from error

    @property
    def unsent(self) -> int:
        """Bytes that the node has not accepted yet."""
        return len(self._unsent)

    @property
    def congested(self) -> bool:
        """Return whether unsent bytes passed `HIGH_WATER` and have not all been read since."""
        return self._draining

    def wait(self, timeout: Seconds | None) -> None:
        """Sleep until the socket can be read, unsent bytes can be written, `nudge` was called, or
        `timeout` seconds have passed (None: no limit)."""
        readers = [self._sock, self._nudged]
        writers = [self._sock] if self._unsent else []
        if max(reader.fileno() for reader in readers) < _SELECT_LIMIT:
            # Not poll: it rounds up to milliseconds, too coarse for engines with timed steps.
            select.select(readers, writers, [], timeout)
        else:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if writers else 0))
            poll.register(self._nudged, select.POLLIN)
            poll.poll(None if timeout is None else timeout * 1000)
        if self._nudging:
            with suppress(BlockingIOError):
                self._nudged.recv(64)
            self._nudging = False

    def nudge(self) -> None:
        """Make this or the next `wait` return. May be called from any thread at any time."""
        if not self._nudging:
            self._nudging = True
            with suppress(OSError):
                # The socket is full, which also ends the wait, or closed.
                self._nudge.send(b"!")

    def close(self) -> None:
        """Close the socket. Idempotent."""
        for sock in (self._sock, self._nudged, self._nudge):
            sock.close()
