"""The edge: what a connection may hold, how long it may take, and what broken HTTP gets."""

import asyncio
import contextlib
import functools
import json
import re
import socket
import tracemalloc
from typing import Any

import pytest

from pdserve.frontend import service as service_module
from pdserve.frontend.http import connection as connection_module
from tests.frontend.support import (
    HELLO,
    frontend,
    http,
    raw_connection,
    read_answer,
    tokens,
    until,
)
from tests.support.fake_backend import Script

CHAT = "/v1/chat/completions"
BODY = json.dumps(HELLO).encode()


@pytest.fixture
def quick_sweep(monkeypatch):
    monkeypatch.setattr(service_module, "SWEEP", 0.02)


def cut(client, reason):
    return client.service.metrics.connections_cut.labels(reason).value


async def test_accepted_sockets_send_at_once():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", "/live"))
        await read_answer(reader)
        (connection,) = client.service._server._open
        assert connection.socket is not None
        sock = connection.socket.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_connection_serves_many_requests_also_pipelined():
    script = Script(tokens=tokens("ab"))
    async with frontend(script) as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", "/live") * 50)
        writer.write(http("POST", CHAT, json.dumps(HELLO | {"max_tokens": 2}).encode()))
        for _ in range(50):
            assert (await read_answer(reader))[0] == 200
        status, _, body = await read_answer(reader)
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == "ab"


async def test_http_1_0_gets_an_unframed_stream_and_a_close():
    script = Script(tokens=tokens("ab"))
    async with frontend(script) as client, raw_connection(client) as (reader, writer):
        body = json.dumps(HELLO | {"max_tokens": 2, "stream": True}).encode()
        writer.write(http("POST", CHAT, body, version="HTTP/1.0"))
        answer = (await reader.read()).decode()
    head, _, events = answer.partition("\r\n\r\n")
    assert "chunked" not in head
    assert "Connection: close" in head
    assert events.endswith("data: [DONE]\n\n")


async def test_http_1_0_may_keep_its_connection_for_whole_answers():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        for _ in range(2):
            writer.write(
                http("GET", "/live", headers="Connection: keep-alive\r\n", version="HTTP/1.0")
            )
            assert "Connection: keep-alive" in (await read_answer(reader))[1]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
)
async def test_what_is_not_http_gets_a_400_in_openais_shape(raw):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(raw)
        async with asyncio.timeout(20):
            status, head, body = await read_answer(reader)
            assert await reader.read() == b""
    assert status == 400
    assert "x-request-id" in head
    assert json.loads(body)["error"]["message"].startswith("not valid HTTP")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 9000 + b"\r\n\r\n",
            "not valid HTTP: a line of the request's head is longer than 8190 bytes",
        ),
        (
            b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            "not valid HTTP: a line of the request's head is longer than 8190 bytes",
        ),
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "not valid HTTP: HTTP/2 is not spoken here; use HTTP/1.1",
        ),
        (b"NONSENSE\r\n\r\n", "not valid HTTP: Invalid method encountered"),
    ],
)
async def test_a_refusal_of_the_parser_reads_as_a_sentence(raw, message):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(raw)
        async with asyncio.timeout(20):
            _, _, body = await read_answer(reader)
    assert json.loads(body)["error"]["message"] == message


async def test_a_broken_body_is_told_to_the_client_not_to_the_log(caplog):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Transfer-Encoding: chunked\r\n") + b"zz\r\n")
        assert (await read_answer(reader))[0] == 400
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    assert "Traceback" not in caplog.text


async def test_slow_headers_are_cut(quick_sweep):
    async with frontend(header_timeout=0.1) as client:
        async with raw_connection(client) as (reader, writer):
            writer.write(http("GET", "/live"))
            await read_answer(reader)
            await asyncio.sleep(0.15)  # idle is no crime
            writer.write(b"GET /live HTTP/1.1\r\n")
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert cut(client, "slow headers") == 1


async def test_the_rest_of_a_body_that_nobody_wanted_is_no_slow_head(quick_sweep):
    async with frontend(header_timeout=0.1) as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", "/nowhere", headers="Content-Length: 10\r\n") + b"12345")
        assert (await read_answer(reader))[0] == 404
        writer.write(b"67890")
        await asyncio.sleep(0.3)
        writer.write(http("POST", "/tokenize", b"x" * 300_000))
        assert (await read_answer(reader))[0] == 400
        await asyncio.sleep(0.3)
        writer.write(http("GET", "/live"))
        assert (await read_answer(reader))[0] == 200
        assert cut(client, "slow headers") == 0


async def test_a_fault_in_the_sweep_does_not_end_it(quick_sweep, monkeypatch, caplog):
    async with frontend(header_timeout=0.1) as client:
        sweep = client.service._server.sweep

        def fault(now):
            monkeypatch.setattr(client.service._server, "sweep", sweep)
            raise RuntimeError("not foreseen")

        monkeypatch.setattr(client.service._server, "sweep", fault)
        await until(lambda: "not foreseen" in caplog.text)
        async with raw_connection(client) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\n")
            assert await ended(reader)
        assert cut(client, "slow headers") == 1


async def test_idle_connections_are_closed_quietly():
    async with frontend(keepalive_timeout=0.1) as client:
        async with raw_connection(client) as (reader, _), asyncio.timeout(20):
            assert await reader.read() == b""
        await until(lambda: client.service._server.open_connections == 0)


def accepted(server, number):
    return server.accepted >= number


async def idle_from(client, address, number, stack):
    """Silent connections from one address, oldest first."""
    server, found = client.service._server, []
    for _ in range(number):
        seen = server.accepted + 1
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", client.service.port, local_addr=(address, 0)
        )
        stack.callback(writer.close)
        await until(functools.partial(accepted, server, seen))
        found.append(reader)
    return found


async def ended(reader):
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            return await reader.read() == b""
    return True


async def test_a_newcomer_ends_the_oldest_idle_connection_of_the_busiest_host():
    async with frontend(max_connections=6) as client, contextlib.AsyncExitStack() as stack:
        (quiet,) = await idle_from(client, "127.0.0.2", 1, stack)
        busiest = await idle_from(client, "127.0.0.3", 5, stack)
        await idle_from(client, "127.0.0.4", 1, stack)
        assert await ended(busiest[0])
        await idle_from(client, "127.0.0.3", 30, stack)  # only ends its own
        reader, writer = await stack.enter_async_context(raw_connection(client))
        writer.write(http("GET", "/live"))
        assert (await read_answer(reader))[0] == 200
        assert not quiet.at_eof()
        assert client.service._server.open_connections == 6
        assert cut(client, "evicted") == 32


async def test_who_watches_finds_a_place_while_all_others_work():
    script = Script(tokens=tokens("x"), hold_open=30.0)
    async with frontend(script, max_connections=4) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            _, writer = await stack.enter_async_context(raw_connection(client))
            writer.write(http("POST", CHAT, BODY))
        await until(lambda: client.service.active_requests == 3)
        await idle_from(client, "127.0.0.2", 9, stack)
        reader, writer = await stack.enter_async_context(raw_connection(client))
        for path in ("/live", "/health", "/metrics"):
            writer.write(http("GET", path))
            assert (await read_answer(reader))[0] == 200
        writer.write(http("POST", CHAT, BODY))
        status, head, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert "Retry-After" in head
        assert client.service.active_requests == 3


async def test_strangers_do_not_work(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "t"\n')
    file.chmod(0o600)
    limits = {"api_keys_file": file, "max_connections": 4}
    async with frontend(**limits) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(9):  # refused at once; what is left of the body is awaited for a while
            reader, writer = await stack.enter_async_context(raw_connection(client))
            writer.write(http("POST", CHAT, headers="Content-Length: 500\r\n") + b"{")
            assert (await read_answer(reader))[0] == 401
        assert client.service._server._working == 0
        reader, writer = await stack.enter_async_context(raw_connection(client))
        writer.write(http("POST", CHAT, BODY, "Authorization: Bearer sk-12345678\r\n"))
        assert (await read_answer(reader))[0] == 200


async def test_silence_before_the_first_byte_ends_with_the_header_timeout(quick_sweep):
    async with frontend(header_timeout=0.1) as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", "/live"))
        await read_answer(reader)
        async with raw_connection(client) as (silent, _):
            assert await ended(silent)
        assert cut(client, "silent") == 1
        writer.write(http("GET", "/live"))  # idle between requests is no crime
        assert (await read_answer(reader))[0] == 200


async def test_deadlines_of_connections_wait_for_no_model(quick_sweep, monkeypatch):
    async with frontend(header_timeout=0.1) as client:
        preparing = asyncio.Event()

        async def forever():
            preparing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(client.service._models, "prepare", forever)
        await preparing.wait()
        async with raw_connection(client) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\n")
            assert await ended(reader)
        assert cut(client, "slow headers") == 1


async def test_a_crowd_of_endless_heads_holds_next_to_nothing():
    """Measured once: 60 connections that sent header lines took 3.4 GB, and it was kept."""
    lines = b"a: b\r\n" * 10_000
    loop = asyncio.get_running_loop()
    async with frontend() as client, contextlib.AsyncExitStack() as stack:

        async def pour(begin):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", client.service.port))
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sock, begin)
                for _ in range(400):
                    await loop.sock_sendall(sock, lines)
                pytest.fail("24 MB of header lines were taken")

        heads = [b"GET / HTTP/1.1\r\n", b"", b"GET / HTTP/1.1\r\na: ", http("GET", "/live") * 99]
        tracemalloc.start()
        await asyncio.gather(*(pour(head) for head in heads * 6))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        await until(lambda: client.service._server.open_connections == 0)
        assert client.service._server.room.held == 0
        assert await client.chat(max_tokens=2)
    assert peak < 16 << 20, f"{peak >> 20} MiB"


async def test_places_of_gone_connections_are_free_again():
    async with frontend(max_connections=1) as client:
        for _ in range(5):
            async with raw_connection(client) as (reader, writer):
                writer.write(http("GET", "/live"))
                assert (await read_answer(reader))[0] == 200
            await until(lambda: client.service._server.open_connections == 0)


def slow_reader(client):
    """A socket with the smallest buffer that is going to read nothing yet."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.connect(("127.0.0.1", client.service.port))
    sock.setblocking(False)
    return sock


async def read_until(sock, end):
    raw = b""
    while not raw.endswith(end):
        part = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        assert part, "the connection was cut"
        raw += part
    return raw


async def flood(client, sock, **fields):
    """Start a long stream on `sock` and wait until the server has to hold it back."""
    body = json.dumps(HELLO | {"stream": True, "max_tokens": 4000} | fields).encode()
    await asyncio.get_running_loop().sock_sendall(sock, http("POST", CHAT, body))
    await until(lambda: client.backend.streams)
    (connection,) = client.service._server._open
    # The kernel would buffer megabytes; with a small send buffer the test's stream suffices.
    server = connection.socket.get_extra_info("socket")
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    connection.socket.set_write_buffer_limits(high=1024)
    return connection


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
async def test_a_slow_client_gets_everything_in_larger_pieces(fields):
    # One turn of the loop per token: the client falls behind, then reads all.
    text = "hello slow world "
    async with frontend(Script(tokens=tokens(text)), write_buffer=16 << 20) as client:
        sock = slow_reader(client)
        connection = await flood(client, sock, **fields)
        await until(lambda: client.backend.idle)
        assert connection.paused_since is not None
        async with asyncio.timeout(20):
            raw = await read_until(sock, b"[DONE]\n\n\r\n0\r\n\r\n")
        sock.close()
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    n = fields.get("n", 1)
    assert len(events) < 4000 * n
    expected = text * 4000
    for index in range(n):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        got = "".join(c["delta"].get("content", "") for c in parts)
        assert expected.startswith(got)
        assert parts[-1]["finish_reason"] == "length"
        if "logprobs" in fields:
            told = sum(len(c["logprobs"]["content"]) for c in parts if c["logprobs"])
            assert told == 4000


async def test_a_client_that_holds_too_much_is_cut():
    async with frontend(Script(tokens=tokens("hello world ")), write_buffer=100) as client:
        sock = slow_reader(client)
        await flood(client, sock)
        await until(lambda: client.service.active_requests == 0)
        assert cut(client, "write buffer full") == 1
        assert client.backend.idle
        sock.close()


async def test_a_connection_is_cut_once_however_many_choices_overflow(caplog):
    script = Script(tokens=tokens("hello world "), burst=50)
    async with frontend(script, write_buffer=100) as client:
        sock = slow_reader(client)
        await flood(client, sock, n=16)
        await until(lambda: client.service.active_requests == 0)
        assert cut(client, "write buffer full") == 1
        sock.close()
    assert len([line for line in caplog.messages if "connection cut" in line]) == 1


async def test_a_client_that_reads_nothing_is_cut_after_a_while(quick_sweep):
    async with frontend(Script(tokens=tokens("hello world ")), write_stall_timeout=0.1) as client:
        sock = slow_reader(client)
        await flood(client, sock)
        await until(lambda: client.service.active_requests == 0)
        assert cut(client, "does not read") == 1
        assert client.backend.idle
        sock.close()


async def test_a_stream_out_of_time_frees_its_work_before_its_client_has_read():
    # The end of the stream waits for the client; the engine must neither go on meanwhile, nor say
    # anything behind the end of the body, where the next answer on the connection begins.
    text = "hello world "
    config: dict[str, Any] = {"write_buffer": 16 << 20, "request_timeout": 1.0}
    async with frontend(Script(tokens=tokens(text), interval=0.001), **config) as client:
        sock = slow_reader(client)
        connection = await flood(client, sock)
        await until(lambda: connection.wire is not None and connection.wire.ended)
        assert connection.paused_since is not None
        assert client.service.active_requests == 1
        assert client.backend.idle
        async with asyncio.timeout(20):
            raw = await read_until(sock, b"\r\n0\r\n\r\n")
        assert b"longer than 1 s" in raw.rsplit(b"data: ", 1)[1]
        await asyncio.get_running_loop().sock_sendall(sock, http("GET", "/live"))
        async with asyncio.timeout(20):
            live = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        assert live.startswith(b"HTTP/1.1 200 ")
        sock.close()


async def test_a_slow_but_steady_client_gets_a_large_answer(monkeypatch):
    # The sweep is done by hand, at times of its own.
    monkeypatch.setattr(connection_module, "STEADY", 4096)
    script = Script(tokens=tokens("hello world "), burst=100)
    async with frontend(script, write_stall_timeout=60.0) as client:
        sock = slow_reader(client)
        fields = {"stream": False, "logprobs": True, "max_tokens": 2000}
        connection = await flood(client, sock, **fields)
        await until(lambda: connection.paused_since is not None)
        now = began = asyncio.get_running_loop().time()
        raw, unread = b"", connection.socket.get_write_buffer_size()
        connection.sweep(now, client.service.config)
        async with asyncio.timeout(20):
            while connection.paused_since is not None:
                part = await asyncio.get_running_loop().sock_recv(sock, 1 << 14)
                assert part, "the connection was cut"
                raw += part
                if connection.socket.get_write_buffer_size() <= unread - 4096:
                    unread = connection.socket.get_write_buffer_size()
                    now += 50.0
                    connection.sweep(now, client.service.config)
        assert now - began > 500.0
        head, _, body = raw.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"Content-Length: (\d+)", head)
        async with asyncio.timeout(20):
            while len(body) < int(length):
                body += await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        sock.close()
    assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == 2000
