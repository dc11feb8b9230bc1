"""Bounds what a client may send that is no body, while it arrives.

Stands in front of aiohttp's parser and counts: every byte that the parser takes and that does not
come out as part of a body is *framing*: request lines, headers, trailers, chunk sizes and their
extensions, empty lines between requests. Framing has a bound per connection and one over all
connections, whatever its shape. The parser gets one piece at a time, and none while a request is
being answered; after an error it gets nothing any more.

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
    "FREE",
    "HEAD",
    "PIECE",
    "BoundedParser",
    "FramingBudget",
    "HttpParser",
    "TooMuchFraming",
]

HEAD: Final[Bytes] = 64 * 1024
"""Framing of one request: its head, its trailers, its chunks' sizes as far as they are more than
the chunks. Proxies allow 8 to 32 KiB."""
PIECE: Final[Bytes] = 16 * 1024
"""Handed to the parser at once. All it makes of one piece is a few times as much."""
FREE: Final[Bytes] = 8 * 1024
"""Of each connection, not counted over all: nearly every head fits, so that a crowd of large ones
keeps no ordinary request out."""
_ROOM: Final[Bytes] = 32 << 20

_Message = tuple[Any, Any]
_Found = tuple["Sequence[_Message]", bool, bytes]
_NOTHING: Final[_Found] = ((), False, b"")


class HttpParser(Protocol):
    """aiohttp's parser, as far as its connection uses it."""

    def feed_data(self, data: bytes, /) -> Any: ...
    def set_upgraded(self, val: bool, /) -> None: ...
    def message_consumed(self) -> None: ...
    def pause_reading(self) -> None: ...


class TooMuchFraming(BadHttpMessage):
    """More than one request may have, or more than all may hold together."""

    def __init__(self, message: str, *, crowded: bool = False) -> None:
        super().__init__(message)
        self.crowded = crowded
        """Others hold the room; asking again may help."""


class FramingBudget:
    """What all connections hold of unanswered framing, beyond what each may have."""

    def __init__(self, limit: Bytes = _ROOM) -> None:
        self.limit = limit
        self.held: Bytes = 0

    def change(self, by: Bytes) -> bool:
        """Count `by` bytes more or fewer; False if that is too much."""
        self.held += by
        return by <= 0 or self.held <= self.limit


class BoundedParser:
    """One connection's parser, behind bounds."""

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
        """`may_parse`: nothing that was found is unanswered, and the newest body is not paused."""
        self._parser = parser
        self._room = room
        self._may_parse = may_parse
        self._limit = max(HEAD, 2 * max_line)
        self._waiting: deque[bytes] = deque()
        self._at = 0  # so much of the first is parsed
        self._body: StreamReader | None = None
        self._body_seen: Bytes = 0
        self._framing: Bytes = 0
        self._counted: Bytes = 0
        self.waiting: Bytes = 0
        """Bytes that have come and are not parsed."""
        self.refused = False
        """Nothing is parsed any more; the connection ends with the answer that is due."""

    @property
    def partial(self) -> bool:
        """Something has come that is no whole request yet."""
        return self._framing > 0 or self.waiting > 0

    def feed_data(self, data: bytes) -> _Found:
        """Take `data`, and parse as much as may be; empty `data` goes on where that ended.

        Errors: `HttpProcessingError`, the parser's own or `TooMuchFraming`; then nothing is taken
        any more.
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
        """Forget what has come, and take nothing any more. Idempotent."""
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
        """Nothing: an upgrade is never accepted, and what follows its request is parsed."""

    # ------------------------------------------------------------------ inside

    def _parse_on(self, resume: bool) -> Sequence[_Message]:
        found: Sequence[_Message] = ()
        if resume and self._may_parse():
            found = self._parse(b"")  # it may have been paused within a piece
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
        """A whole head is the request's, not framing that waits; a body pays for as much framing
        as it has bytes, so that only chunks of less than five bytes need the connection's own."""
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
        """Tell all connections' room what this one holds."""
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
