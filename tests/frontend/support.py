"""A frontend on a free port over a scripted backend, and a plain client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.service import FrontendService
from pdserve.messages.card import ModelCard
from pdserve.protocols.sse import SseDecoder, SseEvent
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, Script
from tests.text import builders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MODEL = "tiny"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def card(**changes: Any) -> ModelCard:
    """A card with a byte-level tokenizer whose ids 0, 1, 2 are special; 1 ends a text."""
    raw = builders.byte_level()
    fields: dict[str, Any] = {
        "name": MODEL,
        "max_model_len": 4096,
        "vocab_size": raw.get_vocab_size(),
        "block_size": 32,
        "eos_token_ids": (1,),
        "tokenizer_json": raw.to_str().encode(),
        "chat_template": TEMPLATE,
        "created": 1_700_000_000,
    }
    return ModelCard(**fields | changes)


def tokens(text: str) -> list[int]:
    """The ids of `text` in the card's tokenizer."""
    return TOKENIZER.encode(text, add_special_tokens=False).tolist()


TOKENIZER = Tokenizer.from_card(card())


@dataclass
class Client:
    """Talks to one frontend."""

    service: FrontendService
    backend: FakeBackend
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Status, headers and decoded JSON; `body` is an object or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            raw = await answer.read()
            return answer.status, answer.headers, json.loads(raw) if raw else None

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, bytes]:
        async with self.http.get(self.url + path, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def chat(self, **fields: Any) -> Any:
        """The answer to a chat request that must succeed."""
        status, _, answer = await self.post("/v1/chat/completions", HELLO | fields)
        assert status == 200, answer
        return answer

    async def complete(self, **fields: Any) -> Any:
        """The answer to a completion request that must succeed."""
        status, _, answer = await self.post("/v1/completions", {"prompt": "hello"} | fields)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any) -> list[SseEvent]:
        """All events of a stream that must begin with status 200."""
        data = json.dumps(body | {"stream": True}).encode()
        decoder = SseDecoder()
        async with self.http.post(self.url + path, data=data) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            events = [e async for part in answer.content.iter_any() for e in decoder.feed(part)]
        return events

    async def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The chunks of a stream that ends in order."""
        first = HELLO if path.endswith("chat/completions") else {"prompt": "hello"}
        *events, end = await self.events(path, first | fields)
        assert end.done
        return [json.loads(event.data) for event in events]


@contextlib.asynccontextmanager
async def frontend(
    script: Script | Any = None,
    models: dict[str, ModelCard] | None = None,
    unready: str | None = None,
    **config: Any,
) -> AsyncIterator[Client]:
    """A running frontend and a client; both are gone afterwards."""
    served = {MODEL: card()} if models is None else models
    backend = FakeBackend(served, script if script is not None else Script(), unready)
    service = FrontendService(FrontendConfig(port=0, **config), backend)
    await service.start()
    await service._models.prepare()  # so that no test's deadline has to cover it
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(service, backend, http)
    finally:
        await service.stop(0)
    assert backend.idle
    assert service.active_requests == 0


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text that the chunks of one choice add up to."""
    parts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
                parts.append(delta or "")
    return "".join(parts)


@contextlib.asynccontextmanager
async def raw_connection(client: Client) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """A bare TCP connection to the frontend: reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.service.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def http(
    method: str, path: str, body: bytes = b"", headers: str = "", version: str = "HTTP/1.1"
) -> bytes:
    """A request as bytes; `headers` are whole lines."""
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} {version}\r\nHost: localhost\r\n{length}{headers}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    """Status, head and body of one answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = 0
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return int(head.split()[1]), head, await reader.readexactly(length)


async def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Return when `condition` holds; fail after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - any condition, not one event
            await asyncio.sleep(0.002)
