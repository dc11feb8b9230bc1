"""Sends requests over aiohttp: attempts, retries, and a timeout around each wait.

It maps foreign exceptions to `ClientError`s, and does not know what bodies mean.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from pdserve.client.errors import APIError, ClientError, ConnectionFailed, Timeout, api_error
from pdserve.client.policy import Attempt, Retries, Timeouts, retry_after_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from random import Random
    from typing import TypeVar

    from pdserve.ids import Seconds

    T = TypeVar("T")

__all__ = ["Answered", "Call", "Transport", "why"]

_MOST_ERROR = 1 << 20
"""Bytes of an error's body that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, over all its attempts."""

    method: str
    path: str
    request_id: str
    timeouts: Timeouts
    body: bytes | None = None
    headers: Mapping[str, str]


@dataclass(slots=True)
class Answered:
    """A successful answer that has begun; its holder reads it or releases it."""

    response: aiohttp.ClientResponse
    attempts: int
    request_id: str
    deadline: Seconds | None
    """Deadline of the whole request, on the event loop's clock."""
    timeouts: Timeouts

    async def within(self, wait: Awaitable[T]) -> T:
        """Wait for more of the body. Errors: `Timeout`."""
        loop = asyncio.get_running_loop()
        soon = loop.time() + self.timeouts.between
        stage = "between"
        if self.deadline is not None and self.deadline < soon:
            soon, stage = self.deadline, "total"
        try:
            async with asyncio.timeout_at(soon):
                return await wait
        except TimeoutError:
            raise _timeout(stage, self.timeouts) from None

    async def body(self) -> bytes:
        """Read the whole body. Errors: `ConnectionFailed`, `Timeout`."""
        parts = []
        try:
            while part := await self.within(self.response.content.readany()):
                parts.append(part)
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error) from None
        finally:
            self.release()
        return b"".join(parts)

    def release(self) -> None:
        """Keep the connection if the body was read to its end; else close it, which ends the
        request at the server."""
        if self.response.content.at_eof():
            self.response.release()
        else:
            self.response.close()


class Transport:
    """One session of connections."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        retries: Retries,
        random: Random,
        watch: Callable[[Attempt], None] | None,
    ) -> None:
        self._url = url
        self._headers = headers
        self._retries = retries
        self._random = random
        self._watch = watch
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, call: Call, *, retry: bool = True) -> Answered:
        """Try until a successful answer begins.

        Errors: that of the last attempt. Cancellation: the connection is closed.
        """
        loop = asyncio.get_running_loop()
        total = call.timeouts.total
        deadline = None if total is None else loop.time() + total
        number = 0
        while True:
            number += 1
            try:
                response = await self._try(call, deadline)
                return Answered(response, number, call.request_id, deadline, call.timeouts)
            except ClientError as error:
                error.attempts = number
                error.request_id = error.request_id or call.request_id
                pause = self._retries.pause(number, error, self._random) if retry else None
                if pause is not None and deadline is not None and loop.time() + pause >= deadline:
                    pause = None
                if self._watch is not None:
                    self._watch(Attempt(call.request_id, number, error, pause))
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def _try(self, call: Call, deadline: Seconds | None) -> aiohttp.ClientResponse:
        """One attempt; its answer's status is good."""
        loop = asyncio.get_running_loop()
        soon, stage = loop.time() + call.timeouts.first, "first"
        if deadline is not None and deadline < soon:
            soon, stage = deadline, "total"
        try:
            async with asyncio.timeout_at(soon):
                response = await self._send(call)
                if response.status < 400:
                    return response
                raise await _refusal(response, call.request_id)
        except aiohttp.ConnectionTimeoutError:
            raise _timeout("connect", call.timeouts) from None
        except TimeoutError:
            raise _timeout(stage, call.timeouts) from None
        except aiohttp.ClientConnectorError as error:
            raise ConnectionFailed(
                f"no server answers at {self._url}: {error.os_error.strerror or error}",
                refused=isinstance(error.os_error, ConnectionRefusedError),
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error) from None

    async def _send(self, call: Call) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=True,
                read_bufsize=1 << 18,
            )
        headers = {"x-request-id": call.request_id, **call.headers}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        return await self._session.request(
            call.method,
            self._url + call.path,
            data=call.body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=call.timeouts.connect),
        )


async def _refusal(response: aiohttp.ClientResponse, request_id: str) -> APIError:
    try:
        body = await response.content.read(_MOST_ERROR)
    finally:
        if response.content.at_eof():
            response.release()
        else:
            response.close()
    headers = response.headers
    return api_error(
        response.status,
        body,
        request_id=headers.get("x-request-id", request_id),
        retry_after=retry_after_of(headers.get("Retry-After"), time.time()),
    )


def _broken(error: Exception) -> ConnectionFailed:
    return ConnectionFailed(f"the connection broke: {why(error)}")


def why(error: Exception) -> str:
    """A foreign error in words, even if it has no text."""
    return str(error) or type(error).__name__


def _timeout(stage: str, timeouts: Timeouts) -> Timeout:
    words = {
        "connect": f"the server cannot be reached within {timeouts.connect:g} s",
        "first": f"no answer began within {timeouts.first:g} s",
        "between": f"nothing more of the answer came for {timeouts.between:g} s",
        "total": f"the request was not done within {timeouts.total or 0:g} s",
    }
    return Timeout(stage, words[stage])
