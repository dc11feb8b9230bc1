"""Writes a streamed response: headers, then events or lines in HTTP chunks, then the end.

Synchronous, without a task or queue: bytes written in one turn of the event loop reach the
transport at the end of that turn. Knows HTTP framing and flow control, not what events mean. Owned
by one request's handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from pdserve.frontend.http.http_response import (
    EVENTS,
    connection_line,
    connection_of,
    date_line,
    status_line,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp.abc import AbstractStreamWriter

    from pdserve.frontend.http.connection import ClientConnection
    from pdserve.ids import Bytes

_SIZES_KNOWN = 4096
_SIZES = [b"%x\r\n" % size for size in range(_SIZES_KNOWN)]
"""Size lines of HTTP chunks: formatting one costs more than the rest of a short chunk."""


class Flusher:
    """Hands each writer's bytes to its transport once per turn of the event loop.

    A transport sends at once what it is given. When one turn brings several tokens for a stream, as
    on a busy loop, this makes them one system call, which is most of their cost. Owned by the
    service.
    """

    __slots__ = ("_call_soon", "_dirty")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._dirty: list[SseWriter] = []

    def add(self, wire: SseWriter) -> None:
        """Flushes `sse_response` at the end of this turn."""
        if not self._dirty:
            self._call_soon(self._flush)
        self._dirty.append(wire)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for wire in dirty:
            wire.flush()


class SseWriter:
    """One event stream on one connection."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_flusher",
        "_keep_alive",
        "_limit",
        "_lines",
        "_on_resume",
        "_parts",
        "_request",
        "_transport",
        "_type",
        "ended",
        "held",
        "paused",
        "slow_since",
        "started",
    )

    def __init__(
        self,
        request: web.BaseRequest,
        headers: bytes,
        limit: Bytes,
        flusher: Flusher,
        content_type: bytes = EVENTS,
    ) -> None:
        """Args: `headers` are whole lines; `limit` is the most bytes held for a slow client.

        Errors: `ConnectionResetError` when the client has disconnected.
        """
        self._connection: ClientConnection = connection_of(request)
        self._transport: asyncio.Transport | None = self._connection.transport
        self._request = request
        self._flusher = flusher
        self._lines = headers
        self._type = content_type
        self._limit = limit
        self._chunked = request.version >= HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._on_resume: Callable[[], None] = _nothing
        self._parts: list[bytes] = []
        """Written in this turn of the event loop, not yet handed to the transport."""
        self.held = 0
        """Bytes that the stream's owner holds back."""
        self.paused = self._connection.paused_since is not None
        """True while the client is behind: the owner should hold output back."""
        self.slow_since = self._connection.paused_since
        """Time when the client was first behind with reading; None: it never was."""
        self.started = False
        self.ended = False
        self._connection.wire = self

    def on_resume(self, callback: Callable[[], None]) -> None:
        """Sets a callback for when a paused client has caught up."""
        self._on_resume = callback

    # ------------------------------------------------------------------ from the connection

    def pause(self) -> None:
        """Called when the transport's buffer is full."""
        self.paused = True
        if self.slow_since is None:
            self.slow_since = self._connection.paused_since

    def resume(self) -> None:
        """Called when the client has read."""
        self.paused = False
        self._on_resume()

    def detach(self) -> None:
        """Called when the connection is gone: later output is dropped."""
        self._transport = None
        self._on_resume = _nothing

    # ------------------------------------------------------------------ from the flusher

    def flush(self) -> None:
        """Hands over everything written in this turn."""
        if self._parts and self._transport is not None:
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    # ------------------------------------------------------------------ from the stream

    def begin(self, lines: bytes = b"") -> None:
        """Sends status and headers, `lines` included."""
        self.started = True
        self._add(
            (
                status_line(200),
                b"Content-Type: %s\r\n"
                b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" % self._type,
                b"Transfer-Encoding: chunked\r\n" if self._chunked else b"",
                date_line(),
                self._lines,
                lines,
                connection_line(self._request, self._keep_alive),
                b"\r\n",
            )
        )

    def write(self, events: bytes) -> None:
        """Sends whole events."""
        if not self._chunked:
            self._add((events,))
        elif events:
            self._add((b"%x\r\n" % len(events), events, b"\r\n"))

    def write_parts(self, head: bytes, text: bytes, tail: bytes) -> None:
        """Sends one event made of three parts."""
        if self._chunked:
            size = len(head) + len(text) + len(tail)
            line = _SIZES[size] if size < _SIZES_KNOWN else b"%x\r\n" % size
            self._add((line, head, text, tail, b"\r\n"))
        else:
            self._add((head, text, tail))

    def hold(self, size: Bytes) -> None:
        """Counts bytes held back. Beyond the limit the connection is closed."""
        self.held += size
        if self.held > self._limit:
            self._connection.cut("write buffer full")

    def end(self, events: bytes) -> None:
        """Sends the last events and the end of the body at once."""
        self.ended = True
        self._on_resume = _nothing
        self.write(events)
        if self._chunked:
            self._parts.append(b"0\r\n\r\n")

    async def reply(self) -> SentResponse:
        """Returns the handler's result, which tells aiohttp whether the connection can be reused.

        Waits until a slow client has read most of the body.
        """
        self.flush()
        await self._connection.wait_writable()
        self._connection.busy = False
        return SentResponse(self._keep_alive)

    def release(self) -> None:
        """Detaches from the connection: the request is over."""
        self._connection.wire = None
        self.detach()

    def _add(self, parts: tuple[bytes, ...]) -> None:
        if not self._parts:
            self._flusher.add(self)
        self._parts += parts


def _nothing() -> None:
    pass


class SentResponse(web.StreamResponse):
    """Stands for a response that is already written."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__(status=200)
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Does nothing: everything is written."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: everything is written."""
