"""Writes a streamed response: headers, then events in HTTP chunks, then the end.

Synchronous, without a task or queue: bytes written in one turn of the event loop reach the
transport at the end of that turn. Knows HTTP framing and flow control, not what events mean. Owned
by one request's handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from pdserve.frontend.http.http_response import (
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
"""Size lines of HTTP chunks: formatting one costs more than all else about a short chunk."""


class Flusher:
    """Hands each wire's bytes to its transport once per turn of the event loop.

    A transport sends what it is given at once. When a turn brings several tokens for one stream,
    as it does when the loop is busy, this makes them one system call, which is most of their cost.
    Owned by the service.
    """

    __slots__ = ("_call_soon", "_dirty")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._dirty: list[SseWriter] = []

    def add(self, wire: SseWriter) -> None:
        """Flush `sse_response` at the end of this turn."""
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
        "ended",
        "held",
        "paused",
        "started",
    )

    def __init__(
        self, request: web.BaseRequest, headers: bytes, limit: Bytes, flusher: Flusher
    ) -> None:
        """Args: `headers` are whole lines; `limit` bounds what may be held for a slow client.

        Errors: `ConnectionResetError` when the client is gone.
        """
        self._connection: ClientConnection = connection_of(request)
        self._transport: asyncio.Transport | None = self._connection.transport
        self._request = request
        self._flusher = flusher
        self._lines = headers
        self._limit = limit
        self._chunked = request.version >= HttpVersion11
        self._keep_alive = request.keep_alive and self._chunked
        self._on_resume: Callable[[], None] = _nothing
        self._parts: list[bytes] = []
        """Written in this turn of the event loop, not handed to the transport yet."""
        self.held = 0
        """Bytes that the stream's owner holds back."""
        self.paused = self._connection.paused_since is not None
        """The client is behind: more had better be held back."""
        self.started = False
        self.ended = False
        self._connection.wire = self

    def on_resume(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a paused client has caught up."""
        self._on_resume = callback

    # ------------------------------------------------------------------ from the connection

    def pause(self) -> None:
        """The transport's buffer is full."""
        self.paused = True

    def resume(self) -> None:
        """The client has read."""
        self.paused = False
        self._on_resume()

    def detach(self) -> None:
        """The connection is gone: whatever is still written goes nowhere."""
        self._transport = None
        self._on_resume = _nothing

    # ------------------------------------------------------------------ from the flusher

    def flush(self) -> None:
        """Hand over what this turn has written."""
        if self._parts and self._transport is not None:
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    # ------------------------------------------------------------------ from the stream

    def begin(self, lines: bytes = b"") -> None:
        """Send status and headers, `lines` among them."""
        self.started = True
        self._add(
            (
                status_line(200),
                b"Content-Type: text/event-stream; charset=utf-8\r\n"
                b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n",
                b"Transfer-Encoding: chunked\r\n" if self._chunked else b"",
                date_line(),
                self._lines,
                lines,
                connection_line(self._request, self._keep_alive),
                b"\r\n",
            )
        )

    def write(self, events: bytes) -> None:
        """Send whole events."""
        if not self._chunked:
            self._add((events,))
        elif events:
            self._add((b"%x\r\n" % len(events), events, b"\r\n"))

    def write_parts(self, head: bytes, text: bytes, tail: bytes) -> None:
        """Send one event that is made of three parts."""
        if self._chunked:
            size = len(head) + len(text) + len(tail)
            line = _SIZES[size] if size < _SIZES_KNOWN else b"%x\r\n" % size
            self._add((line, head, text, tail, b"\r\n"))
        else:
            self._add((head, text, tail))

    def hold(self, size: Bytes) -> None:
        """Account for bytes held back. Beyond the limit the connection is cut."""
        self.held += size
        if self.held > self._limit:
            self._connection.cut("write buffer full")

    def end(self, events: bytes) -> None:
        """Send the last events and the end of the body, now."""
        self.ended = True
        self._on_resume = _nothing
        self.write(events)
        if self._chunked:
            self._parts.append(b"0\r\n\r\n")

    async def reply(self) -> SentResponse:
        """What the handler returns: tells aiohttp whether the connection can be used again.

        Waits until a slow client has read most of it.
        """
        self.flush()
        await self._connection.wait_writable()
        self._connection.busy = False
        return SentResponse(self._keep_alive)

    def release(self) -> None:
        """The request is over, however it ended."""
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
        """Nothing: all is written."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing: all is written."""
