"""Builds whole responses as bytes: status line, headers and body in one write.

aiohttp's own response builds a header table per answer, whose cost is measurable on a request of
one token.
"""

from __future__ import annotations

import math
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import HttpVersion10, web

from pdserve.protocols.openai_errors import error_body

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

    from pdserve.errors import PdserveError
    from pdserve.frontend.http.connection import ClientConnection

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"

_STATUS_LINES = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode())
    for status, phrase in [(s.value, s.phrase) for s in HTTPStatus]
    + [(499, "Client Closed Request")]
}


class _DateLine:
    """The Date header, formatted once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def __call__(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"Date: %s\r\nServer: pdserve\r\n" % formatdate(
                second, usegmt=True
            ).encode("ascii")
        return self._line


date_line = _DateLine()


def connection_of(request: web.BaseRequest) -> ClientConnection:
    """The connection on which a request came.

    Errors: `ConnectionResetError` when it is gone.
    """
    connection = request.protocol
    if connection.transport is None or connection.transport.is_closing():
        raise ConnectionResetError("the client is gone")
    return connection  # type: ignore[return-value]  # the server makes no other class


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` with its line end."""
    return _STATUS_LINES[status]


def connection_line(request: web.BaseRequest, keep_alive: bool) -> bytes:
    """The Connection header, if it differs from the HTTP version's default."""
    if not keep_alive:
        return b"Connection: close\r\n"
    return b"Connection: keep-alive\r\n" if request.version <= HttpVersion10 else b""


class HttpResponse(web.StreamResponse):
    """A response whose body is known. Written when aiohttp finishes the request."""

    def __init__(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """Args: `headers` are whole lines, each with its CRLF."""
        super().__init__(status=status)
        self.content = body
        self.kind = content_type
        self.lines = headers

    def add_headers(self, lines: bytes) -> None:
        """Append whole lines, each with its CRLF."""
        self.lines += lines

    def to_bytes(self, connection_header: bytes, *, head_only: bool = False) -> bytes:
        """The whole response in bytes."""
        return b"".join(
            (
                _STATUS_LINES[self.status],
                b"Content-Type: %s\r\n" % self.kind if self.kind else b"",
                b"Content-Length: %d\r\n" % len(self.content) if self.status != 204 else b"",
                date_line(),
                self.lines,
                connection_header,
                b"\r\n",
                b"" if head_only else self.content,
            )
        )

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        connection = connection_of(request)
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        line = connection_line(request, self._keep_alive)
        assert connection.transport is not None
        connection.transport.write(self.to_bytes(line, head_only=request.method == "HEAD"))
        await connection.wait_writable()
        connection.busy = False
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: `prepare` has written everything."""


def request_id_line(request_id: str, name: bytes = b"x-request-id") -> bytes:
    """A header line with the request id."""
    return b"%s: %s\r\n" % (name, request_id.encode("ascii"))


def error_response(error: PdserveError, lines: bytes, body: bytes | None = None) -> HttpResponse:
    """The response for an error: the class's status, and Retry-After where a retry helps.

    Args: `lines` are further header lines; `body` replaces OpenAI's error format.
    """
    wait = error.retry_after
    if wait is not None or error.http_status in (429, 503):
        lines += b"Retry-After: %d\r\n" % max(1, math.ceil(wait or 0))
    if error.http_status == 401:
        lines += b'WWW-Authenticate: Bearer realm="pdserve"\r\n'
    return HttpResponse(
        error.http_status, error_body(error) if body is None else body, headers=lines
    )
