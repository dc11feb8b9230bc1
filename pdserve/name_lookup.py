"""Looks up names of hosts in threads that do not keep the process alive.

asyncio's own threads do: a process that ends waits for them, and a name server that does not answer
can take minutes, or for ever. Each name has one lookup at a time, however many wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

__all__ = ["AddressInfo", "look_up"]

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]
"""One result of `getaddrinfo`; an IPv6 socket address has two more numbers."""


class _Name(NamedTuple):
    host: str
    port: int
    family: int
    flags: int


_Found = asyncio.Future[list[AddressInfo]]
_under_way: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Name, _Found]] = WeakKeyDictionary()


async def look_up(host: str, port: int, *, family: int = 0, flags: int = 0) -> list[AddressInfo]:
    """The addresses of a name, as `socket.getaddrinfo` has them for TCP.

    Errors: `OSError`, `ValueError` for what cannot be a name. Cancellation: the lookup goes on.
    """
    names = _under_way.setdefault(asyncio.get_running_loop(), {})
    name = _Name(host, port, family, flags)
    found = names.get(name)
    if found is None:
        found = names[name] = _begin(names, name)
    return await asyncio.shield(found)


def _begin(names: dict[_Name, _Found], name: _Name) -> _Found:
    loop = asyncio.get_running_loop()
    found: _Found = loop.create_future()

    def settle(answer: list[AddressInfo] | Exception) -> None:
        del names[name]
        if isinstance(answer, Exception):
            found.set_exception(answer)
            # Those who waited may be gone; then asyncio would report it as never retrieved.
            found.exception()
        else:
            found.set_result(answer)

    def run() -> None:
        answer = _ask(name)
        # The loop may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=run, name="pdserve-name", daemon=True).start()
    return found


def _ask(name: _Name) -> list[AddressInfo] | Exception:
    try:
        found = socket.getaddrinfo(
            name.host, name.port, name.family, socket.SOCK_STREAM, flags=name.flags
        )
    except Exception as error:
        return error
    # With SOCK_STREAM all results are internet addresses.
    return found  # type: ignore[return-value]
