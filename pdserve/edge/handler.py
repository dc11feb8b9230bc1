"""A connection of aiohttp's whose parser has limits (`bounded_parser.py`).

Bytes that arrive while a request is being answered wait unparsed; beyond a limit the socket is not
read until the answer is sent. It knows neither requests nor deadlines. Base class of all
connections that are open to unknown clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from pdserve.edge.bounded_parser import CLOSED, BoundedParser, FramingBudget, HttpParser

if TYPE_CHECKING:
    import asyncio

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader

    from pdserve.ids import Bytes

__all__ = ["BoundedHandler", "make_request"]

_WAITING: Final[Bytes] = 64 * 1024
"""Bytes of later requests that may wait while one is being answered; then the socket is not
read."""
_BODY: Final[Bytes] = 64 * 1024
"""Bytes of a body that its reader has not taken; twice as many pause the socket."""


class BoundedHandler(web.RequestHandler):
    """One accepted socket."""

    __slots__ = ("body", "busy", "intake")

    def __init__(
        self, server: web.Server, room: FramingBudget, *, loop: asyncio.AbstractEventLoop, **kw: Any
    ) -> None:
        """`room` is shared by all connections of a server."""
        super().__init__(server, loop=loop, auto_decompress=False, read_bufsize=_BODY, **kw)
        self.busy = False
        """True while a request is being answered."""
        self.body: StreamReader | None = None
        """The body of the newest request; the rest of it may arrive after an early answer."""
        parser: HttpParser = self._parser  # type: ignore[assignment]
        self.intake = BoundedParser(parser, room, self._may_parse, self.max_line_size)
        self._parser = self.intake  # type: ignore[assignment]  # it has what aiohttp calls

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.intake.refused:
            # The connection closes after the answer that is due.
            self.close()
            self._drop_tracebacks()
        self._pause_or_go_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.intake.drop()
        super().connection_lost(exc)
        # Parser and body refer to this object: the cycle would keep the connection until the
        # garbage collector runs.
        self.intake, self.body = CLOSED, None

    async def finish_response(self, *args: Any) -> Any:
        """Finishes as aiohttp does, then parses the bytes that arrived meanwhile."""
        try:
            return await super().finish_response(*args)
        finally:
            self.busy = False
            self.parse_on()

    def parse_on(self) -> None:
        """Parses waiting bytes as far as allowed."""
        if self.transport is not None and not self._messages:
            self.data_received(b"")

    @property
    def body_is_here(self) -> bool:
        """True if the newest request has arrived completely."""
        return self.body is None or self.body.is_eof()

    def begin(self, body: StreamReader) -> None:
        """Starts to handle a request."""
        self.busy = True
        self.body = body

    def _drop_tracebacks(self) -> None:
        """Of the parser's errors: their frames refer to these errors and to this object."""
        for message, _ in self._messages:
            error = getattr(message, "exc", None)
            if error is not None:
                error.__traceback__ = None

    def _may_parse(self) -> bool:
        if self._messages or self._reading_paused:
            return False
        return not self.busy or not self.body_is_here

    def _pause_or_go_on(self) -> None:
        if self.intake.waiting > _WAITING and not self._buffer_paused:
            self._pause_reading_for_buffer()
        elif self._buffer_paused and not self._messages:
            self._resume_reading_for_buffer()

    def _resume_reading_for_buffer(self) -> None:
        """Overrides aiohttp's check, which considers only its own queue."""
        if self.intake.waiting <= _WAITING:
            super()._resume_reading_for_buffer()


def make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """The request factory for a server with such connections."""
    assert isinstance(protocol, BoundedHandler)
    protocol.begin(payload)
    return web.BaseRequest(message, payload, protocol, writer, task, protocol._loop)
