"""The client against servers that behave, misbehave and go away."""

from __future__ import annotations

import asyncio
import socket
from random import Random

import pytest

from pdserve.client import (
    APIError,
    Attempt,
    BadAnswer,
    ChatStream,
    Client,
    ConnectionFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    Retries,
    ServerError,
    StreamBroken,
    Timeout,
    Timeouts,
    Unauthorized,
    Unavailable,
)
from pdserve.client.fields import (
    ChatFields,
    CompletionFields,
    EmbedFields,
    RerankFields,
    ScoreFields,
    TokenizeFields,
)
from pdserve.errors import ConfigError, PdserveError
from pdserve.protocols import completion_requests
from pdserve.protocols.embeddings import EmbeddingRequest
from pdserve.protocols.scoring import RerankRequest, ScoringFields
from tests.client.scripted import CHUNK, HANG_UP, WHOLE, answer, failure, scripted, stream

SOON = Retries(attempts=4, first=0.001)


def client_of(url: str, **options) -> Client:
    options.setdefault("retries", SOON)
    return Client(url, model="m", random=Random(1), **options)


async def everything(answer: ChatStream) -> None:
    async for _ in answer:
        pass


async def test_a_whole_answer_and_fields_that_nobody_knows_yet():
    async with scripted(answer(200, WHOLE)) as server, client_of(server.url) as client:
        said = await client.chat("hello", temperature=0.5, max_tokens=3)
    assert said.choices[0].message.content == "hi"
    assert b'"messages":[{"role":"user","content":"hello"}]' in server.requests[0]
    assert b'"temperature":0.5' in server.requests[0]


OTHERS = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","prompt_logprobs":null,'
    b'"prompt_token_ids":null,"choices":[{"index":0,"finish_reason":"content_filter",'
    b'"token_ids":null,"message":{"role":"assistant","content":null,"refusal":"no",'
    b'"reasoning":null,"reasoning_content":null,"tool_calls":null}}]%b}'
)
"""What other servers say: fields that are null instead of left out, and reasons of their own."""


@pytest.mark.parametrize(
    "usage",
    [
        b"",
        b',"usage":null',
        b',"usage":{"prompt_tokens":1,"total_tokens":1,"completion_tokens_details":null}',
    ],
)
async def test_a_whole_answer_of_another_server(usage):
    async with scripted(answer(200, OTHERS % usage)) as server, client_of(server.url) as client:
        said = await client.chat("hello")
    (choice,) = said.choices
    assert choice.finish_reason == "content_filter"
    assert choice.message.refusal == "no"
    assert not choice.message.tool_calls
    assert (said.usage is None) == (b"{" not in usage)


async def test_a_stream_of_another_server():
    ended = CHUNK.replace('"finish_reason":null', '"finish_reason":"eos","token_ids":null') % "b"
    first = b'data: {"id":"","object":"","created":0,"model":"","choices":[]}\n\n'
    end = first + f"data: {ended}\n\ndata: [DONE]\n\n".encode()
    async with scripted(stream("a", end=end)) as server, client_of(server.url) as client:
        answer = client.chat_stream("hello")
        await everything(answer)
    assert (answer.text, answer.finish_reason, answer.usage) == ("ab", "eos", None)


@pytest.mark.parametrize("usage", [b"", b',"usage":{"prompt_tokens":2,"total_tokens":2}'])
async def test_vectors_of_another_server(usage):
    body = b'{"object":"list","model":"m","data":[{"index":0,"embedding":[1,0.5]}]%b}' % usage
    async with scripted(answer(200, body)) as server, client_of(server.url) as client:
        said = await client.embed("hello")
    assert said.data[0].embedding == [1.0, 0.5]
    assert (said.usage is None) == (not usage)


async def test_tries_again_with_the_same_id_and_tells_whoever_watches():
    seen: list[Attempt] = []
    script = (failure(503), HANG_UP, failure(429, "Retry-After: 0"), answer(200, WHOLE))
    async with (
        scripted(*script) as server,
        client_of(server.url, watch=seen.append) as client,
    ):
        await client.chat("hello")
    assert [type(one.error) for one in seen] == [Unavailable, ConnectionFailed, Overloaded]
    assert [one.number for one in seen] == [1, 2, 3]
    assert seen[2].pause == 0
    assert len({server.header(number, "x-request-id") for number in range(4)}) == 1


async def test_gives_up_after_its_attempts():
    async with scripted(failure(503)) as server, client_of(server.url) as client:
        with pytest.raises(Unavailable) as caught:
            await client.chat("hello")
    assert caught.value.attempts == len(server.requests) == 4


async def test_a_server_that_asks_for_more_patience_than_there_is_is_not_asked_again():
    async with (
        scripted(failure(429, "Retry-After: 100")) as server,
        client_of(server.url) as client,
    ):
        with pytest.raises(Overloaded) as caught:
            await client.chat("hello")
    assert caught.value.retry_after == 100
    assert len(server.requests) == 1


async def test_does_not_wait_past_its_own_deadline():
    async with (
        scripted(failure(503, "Retry-After: 15")) as server,
        client_of(server.url, timeout=5.0) as client,
    ):
        with pytest.raises(Unavailable):
            await client.chat("hello")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", InvalidRequest),
        (401, "invalid_api_key", Unauthorized),
        (403, "forbidden", Forbidden),
        (404, "model_not_found", NotFound),
        (418, "teapot", InvalidRequest),
        (429, "rate_limit_exceeded", RateLimited),
        (500, "engine_error", ServerError),
        (502, "gateway", ServerError),
    ],
)
async def test_errors_by_status(status, code, kind):
    said = failure(status, "x-request-id: theirs", code=code, message="because")
    async with scripted(said) as server, client_of(server.url, retries=0) as client:
        with pytest.raises(APIError) as caught:
            await client.complete("hello")
    error = caught.value
    assert type(error) is kind
    assert isinstance(error, PdserveError)
    assert (error.status, error.code, error.type, error.param) == (status, code, "t", "p")
    assert (error.message, error.request_id, error.attempts) == ("because", "theirs", 1)


async def test_an_error_of_a_strangers_words():
    async with (
        scripted(answer(502, b"<html>bad gateway")) as server,
        client_of(server.url) as client,
    ):
        with pytest.raises(ServerError, match="bad gateway"):
            await client.chat("hello")
    assert len(server.requests) == 1


async def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with client_of(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ConnectionFailed, match="no server answers") as caught:
            await client.version()
    assert caught.value.refused
    assert caught.value.attempts == 4


@pytest.mark.parametrize(
    ("key", "said"), [(None, "serves no model yet"), ("sk-x", "the key's `models` names none")]
)
async def test_a_server_that_lists_no_model(key: str | None, said: str):
    listing = answer(200, b'{"data":[]}')
    async with scripted(listing) as server, Client(server.url, key) as client:
        with pytest.raises(NotFound, match=said):
            await client.chat("hello")


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"data":[{}]}', b'{"data":[{"id":1}]}']
)
async def test_a_server_of_another_kind(body):
    async with scripted(answer(200, body)) as server, client_of(server.url) as client:
        with pytest.raises(BadAnswer):
            await client.models()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "", "http://x:99999", "no where"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="is not a URL"):
        Client(url)


# ---------------------------------------------------------------- streams


async def test_a_stream_gives_chunks_text_and_what_the_last_said():
    async with (
        scripted(stream("a", "b", "é")) as server,
        client_of(server.url) as client,
        client.chat_stream("hello") as answer,
    ):
        chunks = [chunk async for chunk in answer]
    assert len(chunks) == 3
    assert (answer.text, answer.done, answer.attempts) == ("abé", True, 1)
    assert answer.request_id == "theirs"
    assert b'"stream":true' in server.requests[0]


async def test_a_stream_is_tried_again_before_its_first_byte_only():
    script = (failure(503), HANG_UP, stream("a", end=b""), stream("never"))
    async with scripted(*script) as server, client_of(server.url) as client:
        answer = client.chat_stream("hello")
        with pytest.raises(StreamBroken) as caught:
            await everything(answer)
    assert answer.text == "a"
    assert (caught.value.text, caught.value.attempts) == ("a", 3)
    assert not caught.value.retryable
    assert len(server.requests) == 3


async def test_an_error_within_a_stream_is_told_in_the_servers_words():
    said = b'data: {"error":{"message":"lost","type":"service_unavailable","code":"x"}}\n\n'
    async with scripted(stream("a", end=said)) as server, client_of(server.url) as client:
        with pytest.raises(StreamBroken, match="lost") as caught:
            await everything(client.chat_stream("hello"))
    assert caught.value.text == "a"
    assert isinstance(caught.value.error, Unavailable)
    assert len(server.requests) == 1


async def test_a_chunk_of_another_kind():
    async with scripted(stream(end=b"data: 5\n\n")) as server, client_of(server.url) as client:
        with pytest.raises(BadAnswer):
            await everything(client.chat_stream("hello"))


async def test_silence_within_a_stream_has_a_deadline():
    timeouts = Timeouts(between=0.05)
    async with scripted(stream("a", end=b""), hold=True) as server:
        async with client_of(server.url, timeout=timeouts) as client:
            with pytest.raises(Timeout) as caught:
                await everything(client.chat_stream("hello"))
        await asyncio.wait_for(server.gone.wait(), 10)
    assert (caught.value.stage, caught.value.text) == ("between", "a")


@pytest.mark.parametrize(
    ("timeouts", "stage"), [(Timeouts(first=0.4), "first"), (Timeouts(total=0.4), "total")]
)
async def test_silence_before_an_answer_has_a_deadline_and_no_second_attempt(timeouts, stage):
    async with scripted(b"HTTP/1.1 200 OK\r\n", hold=True) as server:
        async with client_of(server.url, timeout=timeouts) as client:
            with pytest.raises(Timeout) as caught:
                await client.chat("hello")
        await asyncio.wait_for(server.gone.wait(), 10)
    assert caught.value.stage == stage
    assert len(server.requests) == 1


async def test_leaving_a_stream_early_closes_its_connection():
    async with (
        scripted(stream("a", "b", end=b""), hold=True) as server,
        client_of(server.url) as client,
    ):
        async with client.chat_stream("hello") as answer:
            async for chunk in answer:
                assert chunk.choices[0].delta.content == "a"
                break
            async for chunk in answer:  # goes on where it was left
                assert chunk.choices[0].delta.content == "b"
                break
        await asyncio.wait_for(server.gone.wait(), 10)


async def test_so_does_leaving_a_bare_loop():
    async with (
        scripted(stream("a", "b", end=b""), hold=True) as server,
        client_of(server.url) as client,
    ):
        async for _ in client.chat_stream("hello"):
            break
        await asyncio.wait_for(server.gone.wait(), 10)


async def test_so_does_cancelling():
    async with scripted(stream("a", end=b""), hold=True) as server, client_of(server.url) as client:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.chat_stream("hello"):
                begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.gone.wait(), 10)


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("fields", "record", "own"),
    [
        (ChatFields, completion_requests.ChatRequest, {"model", "stream", "messages"}),
        (CompletionFields, completion_requests.CompletionRequest, {"model", "stream", "prompt"}),
        (EmbedFields, EmbeddingRequest, {"model", "input", "messages"}),
        (RerankFields, RerankRequest, {"model", "query", "documents"}),
        (ScoreFields, ScoringFields, {"model"}),
        (TokenizeFields, completion_requests.TokenizeRequest, {"model", "prompt", "messages"}),
    ],
)
def test_every_field_of_the_api_can_be_asked_with(fields, record, own):
    assert fields.__annotations__.keys() == set(record.__struct_fields__) - own
