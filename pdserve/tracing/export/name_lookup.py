"""Looks up a collector's name in threads that do not keep the process alive.

asyncio's own threads do: a process that ends waits for them, and a name server that does not answer
can take minutes, or for ever. Each name has one lookup at a time, however many wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp.abc import AbstractResolver, ResolveResult

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NameLookup"]


class _Name(NamedTuple):
    host: str
    port: int
    family: socket.AddressFamily


class NameLookup(AbstractResolver):
    """The lookups of one HTTP session. Used on one event loop."""

    def __init__(self, look_up: Callable[..., list[Any]] | None = None) -> None:
        """`look_up` is `socket.getaddrinfo`, or what tests have in its place."""
        self._look_up = look_up or socket.getaddrinfo
        self._under_way: dict[_Name, asyncio.Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a name. Errors: `OSError`. Cancellation: the lookup goes on."""
        name = _Name(host, port, family)
        found = self._under_way.get(name)
        if found is None:
            found = self._under_way[name] = self._begin(name)
        return await asyncio.shield(found)

    def _begin(self, name: _Name) -> asyncio.Future[list[ResolveResult]]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def settle(answer: list[ResolveResult] | Exception) -> None:
            del self._under_way[name]
            if isinstance(answer, Exception):
                found.set_exception(answer)
                # Those who waited may be gone; then asyncio would report it as never retrieved.
                found.exception()
            else:
                found.set_result(answer)

        def run() -> None:
            answer = self._ask(name)
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, answer)

        threading.Thread(target=run, name="pdserve-collector-name", daemon=True).start()
        return found

    def _ask(self, name: _Name) -> list[ResolveResult] | Exception:
        try:
            found = self._look_up(name.host, name.port, type=socket.SOCK_STREAM, family=name.family)
        except Exception as error:
            return error
        return [
            ResolveResult(
                hostname=name.host,
                host=str(address[0]),
                port=name.port,
                family=family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for family, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Nothing is open here; lookups under way end by themselves."""
