"""HTTP framing and flow control of a stream, over a connection that only records."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import HttpVersion10, HttpVersion11

from pdserve.frontend.http.sse_response import Flusher, SseWriter


class Connection:
    """What a wire needs of a connection; keeps what is written."""

    def __init__(self):
        self.transport = self
        self.paused_since = None
        self.wire: Any = None
        self.busy = True
        self.writes = []
        self.cut_for = None

    def is_closing(self):
        return False

    def write(self, data):
        self.writes.append(bytes(data))

    def cut(self, reason):
        self.cut_for = reason
        self.wire.detach()

    async def wait_writable(self):
        pass


@pytest.fixture
def connection():
    return Connection()


def wire(connection, version=HttpVersion11, limit=100):
    request: Any = SimpleNamespace(protocol=connection, version=version, keep_alive=True)
    return SseWriter(request, b"x-a: b\r\n", limit, Flusher(asyncio.get_running_loop()))


async def test_one_turn_of_the_loop_is_one_write(connection):
    stream = wire(connection)
    stream.begin()
    stream.write(b"data: role\n\n")
    stream.write_parts(b"data: ", b"x", b"\n\n")
    assert connection.writes == []
    await asyncio.sleep(0)
    (data,) = connection.writes
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
    assert b"Transfer-Encoding: chunked" in head
    assert b"x-a: b" in head
    assert body == b"c\r\ndata: role\n\n\r\n9\r\ndata: x\n\n\r\n"
    stream.write_parts(b"a", b"b", b"c")
    await asyncio.sleep(0)
    assert connection.writes[1:] == [b"3\r\nabc\r\n"]


@pytest.mark.parametrize("size", [1, 15, 16, 255, 4093, 4094, 5000])
async def test_sizes_of_chunks_are_hexadecimal_however_long(connection, size):
    stream = wire(connection)
    stream.write_parts(b"h", b"x" * size, b"t")
    stream.flush()
    assert connection.writes == [b"%x\r\nh%bt\r\n" % (size + 2, b"x" * size)]


async def test_an_empty_write_does_not_end_the_body(connection):
    stream = wire(connection)
    stream.write(b"")
    stream.flush()
    assert connection.writes == []


async def test_http_1_0_has_no_framing_and_no_second_request(connection):
    stream = wire(connection, HttpVersion10)
    stream.begin()
    stream.write_parts(b"a", b"b", b"c")
    stream.end(b"z")
    reply = await stream.reply()
    data = b"".join(connection.writes)
    assert b"chunked" not in data
    assert b"Connection: close" in data
    assert data.endswith(b"\r\n\r\nabcz")
    assert reply.keep_alive is False


async def test_the_end_is_the_last_chunk(connection):
    stream = wire(connection)
    stream.end(b"data: [DONE]\n\n")
    reply = await stream.reply()
    assert b"".join(connection.writes) == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert reply.keep_alive
    assert connection.busy is False


async def test_a_pause_is_passed_on_and_a_resume_calls_back(connection):
    stream, resumed = wire(connection), []
    stream.on_resume(lambda: resumed.append(stream.paused))
    stream.pause()
    assert stream.paused
    stream.resume()
    assert resumed == [False]


async def test_holding_more_than_the_limit_cuts_the_connection(connection):
    stream = wire(connection, limit=10)
    stream.hold(10)
    assert connection.cut_for is None
    stream.hold(1)
    assert connection.cut_for == "write buffer full"
    stream.write(b"lost")  # and what comes after goes nowhere
    stream.flush()
    assert connection.writes == []


async def test_a_stream_that_begins_on_a_slow_connection_is_paused(connection):
    connection.paused_since = 5.0
    assert wire(connection).paused


async def test_a_connection_that_is_gone_cannot_be_streamed_to(connection):
    connection.transport = None
    with pytest.raises(ConnectionResetError):
        wire(connection)
