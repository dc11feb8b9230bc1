"""Opens sockets by host name: listens on every address of a name, and connects to any that answers.

A connection attempt begins with the first address and adds the next after a quarter of a second, or
at once when one fails, while the earlier ones go on (RFC 8305). So an address that does not answer
costs a quarter of a second. uvloop does not do this itself.
"""

from __future__ import annotations

import errno
import logging
import socket
from typing import TYPE_CHECKING, Final

from aiohappyeyeballs import start_connection

from pdserve.name_lookup import look_up

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.name_lookup import AddressInfo

__all__ = ["bind_all", "connect_any", "resolve", "resolve_now"]

_log = logging.getLogger(__name__)

_STAGGER: Final[Seconds] = 0.25
"""Delay between attempts at two addresses of a name, as RFC 8305 recommends."""
_TRIES: Final = 8
"""Tries to find a port that is free at all addresses; the system chooses it at the first."""
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def resolve(host: str, port: int, *, passive: bool = False) -> list[AddressInfo]:
    """Every address of `host`, best first. Raises `OSError`."""
    numeric = _look_up(host, port, socket.AI_NUMERICHOST, passive=passive)
    if numeric:
        return numeric
    try:
        return await look_up(host, port, flags=socket.AI_PASSIVE if passive else 0)
    except ValueError:
        raise _no_name(host) from None


def resolve_now(host: str, port: int) -> list[AddressInfo]:
    """Every address of a local name, to listen on; blocks. Raises `OSError`."""
    found = _look_up(host, port, 0, passive=True)
    if not found:
        raise _no_name(host)
    return found


def _look_up(host: str, port: int, flags: int, *, passive: bool) -> list[AddressInfo]:
    """The addresses of a name; empty: there is none."""
    flags |= socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, ValueError):
        return []
    # With SOCK_STREAM all results are internet addresses.
    return found  # type: ignore[return-value]


def _no_name(host: str) -> OSError:
    """The error for a name that IDNA refuses: a label is empty or has more than 63 characters."""
    return socket.gaierror(socket.EAI_NONAME, f"{host!r} cannot be a host's name")


async def connect_any(host: str, port: int) -> socket.socket:
    """A socket connected to the address that answered first. Raises `OSError`; the caller sets the
    deadline. Cancellation closes all attempts.
    """
    found = await resolve(host, port)
    try:
        connection = await start_connection(found, happy_eyeballs_delay=_STAGGER)
    except RuntimeError as error:
        # uvloop raises this for a descriptor that a transport still uses.
        raise OSError(errno.EBADF, str(error)) from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        connection.close()
        raise
    return connection


def bind_all(found: list[AddressInfo], backlog: int) -> list[socket.socket]:
    """Listening sockets on all addresses of a name, on one port. Raises `OSError`."""
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        try:
            for one in found:
                _bind(one, backlog, sockets)
        except OSError as error:
            for listening in sockets:
                listening.close()
            # The port that the system chose for the first address is in use at another address.
            if error.errno == errno.EADDRINUSE and sockets and found[0][4][1] == 0:
                continue
            raise
        if sockets:
            return sockets
        break
    raise OSError(errno.EADDRNOTAVAIL, "this machine has none of the addresses of that name")


def _bind(one: AddressInfo, backlog: int, sockets: list[socket.socket]) -> None:
    """Binds one more address, on the port of the first."""
    family, kind, protocol, _, address = one
    port = sockets[0].getsockname()[1] if sockets else address[1]
    listening: socket.socket | None = None
    try:
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind((address[0], port, *address[2:]))
        listening.listen(backlog)
    except OSError as error:
        if listening is not None:
            listening.close()
        if error.errno not in _NOT_HERE:
            raise
        _log.info("not listening on %s: %s", address[0], error.strerror)
        return
    sockets.append(listening)
