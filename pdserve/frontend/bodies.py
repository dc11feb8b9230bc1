"""Reading request bodies: bounded in size, in time, and in what all of them hold together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp.http_exceptions import PayloadEncodingError
from aiohttp.web_protocol import RequestPayloadError

from pdserve.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from pdserve.frontend.replies import connection_of

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.frontend.config import FrontendConfig
    from pdserve.ids import Bytes


FREE: Bytes = 64 * 1024
"""A body up to this size is always read: connections are bounded, and each may hold as much in
its parser anyway."""


class BodyReader:
    """Reads bodies for one frontend. Used on the event loop's thread."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self.buffered = 0
        """Bytes of bodies that are still arriving, as far as they exceed what each may have."""

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body.

        Errors: `PayloadTooLarge`, `Overloaded`, `RequestTimeout`, `InvalidRequest` for broken
        framing or compression; `ConnectionResetError` when the client is gone.
        """
        check_encoding(request.headers.get("Content-Encoding"))
        limit = self._config.max_body
        declared = _declared(request)
        if declared is not None and declared > limit:
            raise self._too_large()
        try:
            if request.content.is_eof():
                body = request.content.read_nowait(-1)
            else:
                body = await self._receive(request)
        except (RequestPayloadError, PayloadEncodingError) as error:
            raise InvalidRequest(f"the body cannot be read: {_words(error)}") from None
        if len(body) > limit:
            raise self._too_large()
        return body

    async def _receive(self, request: web.BaseRequest) -> bytes:
        try:
            async with asyncio.timeout(self._config.body_timeout):
                return await self._gather(request)
        except TimeoutError:
            raise RequestTimeout(
                f"the body did not arrive within {self._config.body_timeout:g} s"
            ) from None

    async def _gather(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue":
            transport = connection_of(request).transport
            assert transport is not None  # connection_of has looked
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = held = 0
        try:
            while part := await request.content.readany():
                parts.append(part)
                size += len(part)
                if size > self._config.max_body:
                    raise self._too_large()
                if size > FREE:
                    self._hold(size - held)
                    held = size
            return b"".join(parts)
        finally:
            self.buffered -= held

    def _hold(self, more: Bytes) -> None:
        """What has come counts, not what was promised, lest empty promises keep others out."""
        if self.buffered + more > self._config.max_buffered:
            raise Overloaded(
                "too many request bodies are being received",
                retry_after=self._config.retry_after,
            )
        self.buffered += more

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._config.max_body} bytes")


def check_encoding(encoding: str | None) -> None:
    """Errors: `InvalidRequest` for an encoding that the parser hands on as it came, or that only
    some installations of it know."""
    if encoding is not None and encoding.lower() not in ("gzip", "deflate", "identity"):
        raise unknown_encoding()


def unknown_encoding() -> InvalidRequest:
    """A body is compressed in a way that is not read."""
    return InvalidRequest(
        "the body's Content-Encoding is not understood; send gzip, deflate or none"
    )


def _declared(request: web.BaseRequest) -> int | None:
    if "Content-Encoding" in request.headers:
        return None  # the length on the wire says nothing about the length in memory
    return request.content_length


def _words(error: Exception) -> str:
    """What aiohttp says, without the status that it puts before."""
    text = " ".join(str(getattr(error, "message", "") or error).split())
    return text.removeprefix("400, message: ")
