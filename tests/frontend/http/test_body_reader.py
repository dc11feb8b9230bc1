import asyncio
import contextlib
import gc
import gzip
import json
import threading
import zlib
from types import FrameType
from typing import Any, cast

import pytest

from pdserve.errors import Overloaded
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.http import body_reader as bodies_module
from pdserve.frontend.http.body_reader import FREE, BodyReader, RequestBody, decoded_size
from pdserve.frontend.http.decompress import Decompressor
from pdserve.protocols.request_decoder import TOKENIZE
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.frontend.support import (
    HELLO,
    MODEL,
    card,
    frontend,
    http,
    raw_connection,
    read_answer,
    until,
)
from tests.support.fake_backend import Script

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
        f"the body cannot be read: it is not valid {encoding}, or not whole; send it again, or "
        "without Content-Encoding"
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
            await until(lambda: client.service._bodies.buffered == 100_000)
            async with raw_connection(client) as (reader, late):
                late.write(http("POST", CHAT, headers="Content-Length: 90000\r\n") + b" " * 80_000)
                status, head, body = await read_answer(reader)
                assert (status, code(body)) == (429, "overloaded")
                assert "Retry-After" in head
        await until(lambda: client.service.active_requests == 0)
        assert client.service._bodies.buffered == 0
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
            assert client.service._active_requests.admission.in_flight == 0
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


MIB = 1 << 20
GZIP = {"Content-Encoding": "gzip"}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "t"\n')
    file.chmod(0o600)
    return file


@pytest.fixture
def unpacked(monkeypatch):
    """Pieces that were unpacked: thread and size."""
    seen = []

    class Watched(Decompressor):
        def piece(self, most):
            found = super().piece(most)
            seen.append((threading.current_thread().name, len(found)))
            return found

    monkeypatch.setattr(bodies_module, "Decompressor", Watched)
    return seen


async def test_a_strangers_body_is_not_unpacked(keys, unpacked):
    bomb = gzip.compress(b" " * (64 * MIB))
    async with frontend(api_keys_file=keys) as client:
        for path in (CHAT, "/v1/completions", "/tokenize", "/route", "/v1/messages/count_tokens"):
            status, _, _ = await client.post(path, bomb, GZIP)
            assert status == 401
        assert unpacked == []
        assert client.service._bodies.buffered == 0


async def test_bombs_are_unpacked_in_slices_off_the_loop_and_within_the_limit(unpacked):
    bomb = gzip.compress(b" " * (64 * MIB))
    async with frontend(max_body=4 * MIB) as client:
        answers = await asyncio.gather(*(client.post(CHAT, bomb, GZIP) for _ in range(6)))
        assert {status for status, _, _ in answers} == {413}
        assert client.service._bodies.buffered == 0
    in_thread = [size for name, size in unpacked if name.startswith("pdserve-body")]
    in_place = [size for name, size in unpacked if not name.startswith("pdserve-body")]
    assert max(in_thread) <= MIB
    assert sum(in_thread) <= 6 * 5 * MIB
    assert sum(in_place) <= 6 * FREE


async def test_packed_bodies_together_stay_in_the_budget(monkeypatch):
    most = 0
    holds = RequestBody.holds

    def watched(self, size):
        nonlocal most
        holds(self, size)
        most = max(most, self._reader.buffered)

    monkeypatch.setattr(RequestBody, "holds", watched)
    blanks = gzip.compress(b" " * (2 * MIB) + BODY)
    async with frontend(max_body=3 * MIB, max_buffered=5 * MIB) as client:
        answers = await asyncio.gather(*(client.post(CHAT, blanks, GZIP) for _ in range(20)))
        assert {status for status, _, _ in answers} <= {200, 429}
        assert 200 in {status for status, _, _ in answers}
        assert client.service._bodies.buffered == 0
    assert 2 * MIB < most <= 5 * MIB


async def test_large_bodies_are_decoded_in_turn_and_the_loop_turns_in_between():
    """The longest step that a crowd of bodies takes is that of one body."""
    reader = BodyReader(FrontendConfig())
    loop = asyncio.get_running_loop()
    running, turns, order = 0, 0, []

    class Decoder:
        def decode(self, data: bytes, *, strict: bool) -> Any:
            nonlocal running
            running += 1
            order.append((running, turns, threading.current_thread() is threading.main_thread()))
            running -= 1
            return TOKENIZE.decode(data, strict=strict)

    def turn():
        nonlocal turns
        turns += 1
        handle[0] = loop.call_soon(turn)

    async def one():
        with RequestBody(reader) as body:
            body.keep(b'{"prompt": "' + b"x" * (2 * FREE) + b'"}')
            await body.decode(cast("Any", Decoder()), strict=False)

    handle = [loop.call_soon(turn)]
    await asyncio.gather(*(one() for _ in range(8)))
    handle[0].cancel()
    await reader.close()
    assert [at_once for at_once, _, _ in order] == [1] * 8
    assert not any(on_loop for _, _, on_loop in order)
    assert len({turn for _, turn, _ in order}) == 8, "two of them in one turn of the loop"
    assert reader.buffered == 0


async def test_a_body_counts_until_its_text_is_no_longer_held(monkeypatch):
    gate = threading.Event()

    def slow(encode):
        def waits(self, *args, **kwargs):
            gate.wait(20)
            return encode(self, *args, **kwargs)

        return waits

    for name in ("encode", "encode_batch"):
        monkeypatch.setattr(Tokenizer, name, slow(getattr(Tokenizer, name)))
    large = {"prompt": "word " * 40_000}
    async with frontend(max_buffered=650_000) as client:
        bodies, pool = client.service._bodies, client.service._pool
        try:
            first = asyncio.ensure_future(client.post("/tokenize", large))
            second = asyncio.ensure_future(client.post("/tokenize", large))
            await until(lambda: pool.stats().jobs == 2)
            assert 400_000 <= bodies.buffered < 450_000
            status, _, answer = await client.post("/tokenize", large)
            assert (status, answer["error"]["code"]) == (429, "overloaded")
        finally:
            gate.set()
        await asyncio.gather(first, second)
        assert bodies.buffered == 0


@pytest.mark.parametrize("repeated", [True, False])
async def test_what_an_answer_repeats_of_its_request_counts_until_its_end(repeated):
    asked = {"input": "hi", "metadata": {"a": "b" * 200_000}}
    if not repeated:
        asked = {"input": "hello " * 40_000}
    served = {MODEL: card(max_model_len=1_000_000)}
    async with frontend(Script(hold_open=60.0), served) as client:
        bodies = client.service._bodies
        task = asyncio.ensure_future(client.post("/v1/responses", asked))
        await until(lambda: client.backend.requests)
        assert (200_000 <= bodies.buffered < 202_000) if repeated else bodies.buffered < 1000
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.service.active_requests == 0)
        assert bodies.buffered == 0


async def test_a_refused_request_needs_no_garbage_collector():
    """Its error's traceback leads to its text: cycles would keep both for long."""
    large = json.dumps({"messages": [{"role": "user", "content": "word " * 180_000}]}).encode()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        async with frontend() as client:
            status, _, answer = await client.post(CHAT, large)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            await asyncio.sleep(0)
            gc.collect()
            kept = [each for each in gc.garbage if isinstance(each, BaseException | FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept


async def test_memory_is_given_back_when_no_large_body_is_left(monkeypatch):
    given = threading.Event()
    monkeypatch.setattr(bodies_module, "malloc_trim", given.set)
    monkeypatch.setattr(bodies_module, "_SETTLED", 0.0)
    reader = BodyReader(FrontendConfig())
    with RequestBody(reader) as body:
        body.keep(b"x" * (40 * MIB))
        assert not given.is_set()
    await until(given.is_set)
    await reader.close()


async def test_raw_bytes_are_gone_when_they_are_decoded():
    reader = BodyReader(FrontendConfig())
    with RequestBody(reader) as body:
        body.keep(b'{"prompt": "' + b"x" * MIB + b'"}')
        assert reader.buffered == body.size > MIB
        decoded = await body.decode(TOKENIZE, strict=False)
        assert len(decoded.request.prompt or "") == MIB
        assert MIB < reader.buffered < 1.1 * MIB  # what it became, once
        with pytest.raises(AssertionError):
            _ = body.data
    await reader.close()
    assert reader.buffered == 0


def test_lists_of_numbers_and_wide_characters_weigh_more_than_their_bytes():
    assert decoded_size(b'{"prompt": "word"}') == 18
    assert decoded_size(b"[" + b"1," * 1000 + b"1]") > 40 * 1000
    assert decoded_size("😀".encode() + b"x" * 100) == decoded_size(b"\\ud83d" + b"x" * 98) == 416


async def test_only_so_many_large_bodies_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(bodies_module, "_MOST_WAITING", 2)
    gate = threading.Event()
    reader = BodyReader(FrontendConfig())
    waiting = [asyncio.ensure_future(reader.work(lambda: gate.wait(20))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="wait to be decoded"):
        await reader.work(lambda: gate.wait(20))
    gate.set()
    await asyncio.gather(*waiting)
    await reader.close()


async def test_the_only_body_always_fits():
    reader = BodyReader(FrontendConfig(max_buffered=1000))
    with RequestBody(reader) as one, RequestBody(reader) as other:
        one.holds(5000)
        with pytest.raises(Overloaded):
            other.holds(1)
        assert (one.size, other.size, reader.buffered) == (5000, 0, 5000)
    await reader.close()
