"""A light HTTP client: one request on a connection of its own, told to a `ClientRequest` as it
comes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.chaos.storm.client_request import ClientRequest

CONNECT = 5.0
"""Seconds: a host that is silent does not refuse."""
LIMIT = 1 << 20


class NotAsked(Exception):
    """No connection came about: there was no request."""


async def ask(
    life: ClientRequest,
    host: str,
    port: int,
    *,
    patience: float,
    hang_up: Callable[[ClientRequest], bool],
) -> None:
    """From connecting to the end, `patience` seconds at most; `hang_up` is asked after each piece.
    Raises `NotAsked`; whatever else happens is in the record."""
    try:
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(host, port, limit=LIMIT)
    except (OSError, TimeoutError) as error:
        raise NotAsked(repr(error)) from error
    life.asked = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            writer.write(_head("POST", life.question.path, _body(life)))
            await _receive(life, reader, hang_up)
    except TimeoutError:
        life.broken = life.broken or f"nothing ended it within {patience:.0f} s"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        life.broken = repr(error)
    finally:
        life.ended = time.monotonic()
        writer.transport.abort()


async def get(host: str, port: int, path: str, patience: float) -> tuple[int, bytes]:
    """One page. Raises `OSError`, which `TimeoutError` is."""
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(host, port, limit=LIMIT)
        try:
            writer.write(_head("GET", path, b""))
            status, headers = await _read_head(reader)
            if "content-length" in headers:
                return status, await reader.readexactly(int(headers["content-length"]))
            return status, b"".join([piece async for piece in _chunks(reader)])
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError(repr(error)) from error
        finally:
            writer.transport.abort()


def _body(life: ClientRequest) -> bytes:
    fields: dict[str, Any] = dict(life.question.fields)
    if life.streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields).encode()


def _head(method: str, path: str, body: bytes) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


async def _receive(
    life: ClientRequest, reader: asyncio.StreamReader, hang_up: Callable[[ClientRequest], bool]
) -> None:
    if not life.streamed and hang_up(life):
        await asyncio.sleep(0.3)  # it is under way, as far as anybody can tell
        life.hung_up = True
        return
    status, headers = await _read_head(reader)
    life.answered(status, headers, time.monotonic())
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
        life.whole(body, time.monotonic())
        return
    async for piece in _chunks(reader):
        life.event_bytes(piece, time.monotonic())
        if not life.done and hang_up(life):
            life.hung_up = True
            return


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Reads a chunked body; raises if it is cut off."""
    while size := int(await reader.readline() or b"cut off", 16):
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]
    await reader.readline()
