"""One admission for all endpoints that read a body, and one end for each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.support import HELLO, frontend, http, raw_connection, tokens, until
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.support import Client

CHAT = "/v1/chat/completions"
ENDLESS = Script(tokens=tokens("la "), interval=0.001)
BODIES = {
    CHAT: HELLO | {"max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/v2/rerank": {"query": "a", "documents": ["a"]},
    "/rerank": {"query": "a", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "a"},
    "/score": {"text_1": "a", "text_2": "a"},
    "/invocations": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": HELLO | {"max_tokens": 1},
    "/v1/messages/count_tokens": HELLO,
    "/route": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": HELLO | {"stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"model": "tiny"},
}
"""Of each endpoint that takes one."""
_MANAGED = ("pull", "push", "create", "copy", "delete")
BODILESS = {"/v1/responses/{id}", "/ping", *(f"/api/{name}" for name in _MANAGED)}
"""Take a method that may have a body, and read none."""
SMALL = "[[key]]\nkey = 'small-key-of-a-test'\ntenant = 'small'\n[key.limits]\n"
OTHER = "[[key]]\nkey = 'other-key-of-a-test'\ntenant = 'other'\n"
KEY = {"Authorization": "Bearer small-key-of-a-test"}
OTHER_KEY = {"Authorization": "Bearer other-key-of-a-test"}


def key_file(folder, limits):
    path = folder / "keys.toml"
    path.write_text(SMALL + limits + OTHER)
    path.chmod(0o600)
    return path


def message(answer: Any) -> str:
    """An error's message; Ollama's errors are nothing else."""
    error = answer["error"]
    return error if isinstance(error, str) else error["message"]


@contextlib.asynccontextmanager
async def one_in_flight(client: Client, headers: dict[str, str]) -> AsyncIterator[None]:
    """While a request with these headers is under way."""
    body = json.dumps(HELLO | {"stream": True, "max_tokens": 4000}).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    async with raw_connection(client) as (_, writer):
        writer.write(http("POST", CHAT, body, lines))
        await until(lambda: client.backend.requests)
        yield
        writer.transport.abort()
        await until(lambda: client.service.active_requests == 0)


async def test_every_endpoint_with_a_body_is_known():
    """A new one is entered above, and so is tried for its limits below."""
    async with frontend() as client:
        api = client.service._api
        targets = [*api._targets.values(), api._models, api._stored]
        taking = {each.route for each in targets if set(each.methods) - {"GET"}}
    assert taking == BODIES.keys() | BODILESS


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_takes_a_place_of_its_key(path, tmp_path):
    keys = key_file(tmp_path, "max_concurrent_requests = 1\n")
    async with frontend(ENDLESS, api_keys_file=keys) as client, one_in_flight(client, KEY):
        status, headers, answer = await client.post(path, BODIES[path], KEY)
        assert status == 429, answer
        assert "already has 1 requests in flight" in message(answer)
        assert "Retry-After" in headers
        status, _, answer = await client.post(path, BODIES[path], OTHER_KEY)
        assert status != 429, answer


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_takes_a_place_of_the_frontend(path):
    async with frontend(ENDLESS, max_in_flight=1) as client, one_in_flight(client, {}):
        status, _, answer = await client.post(path, BODIES[path])
        assert (status, "requests are in flight" in message(answer)) == (429, True)


async def test_every_request_counts_for_its_keys_minute(tmp_path):
    keys = key_file(tmp_path, f"requests_per_minute = {len(BODIES)}\n")
    async with frontend(api_keys_file=keys) as client:
        for path, body in BODIES.items():
            status, _, answer = await client.post(path, body, KEY)
            assert status != 429, (path, answer)
        for path, body in BODIES.items():
            status, _, answer = await client.post(path, body, KEY)
            assert status == 429, (path, answer)
            assert "requests per minute" in message(answer)


async def test_what_is_only_counted_costs_no_tokens(tmp_path):
    keys = key_file(tmp_path, "tokens_per_minute = 100\n")
    async with frontend(api_keys_file=keys) as client:
        for path in ("/tokenize", "/route", "/v1/messages/count_tokens"):
            long = "word " * 100
            body = {"messages": [{"role": "user", "content": long}]}
            status, _, answer = await client.post(path, body, KEY)
            assert status != 429, answer
        status, _, _ = await client.post(CHAT, HELLO | {"max_tokens": 1}, KEY)
        assert status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_refuses_while_the_server_drains(path):
    async with frontend() as client:
        client.service._active_requests.draining = True
        status, _, answer = await client.post(path, BODIES[path])
        assert (status, message(answer)) == (503, "the server is shutting down")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_a_client_that_hangs_up_frees_its_place(path):
    async with frontend() as client:
        async with raw_connection(client) as (_, writer):
            writer.write(http("POST", path, headers="Content-Length: 100\r\n") + b"{")
            await until(lambda: client.service.active_requests == 1)
            writer.transport.abort()
        await until(lambda: client.service.active_requests == 0)
        assert client.service._active_requests.admission.in_flight == 0


async def test_an_answer_that_was_generated_is_delivered():
    """However many texts of others wait at that moment."""
    script = Script(tokens=tokens("hello world "), burst=50)
    async with frontend(script) as client:
        pool, release = client.service._pool, asyncio.Event()
        pool.inline_chars = 1000
        loop = asyncio.get_running_loop()

        def hold() -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)

        async def fill() -> list[BaseException | None]:
            others = [pool.run(10**6, hold) for _ in range(256)]
            return await asyncio.gather(*others, return_exceptions=True)

        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
        async with asyncio.TaskGroup() as both:
            answer = both.create_task(client.post("/v1/completions", body))
            await until(lambda: client.backend.requests)
            filling = both.create_task(fill())
            await until(
                lambda: any(each.composing for each in client.service._active_requests.active)
            )
            release.set()
        status, _, answered = answer.result()
        assert (status, answered["usage"]["completion_tokens"]) == (200, 2000)
        assert filling.result() == [None] * 256
