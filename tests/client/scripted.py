"""A server that answers connections with bytes a test has written, in order."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CHUNK = (
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","new":1,'
    '"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
)
WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hi","later":[]},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
HANG_UP = b""
"""Close without a byte."""


def answer(status: int, body: bytes, *lines: str) -> bytes:
    """A whole HTTP answer."""
    head = [f"HTTP/1.1 {status} X", "Content-Type: application/json", *lines]
    head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def failure(status: int, *lines: str, code: str = "c", message: str = "no") -> bytes:
    """OpenAI's error."""
    body = f'{{"error":{{"message":"{message}","type":"t","code":"{code}","param":"p"}}}}'
    return answer(status, body.encode(), *lines)


def stream(*words: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    """An event stream that ends with its connection."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
    events = "".join(f"data: {CHUNK % word}\n\n" for word in words).encode()
    return head + b"x-request-id: theirs\r\n\r\n" + events + end


@dataclass
class Scripted:
    """What is answered to each request in turn; the last answer stays."""

    answers: Sequence[bytes]
    hold: bool = False
    """Keep connections open after an answer."""
    requests: list[bytes] = field(default_factory=list)
    port: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has closed its connection."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def header(self, number: int, name: str) -> str:
        """Of a request."""
        lines = self.requests[number].decode().split("\r\n")
        return next(v for n, _, v in (ln.partition(": ") for ln in lines) if n.lower() == name)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [ln for ln in head.split(b"\r\n") if ln.lower().startswith(b"content-l")]
                body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                self.requests.append(head + body)
                said = self.answers[min(len(self.requests), len(self.answers)) - 1]
                writer.write(said)
                if not said or (b"Connection: close" in said and not self.hold):
                    break
        self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def scripted(*answers: bytes, hold: bool = False) -> AsyncIterator[Scripted]:
    """Listens while the block runs."""
    made = Scripted(answers, hold)
    server = await asyncio.start_server(made._serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()
