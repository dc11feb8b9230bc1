"""Reads request bodies within limits on size, time and total memory.

A body counts against the total from its first bytes until its text is no longer held: while it
arrives, is decompressed and decoded, and in decoded form until its prompt is ready; the parts that
the answer repeats, until the answer is sent. Large bodies are decompressed and decoded in a
separate thread, one at a time and in turns among tenants, so that the event loop keeps running.
`frontend/api/app.py` decides before who may send a body.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp.http_exceptions import PayloadEncodingError
from aiohttp.web_protocol import RequestPayloadError

from pdserve.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from pdserve.frontend.fair_semaphore import FairSemaphore
from pdserve.frontend.http.decompress import ENCODINGS, BadCompression, Decompressor
from pdserve.frontend.http.http_response import connection_of
from pdserve.frontend.http.memory_trim import MemoryTrimmer, malloc_trim
from pdserve.protocols.request_decoder import MAX_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    import msgspec
    from aiohttp import web

    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.ids import Bytes, Seconds
    from pdserve.protocols.request_decoder import Decoded, RequestDecoder

    R = TypeVar("R", bound=msgspec.Struct)

T = TypeVar("T")

FREE: Final[Bytes] = 64 * 1024
"""A body up to this size is always read, and is decoded on the event loop: the number of
connections is bounded, and decoding the worst such body takes 5 ms."""
_SLICE: Final[Bytes] = 1 << 20
"""Bytes decompressed at once; the total is checked in between."""
_SETTLED: Final[Seconds] = 1.0
"""Seconds from the release of the last large body until memory is given back to the system."""
_MOST_WAITING: Final = 256
"""Most large bodies that wait for the thread; most take milliseconds, the worst 1.5 s."""
_VALUE: Final[Bytes] = 40
"""Memory of a number in a decoded list: an object and its place in the list."""
_WIDEST: Final = 4
"""Bytes per character of a text with a character beyond the Basic Multilingual Plane."""


class RequestBody:
    """One request's body. `release` it when it is no longer needed; `with` does."""

    __slots__ = ("_data", "_reader", "_size", "tenant")

    def __init__(self, reader: BodyReader, tenant: str = "") -> None:
        self._reader = reader
        self.tenant = tenant
        self._size: Bytes = 0
        self._data: bytes | None = None

    def __enter__(self) -> RequestBody:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    @property
    def size(self) -> Bytes:
        """Bytes counted for it."""
        return self._size

    @property
    def data(self) -> bytes:
        """The decompressed bytes; not available after `decode`."""
        assert self._data is not None, "decoded or released"
        return self._data

    async def look(self, function: Callable[[bytes], T]) -> T:
        """Returns `function` of the bytes; calls it off the event loop if there are many.

        Errors: those of `function`, `Overloaded`.
        """
        data = self.data
        if len(data) <= FREE:
            return function(data)
        return await self._reader.work(lambda: function(data), self.tenant)

    async def decode(self, decoder: RequestDecoder[R], *, strict: bool) -> Decoded[R]:
        """Returns the typed request. Its bytes are dropped, and its decoded size is counted
        instead.

        Errors: `InvalidRequest`, `Overloaded`.
        """
        data = self.data
        if len(data) <= FREE:
            self._data = None
            return decoder.decode(data, strict=strict)
        reader = self._reader
        # One body at a time is decoded, because its bytes and the decoded request both count then.
        async with reader.turn(self.tenant):
            becomes = await reader.in_thread(decoded_size, data)
            self.holds(len(data) + becomes)
            decoded = await reader.in_thread(lambda: decoder.decode(data, strict=strict))
        self._data = None
        self.holds(becomes)
        return decoded

    def holds(self, size: Bytes) -> None:
        """Counts `size` bytes for it from now on.

        Errors: `Overloaded`; then nothing has changed.
        """
        if size > self._size:
            self._reader.check_room(size - self._size, beside=self._size)
        self._reader.count(size - self._size)
        self._size = size

    def keep(self, data: bytes) -> None:
        """Stores the decompressed body. Errors: `Overloaded`."""
        self.holds(len(data) if len(data) > FREE else 0)
        self._data = data

    def keep_only(self, most: Bytes) -> None:
        """Drops the bytes; from now on at most `most` bytes are counted for the decoded form."""
        self._data = None
        self.holds(min(self._size, most))

    def release(self) -> None:
        """Drops the bytes and ends the counting. Idempotent."""
        self._data = None
        self._reader.count(-self._size)
        self._size = 0


class BodyReader:
    """Reads bodies for one frontend. Used on the event loop's thread."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._turns = FairSemaphore(
            1,
            _MOST_WAITING,
            lambda: self._crowded("too many large request bodies wait to be decoded"),
            time.monotonic,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdserve-body")
        self._jobs: set[asyncio.Future[Any]] = set()
        self.buffered: Bytes = 0
        """Bytes of all bodies and their decoded forms, except those up to `FREE`."""
        self._trimmer = MemoryTrimmer(self._give_back)
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, call: HttpRequest) -> RequestBody:
        """Returns the whole body; it is released with the call, if not before.

        Errors: `PayloadTooLarge`, `Overloaded`, `RequestTimeout`; `InvalidRequest` for broken
        framing or compression; `ConnectionResetError` when the client has disconnected.
        """
        request = call.http
        encoding = _encoding(request.headers.get("Content-Encoding"))
        declared = request.content_length
        if declared is not None and declared > self._config.max_body:
            raise self._too_large()
        body = call.body = RequestBody(self, "" if call.key is None else call.key.tenant)
        try:
            data = await self._receive(request, body)
        except (RequestPayloadError, PayloadEncodingError) as error:
            raise InvalidRequest(f"the body cannot be read: {_words(error)}") from None
        if encoding in ENCODINGS:
            data = await self._unpack(data, encoding, body)
        body.keep(data)
        return body

    async def work(self, function: Callable[[], T], tenant: str = "") -> T:
        """Calls `function` in the thread when it is the tenant's turn; returns its result.

        Errors: `Overloaded` if too many wait, and those of `function`.
        """
        async with self.turn(tenant):
            return await self.in_thread(function)

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Reserves the thread for the tenant. Errors: `Overloaded` if too many wait."""
        return self._turns.of(tenant)

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Calls `function(*args)` in the thread, within a turn. Cancellation: the call ends and its
        result is dropped before the next turn begins."""
        job = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await job

    def count(self, more: Bytes) -> None:
        """Counts `more` bytes; they may be negative."""
        if more:
            self.buffered += more
            self._trimmer.held(self.buffered)

    def _give_back(self) -> None:
        """Schedules giving memory back to the system: the last body's decoded form is freed after
        its release."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_SETTLED, self._trim)

    def _trim(self) -> None:
        job = asyncio.get_running_loop().run_in_executor(self._thread, malloc_trim)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def check_room(self, more: Bytes, beside: Bytes) -> None:
        """Checks that `more` bytes fit. A single body always fits, because it has a limit of its
        own. `beside`: bytes counted for the same body already. Errors: `Overloaded`."""
        others = self.buffered - beside
        if others and self.buffered + more > self._config.max_buffered:
            raise self._crowded("too many request bodies are being received or prepared")

    async def close(self) -> None:
        """Ends the thread; waiting work is cancelled. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._jobs:
            await asyncio.wait(tuple(self._jobs))

    # ------------------------------------------------------------------ arrival

    async def _receive(self, request: web.BaseRequest, body: RequestBody) -> bytes:
        if request.content.is_eof():
            data = request.content.read_nowait(-1)
            if len(data) > self._config.max_body:
                raise self._too_large()
            return data
        try:
            async with asyncio.timeout(self._config.body_timeout):
                return await self._gather(request, body)
        except TimeoutError:
            raise RequestTimeout(
                f"the body did not arrive within {self._config.body_timeout:g} s"
            ) from None

    async def _gather(self, request: web.BaseRequest, body: RequestBody) -> bytes:
        """Reads the body. Counts the bytes that arrived, not the announced length, so that
        announcements alone do not block other requests."""
        if request.headers.get("Expect", "").lower() == "100-continue":
            transport = connection_of(request).transport
            assert transport is not None
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = 0
        while part := await request.content.readany():
            parts.append(part)
            size += len(part)
            if size > self._config.max_body:
                raise self._too_large()
            if size > FREE:
                body.holds(size)
        return b"".join(parts)

    # ------------------------------------------------------------------ unpacking

    async def _unpack(self, packed: bytes, encoding: str, body: RequestBody) -> bytes:
        unpacker = Decompressor(encoding, packed)
        try:
            if len(packed) <= FREE and (whole := _unpack_small(unpacker)) is not None:
                return whole
            # One body at a time is unpacked, so that at most one is held half unpacked.
            async with self.turn(body.tenant):
                return await self._unpack_large(Decompressor(encoding, packed), body)
        except BadCompression:
            raise InvalidRequest(
                f"the body cannot be read: it is not valid {encoding}, or not whole; send it "
                "again, or without Content-Encoding"
            ) from None

    async def _unpack_large(self, unpacker: Decompressor, body: RequestBody) -> bytes:
        parts: list[bytes] = []
        size, packed = 0, body.size
        while part := await self.in_thread(unpacker.piece, _SLICE):
            parts.append(part)
            size += len(part)
            if size > self._config.max_body:
                raise self._too_large()
            body.holds(packed + size)
        return b"".join(parts)

    # ------------------------------------------------------------------ refusals

    def _crowded(self, what: str) -> Overloaded:
        return Overloaded(what, retry_after=self._config.retry_after)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._config.max_body} bytes")


def decoded_size(data: bytes) -> Bytes:
    """Upper bound of the memory of a decoded body: its text and its lists of numbers."""
    wide = not data.isascii() or b"\\u" in data
    return len(data) * (_WIDEST if wide else 1) + _VALUE * min(data.count(b","), MAX_VALUES)


def _unpack_small(unpacker: Decompressor) -> bytes | None:
    """Decompresses a small body; None if it is not small."""
    parts: list[bytes] = []
    left = FREE
    while part := unpacker.piece(left):
        parts.append(part)
        left -= len(part)
        if not left:
            return None
    return b"".join(parts)


def _encoding(header: str | None) -> str:
    """The compression to undo. Errors: `InvalidRequest` for an unsupported one."""
    encoding = "identity" if header is None else header.lower()
    if encoding not in ENCODINGS and encoding != "identity":
        raise InvalidRequest(
            "the body's Content-Encoding is not understood; send gzip, deflate or none"
        )
    return encoding


def _words(error: Exception) -> str:
    """aiohttp's message, without the status before it."""
    text = " ".join(str(getattr(error, "message", "") or error).split())
    return text.removeprefix("400, message: ")
