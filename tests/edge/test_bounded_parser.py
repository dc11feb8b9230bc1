"""Nothing that is no body is held without a bound, whatever its shape."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.edge.bounded_parser import (
    FREE,
    HEAD,
    PIECE,
    BoundedParser,
    FramingBudget,
    TooMuchFraming,
)

GET = b"GET /live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LINE = 8190


class Connection:
    """What aiohttp's parser wants of its protocol, and a client that answers when it likes."""

    def __init__(self, room: FramingBudget | None = None) -> None:
        loop: Any = SimpleNamespace(create_future=None)
        self.paused = False
        self.connected = True
        parser = HttpRequestParser(
            self,  # type: ignore[arg-type]
            loop,
            1 << 20,
            max_line_size=LINE,
            max_field_size=LINE,
            max_headers=100,
            auto_decompress=False,
            max_msg_queue_size=32,
        )
        self.room = room or FramingBudget()
        self.answering = False
        self.intake = BoundedParser(parser, self.room, lambda: not self.answering, LINE)
        self.found: list[Any] = []

    def pause_reading(self) -> None: ...
    def resume_reading(self, resume_parser: bool = True) -> None: ...

    def feed(self, data: bytes) -> None:
        self.found += self.intake.feed_data(data)[0]

    def feed_until_refused(self, data: bytes, most: int) -> int:
        """Bytes of `data`, again and again, that were taken before the refusal."""
        taken = 0
        while taken < most:
            try:
                self.feed(data)
            except HttpProcessingError:
                break
            if self.intake.refused:
                break
            taken += len(data)
        assert self.intake.refused, f"{taken} bytes were taken"
        assert self.room.held == 0
        assert not self.intake.partial
        return taken


ENDLESS = [
    ("header lines", GET, b"a: b\r\n" * 50),
    ("large header lines", GET, b"a: " + b"x" * 4000 + b"\r\n"),
    ("one header line", GET + b"a: ", b"x" * 1000),
    ("a request line", b"GET /", b"x" * 1000),
    ("empty lines before a request", b"", b"\r\n" * 500),
    ("zeros before a chunk's size", CHUNKED, b"0" * 1000),
    ("a chunk's extension", CHUNKED + b"1;", b"x" * 1000),
    ("extensions of many chunks", CHUNKED, b"1;" + b"x" * 500 + b"\r\na\r\n"),
    ("trailers", CHUNKED + b"0\r\n", b"a: b\r\n" * 50),
    ("tiny chunks", CHUNKED, b"1\r\na\r\n" * 100),
]


@pytest.mark.parametrize(
    ("begin", "more"), [case[1:] for case in ENDLESS], ids=[c[0] for c in ENDLESS]
)
def test_what_never_ends_is_refused_soon(begin, more):
    connection = Connection()
    connection.feed(begin)
    assert connection.feed_until_refused(more, 16 * HEAD) <= 4 * HEAD
    connection.feed(b"x" * 100_000)  # taken, and forgotten
    assert connection.intake.waiting == 0


def test_a_head_of_many_large_lines_is_bounded_as_a_whole():
    connection = Connection()
    connection.feed(GET)
    lines = [b"a: " + b"x" * 8000 + b"\r\n"] * 9
    for line in lines[:-1]:
        connection.feed(line)
    with pytest.raises(TooMuchFraming, match="the head of a request is larger than 65536 bytes"):
        connection.feed(lines[-1])


def test_an_ordinary_head_counts_for_nothing():
    connection = Connection()
    connection.feed(GET + b"Cookie: " + b"x" * 4000)
    assert connection.intake.partial
    assert connection.room.held == 0
    connection.feed(b"\r\n\r\n")
    assert len(connection.found) == 1
    assert not connection.intake.partial


def test_large_heads_share_a_bound_that_keeps_no_ordinary_one_out():
    room = FramingBudget(limit=80_000)
    large = [Connection(room) for _ in range(3)]
    head = GET + b"".join(b"h%d: %s\r\n" % (n, b"x" * 4000) for n in range(10))
    for connection in large[:2]:
        connection.feed(head)
    assert 0 < room.held <= 80_000
    with pytest.raises(TooMuchFraming) as caught:
        large[2].feed(head)
    assert caught.value.crowded
    small = Connection(room)
    small.feed(GET + b"\r\n")
    assert len(small.found) == 1
    for connection in large[:2]:
        connection.feed(b"\r\n")
        assert len(connection.found) == 1
    assert room.held == 0


def test_later_requests_wait_unparsed_and_counted():
    connection = Connection(FramingBudget(limit=300_000))
    connection.feed(GET + b"\r\n")
    connection.answering = True
    for _ in range(4):
        connection.feed((GET + b"\r\n") * 1000)
    assert len(connection.found) == 1
    assert connection.room.held == connection.intake.waiting - FREE > 100_000
    connection.answering = False
    while connection.intake.waiting:
        connection.feed(b"")
    assert connection.room.held == 0


def test_more_than_fits_behind_an_answer_is_dropped_with_what_follows():
    connection = Connection(FramingBudget(limit=10_000))
    connection.feed(GET + b"\r\n")
    connection.answering = True
    connection.feed((GET + b"\r\n") * 1000)
    assert connection.intake.refused
    assert connection.room.held == connection.intake.waiting == 0


def test_an_upgrade_is_not_made_and_what_follows_is_parsed():
    connection = Connection()
    ask = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    connection.feed(ask + GET + b"\r\n")
    connection.feed(b"")
    assert [message.path for message, _ in connection.found] == ["/live", "/live"]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3 * PIECE), max_size=3),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
)
def test_requests_come_out_as_they_went_in_however_they_are_cut(sizes, cuts):
    sent = b"".join(
        b"%sContent-Length: %d\r\n\r\n%s" % (POST, size, b"x" * size)
        + CHUNKED
        + b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"y" * size)
        for size in sizes
    )
    connection = Connection()
    at = 0
    while at < len(sent):
        cut = cuts[at % len(cuts)]
        connection.feed(sent[at : at + cut])
        at += cut
    while connection.intake.waiting:
        connection.feed(b"")
    assert [body.total_bytes for _, body in connection.found] == [s for s in sizes for _ in "ab"]
    assert all(body.is_eof() for _, body in connection.found)
    assert not connection.intake.partial
    assert connection.room.held == 0
