"""Reads requests to a collector with OpenTelemetry's own protobuf, and a collector to send them
to."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    import ssl

Step = Callable[["ReceivedRequest", asyncio.StreamWriter], Awaitable[None]]

_IDS = ("traceId", "spanId", "parentSpanId")


def parse_request(body: bytes) -> ExportTraceServiceRequest:
    """The request in a body of OTLP's JSON. Unknown fields are errors."""
    request = ExportTraceServiceRequest()
    json_format.Parse(json.dumps(_with_base64(json.loads(body))), request)
    return request


def _with_base64(value: Any) -> Any:
    """The same with ids as protobuf's JSON has them."""
    if isinstance(value, list):
        return [_with_base64(one) for one in value]
    if isinstance(value, dict):
        return {
            name: base64.b64encode(bytes.fromhex(one)).decode()
            if name in _IDS
            else _with_base64(one)
            for name, one in value.items()
        }
    return value


class FakeCollector:
    """A collector that listens on a port and does what its script says.

    The script has one step per request; the last step stays. A step is a status with headers and a
    body, or a coroutine that does something to the connection.
    """

    def __init__(self, *script: Step, tls: ssl.SSLContext | None = None) -> None:
        self.script = list(script) or [answer(200)]
        self.requests: list[ReceivedRequest] = []
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeCollector:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        """All spans of all requests that it has answered with 200."""
        return [
            span
            for request in self.requests
            if request.taken
            for resource in parse_request(request.body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                await self._answer_one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)
        }
        raw = await reader.readexactly(int(headers["content-length"]))
        request = ReceivedRequest(head[0], headers, raw)
        self.requests.append(request)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        await step(request, writer)


class ReceivedRequest:
    """A request as it came."""

    def __init__(self, line: str, headers: dict[str, str], raw: bytes) -> None:
        self.line = line
        self.headers = headers
        self.raw = raw
        self.taken = False

    @property
    def body(self) -> bytes:
        packed = self.headers.get("content-encoding") == "gzip"
        return gzip.decompress(self.raw) if packed else self.raw


def answer(status: int, body: bytes = b"{}", **headers: str) -> Step:
    """A step: this answer."""

    async def step(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        request.taken = status == 200
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        await writer.drain()

    return step


async def hang(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """A step: no answer."""
    await asyncio.sleep(3600)


async def hang_up(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """A step: the connection ends."""
    raise ConnectionResetError


async def babble(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """A step: an answer without end."""
    writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n\r\n")
    while True:
        writer.write(b" " * 65536)
        await writer.drain()
        await asyncio.sleep(0)


async def nonsense(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """A step: what comes is no HTTP."""
    writer.write(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\n\n")
    await writer.drain()
