import asyncio
import contextlib
import gzip
import json
import zlib

import pytest

from tests.frontend.support import (
    HELLO,
    frontend,
    http,
    raw_connection,
    read_answer,
    until,
)

CHAT = "/v1/chat/completions"
BODY = json.dumps(HELLO).encode()


def code(body):
    return json.loads(body)["error"]["code"]


async def test_a_declared_length_over_the_limit_is_refused_unread():
    async with frontend(max_body=1000) as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Content-Length: 1001\r\n"))
        status, _, body = await read_answer(reader)
    assert (status, code(body)) == (413, "payload_too_large")


async def test_an_undeclared_length_over_the_limit_is_refused_when_it_is():
    async with frontend(max_body=1000) as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Transfer-Encoding: chunked\r\n"))
        for _ in range(5):
            writer.write(b"ff\r\n" + b"x" * 255 + b"\r\n")
        writer.write(b"0\r\n\r\n")
        status, _, body = await read_answer(reader)
        assert (status, code(body)) == (413, "payload_too_large")
        writer.write(http("GET", "/live"))  # the connection is still good
        assert (await read_answer(reader))[0] == 200


async def test_a_chunked_body_is_read_whole():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Transfer-Encoding: chunked\r\n"))
        for index in range(0, len(BODY), 10):
            part = BODY[index : index + 10]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        assert (await read_answer(reader))[0] == 200


async def test_a_compressed_body_is_understood_and_bounded():
    async with frontend(max_body=1 << 20) as client:
        packed = {"Content-Encoding": "gzip"}
        status, _, _ = await client.post(CHAT, gzip.compress(BODY), packed)
        assert status == 200
        bomb = gzip.compress(b"[" + b" " * (64 << 20))
        status, _, answer = await client.post(CHAT, bomb, packed)
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", b"not gzip"), ("deflate", b"\xff" * 20), ("gzip", BODY)]
)
async def test_a_badly_compressed_body_is_a_400(encoding, body):
    async with frontend() as client:
        status, _, answer = await client.post(CHAT, body, {"Content-Encoding": encoding})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"] == (
        f"the body cannot be read: Can not decode content-encoding: {encoding}"
    )


@pytest.mark.parametrize("encoding", ["br", "zstd", "x-gzip", "gzip, gzip", "compress"])
async def test_an_encoding_nobody_reads_is_refused_with_those_that_are(encoding):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        head = f"Content-Encoding: {encoding}\r\n"
        writer.write(http("POST", CHAT, b"\x0b\x02\x80", headers=head))
        status, _, body = await read_answer(reader)
    assert (status, code(body)) == (400, "invalid_value")
    assert json.loads(body)["error"]["message"] == (
        "the body's Content-Encoding is not understood; send gzip, deflate or none"
    )


@pytest.mark.parametrize("encoding", ["identity", "GZIP"])
async def test_the_case_of_an_encoding_does_not_matter(encoding):
    body = gzip.compress(BODY) if encoding == "GZIP" else BODY
    async with frontend() as client:
        status, _, _ = await client.post(CHAT, body, {"Content-Encoding": encoding})
    assert status == 200


async def test_a_body_cut_in_its_compression_is_a_400():
    async with frontend() as client:
        cut = zlib.compress(BODY)[:-6]
        status, _, _ = await client.post(CHAT, cut, {"Content-Encoding": "deflate"})
    assert status == 400


async def test_a_bad_chunk_is_a_400():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Transfer-Encoding: chunked\r\n") + b"zz\r\n")
        async with asyncio.timeout(20):
            status, _, _ = await read_answer(reader)
    assert status == 400


async def test_a_body_that_stalls_is_a_408():
    async with frontend(body_timeout=0.05) as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Content-Length: 10\r\n") + b"{")
        async with asyncio.timeout(20):
            status, _, body = await read_answer(reader)
    assert (status, code(body)) == (408, "request_timeout")


async def test_bodies_share_a_bound():
    async with frontend(max_body=200_000, max_buffered=150_000) as client:
        async with raw_connection(client) as (_, writer):
            writer.write(http("POST", CHAT, headers="Content-Length: 150000\r\n") + b" " * 100_000)
            await until(lambda: client.service._generations._bodies.buffered == 100_000)
            async with raw_connection(client) as (reader, late):
                late.write(http("POST", CHAT, headers="Content-Length: 90000\r\n") + b" " * 80_000)
                status, head, body = await read_answer(reader)
                assert (status, code(body)) == (429, "overloaded")
                assert "Retry-After" in head
        await until(lambda: client.service.active_requests == 0)
        assert client.service._generations._bodies.buffered == 0
        await client.chat()


async def test_bodies_that_are_promised_only_take_no_room_from_others():
    async with frontend(max_body=1_000_000, max_buffered=1_000_000) as client:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                _, writer = await stack.enter_async_context(raw_connection(client))
                writer.write(http("POST", CHAT, headers="Content-Length: 900000\r\n") + b"{")
            await until(lambda: client.service.active_requests == 4)
            reader, writer = await stack.enter_async_context(raw_connection(client))
            writer.write(http("POST", CHAT, headers=f"Content-Length: {len(BODY)}\r\n"))
            await until(lambda: client.service.active_requests == 5)
            writer.write(BODY)
            assert (await read_answer(reader))[0] == 200
        await until(lambda: client.service.active_requests == 0)


async def test_bodies_that_arrive_slowly_hold_nobodys_place(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[key]]\nkey = "sk-12345678"\ntenant = "t"\n'
        "[key.limits]\nmax_concurrent_requests = 1\nrequests_per_minute = 1\n"
    )
    file.chmod(0o600)
    auth = "Authorization: Bearer sk-12345678\r\n"
    async with frontend(max_in_flight=1, api_keys_file=file) as client:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                _, writer = await stack.enter_async_context(raw_connection(client))
                writer.write(http("POST", CHAT, headers=f"{auth}Content-Length: 90\r\n") + b"{")
            await until(lambda: client.service.active_requests == 4)
            assert client.service._generations.admission.in_flight == 0
            reader, writer = await stack.enter_async_context(raw_connection(client))
            writer.write(http("POST", CHAT, BODY, auth))
            assert (await read_answer(reader))[0] == 200
        await until(lambda: client.service.active_requests == 0)


async def test_a_client_may_wait_to_be_asked_for_its_body():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        head = f"Content-Length: {len(BODY)}\r\nExpect: 100-continue\r\n"
        writer.write(http("POST", CHAT, headers=head))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await read_answer(reader))[0] == 200
