"""Limits the bytes outside bodies that a client may send, while they arrive.

It stands in front of aiohttp's parser and counts *framing*: every byte that the parser takes and
that does not come out as part of a body (request lines, headers, trailers, chunk sizes and their
extensions, empty lines between requests). Framing has a limit per connection and one for all
connections together. The parser gets one piece at a time, none while a request is being answered,
and none after an error.

It does not parse, so it cannot disagree with the parser about where a request ends. Pure: it knows
neither sockets nor time. Owned by the connection, in place of its parser (`handler.py`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.streams import StreamReader

    from pdserve.ids import Bytes

__all__ = [
    "CLOSED",
    "FREE",
    "HEAD",
    "PIECE",
    "BoundedParser",
    "FramingBudget",
    "HttpParser",
    "TooMuchFraming",
]

HEAD: Final[Bytes] = 64 * 1024
"""Most framing bytes of one request: head, trailers, and chunk sizes beyond the chunks' own bytes.
Proxies allow 8 to 32 KiB."""
PIECE: Final[Bytes] = 16 * 1024
"""Bytes handed to the parser at once. What it makes of one piece is a few times as large."""
FREE: Final[Bytes] = 8 * 1024
"""Framing bytes per connection that do not count against the total: nearly every head fits, so that
many large heads do not block ordinary requests."""
_ROOM: Final[Bytes] = 32 << 20

_Message = tuple[Any, Any]
_Found = tuple["Sequence[_Message]", bool, bytes]
_NOTHING: Final[_Found] = ((), False, b"")


class HttpParser(Protocol):
    """The part of aiohttp's parser that its connection uses."""

    def feed_data(self, data: bytes, /) -> Any: ...
    def set_upgraded(self, val: bool, /) -> None: ...
    def message_consumed(self) -> None: ...
    def pause_reading(self) -> None: ...


class TooMuchFraming(BadHttpMessage):
    """More framing than one request, or all connections together, may have."""

    def __init__(self, message: str, *, crowded: bool = False) -> None:
        super().__init__(message)
        self.crowded = crowded
        """True if the total is used up; a retry may help."""


class FramingBudget:
    """Unanswered framing of all connections, beyond what each may have."""

    def __init__(self, limit: Bytes = _ROOM) -> None:
        self.limit = limit
        self.held: Bytes = 0

    def change(self, by: Bytes) -> bool:
        """Adds `by` bytes, which may be negative; False if the total is exceeded."""
        self.held += by
        return by <= 0 or self.held <= self.limit


class BoundedParser:
    """One connection's parser within limits."""

    __slots__ = (
        "_at",
        "_body",
        "_body_seen",
        "_counted",
        "_framing",
        "_limit",
        "_may_parse",
        "_parser",
        "_room",
        "_waiting",
        "refused",
        "waiting",
    )

    def __init__(
        self,
        parser: HttpParser,
        room: FramingBudget,
        may_parse: Callable[[], bool],
        max_line: Bytes,
    ) -> None:
        """`may_parse` returns True if no parsed request is unanswered and the newest body is not
        paused."""
        self._parser = parser
        self._room = room
        self._may_parse = may_parse
        self._limit = max(HEAD, 2 * max_line)
        self._waiting: deque[bytes] = deque()
        # Number of bytes of the first waiting piece that are parsed.
        self._at = 0
        self._body: StreamReader | None = None
        self._body_seen: Bytes = 0
        self._framing: Bytes = 0
        self._counted: Bytes = 0
        self.waiting: Bytes = 0
        """Bytes that have arrived and are not parsed."""
        self.refused = False
        """True once nothing more is parsed; the connection ends with the answer that is due."""

    @property
    def partial(self) -> bool:
        """True if bytes of an incomplete request have arrived."""
        return self._framing > 0 or self.waiting > 0

    def feed_data(self, data: bytes) -> _Found:
        """Takes `data` and parses as much as allowed; with empty `data`, continues.

        Errors: `HttpProcessingError`, the parser's own or `TooMuchFraming`; then it takes nothing
        more.
        """
        if self.refused:
            return _NOTHING
        if data:
            self._waiting.append(data)
            self.waiting += len(data)
        try:
            found = self._parse_on(resume=not data)
            self._count(bool(found) or not self._may_parse())
        except HttpProcessingError:
            self.drop()
            raise
        return found, False, b""

    def drop(self) -> None:
        """Drops what has arrived and takes nothing more. Idempotent."""
        self.refused = True
        self._waiting.clear()
        self.waiting = self._framing = 0
        self._room.change(-self._counted)
        self._counted = 0

    def message_consumed(self) -> None:
        self._parser.message_consumed()

    def pause_reading(self) -> None:
        self._parser.pause_reading()

    def set_upgraded(self, val: bool) -> None:
        """Does nothing: an upgrade is never accepted, and the bytes after its request are
        parsed."""

    # ------------------------------------------------------------------ inside

    def _parse_on(self, resume: bool) -> Sequence[_Message]:
        found: Sequence[_Message] = ()
        if resume and self._may_parse():
            # The parser may have paused within a piece.
            found = self._parse(b"")
        while not found and self._waiting and self._may_parse():
            found = self._parse(self._next_piece())
        return found

    def _next_piece(self) -> bytes:
        data, begin = self._waiting[0], self._at
        self._at += PIECE
        if self._at >= len(data):
            self._waiting.popleft()
            self._at = 0
        piece = data[begin : begin + PIECE]
        self.waiting -= len(piece)
        return piece

    def _parse(self, piece: bytes) -> Sequence[_Message]:
        found, upgraded, tail = self._parser.feed_data(piece)
        if upgraded:
            self._parser.set_upgraded(False)
            self._put_back(tail)
        self._account(len(piece) - len(tail), found)
        return found  # type: ignore[no-any-return]  # the parser is not typed

    def _put_back(self, tail: bytes) -> None:
        if not tail:
            return
        if self._at:
            self._waiting[0] = self._waiting[0][self._at :]
            self._at = 0
        self._waiting.appendleft(tail)
        self.waiting += len(tail)

    def _account(self, taken: Bytes, found: Sequence[_Message]) -> None:
        """Accounts for what the parser found. A complete head belongs to its request and no longer
        counts. A body pays for as much framing as it has bytes, so only chunks of less than five
        bytes use the connection's own allowance."""
        if found:
            self._framing = 0
            self._body = found[-1][1]
            self._body_seen = self._body.total_bytes
        elif self._body is None:
            self._framing += taken
        else:
            news = self._body.total_bytes - self._body_seen
            self._body_seen += news
            self._framing = max(0, self._framing + taken - news)
        self._check()

    def _check(self) -> None:
        body = self._body
        if body is None:
            if self._framing > self._limit:
                raise TooMuchFraming(f"the head of a request is larger than {self._limit} bytes")
        elif body.is_eof():
            self._body, self._framing = None, 0
        elif body.exception() is not None:
            self.drop()
        elif self._framing > self._limit + self._body_seen and self._may_parse():
            body.set_exception(RequestPayloadError(_TOO_MUCH_IN_BODY))
            self.drop()

    def _count(self, answering: bool) -> None:
        """Updates this connection's share of the total."""
        holds = max(0, self.waiting + self._framing - FREE)
        by, self._counted = holds - self._counted, holds
        if not by or self._room.change(by):
            return
        if not answering:
            raise TooMuchFraming(
                "too many large heads of requests are being received", crowded=True
            )
        self.drop()


_TOO_MUCH_IN_BODY: Final = "its chunk sizes, extensions and trailers are larger than its content"


class _NoParser:
    """The parser of a connection that is gone."""

    def feed_data(self, data: bytes, /) -> _Found:
        return _NOTHING

    def set_upgraded(self, val: bool, /) -> None: ...
    def message_consumed(self) -> None: ...
    def pause_reading(self) -> None: ...


CLOSED: Final = BoundedParser(_NoParser(), FramingBudget(), lambda: False, 0)
"""The intake of a connection that is gone: it takes nothing."""
CLOSED.refused = True
