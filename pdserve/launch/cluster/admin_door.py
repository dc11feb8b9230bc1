"""Lets the commands of one user reach the nodes of a server that has no cluster.

Those nodes are on a network in memory. A visitor connects to the server's Unix socket and names the
node; from then on the door passes bytes between the two, so the visitor speaks to that node as
a peer over TCP does, with the same methods, bounds and deadlines. The kernel says whose process
the visitor is: only those of the server's own user, and root, are let in, and they are told the
key of the network.

    visitor -> door   length (2 bytes), {"to": ADDRESS, or empty for any node}
    door -> visitor   length (2 bytes), {"cluster": NAME, "key": HEX} or {"error": TEXT}
    both ways         bytes of the link

It knows nothing of links. The process owns it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Final, cast

import msgspec

from pdserve.errors import Draining, PdserveError
from pdserve.launch.cluster import admin_socket

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds
    from pdserve.net.base import ByteNetwork

__all__ = ["LONGEST", "PREFIX", "AdminDoor", "DoorAnswer", "DoorQuery", "framed", "peer_uid"]

_log = logging.getLogger(__name__)

_VISITORS: Final = 16
"""Most visitors at a time: a view of the cluster asks every node."""
_PATIENCE: Final[Seconds] = 2.0
"""Seconds in which a visitor names its node, and in which the node answers."""
LONGEST: Final[Bytes] = 1024
"""Largest query and answer."""
_LONGEST_REASON: Final = 240
PREFIX: Final = struct.Struct("!H")
_CREDENTIALS: Final = struct.Struct("3i")
"""PID, user and group of a peer, as SO_PEERCRED gives them."""


class DoorQuery(msgspec.Struct, frozen=True):
    """The node that a visitor wants."""

    to: str = ""


class DoorAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a visitor needs to know, or why it is turned away."""

    cluster: str = ""
    key: str = ""
    error: str = ""


def framed(message: DoorQuery | DoorAnswer) -> bytes:
    """A message with its length before it."""
    body = msgspec.json.encode(message)
    return PREFIX.pack(len(body)) + body


def peer_uid(connection: socket.socket) -> int | None:
    """The user of the process at the other end; None where the system does not say, and only the
    socket's mode protects it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    told = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


class AdminDoor:
    """The listening side. Create it inside the running loop."""

    def __init__(
        self,
        path: Path,
        network: ByteNetwork,
        *,
        cluster: str,
        key: Callable[[], bytes],
        address: Callable[[], str],
    ) -> None:
        """`address` is that of the node for visitors who name none; `key` is asked each time."""
        self.path = path
        self.cluster = cluster
        self._network = network
        self._key = key
        self._address = address
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._visits: dict[_Visit, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def visitors(self) -> int:
        """Visitors inside."""
        return len(self._visits)

    async def open(self) -> None:
        """Listens. Errors: `ConfigError`."""
        listening = admin_socket.listen(self.path)
        self._inode = self.path.lstat().st_ino
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Visit(self), sock=listening)

    async def close(self) -> None:
        """Stops listening, removes the socket and ends all visits. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        admin_socket.remove(self.path, self._inode)
        for visit in tuple(self._visits):
            visit.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def admit(self, visit: _Visit, uid: int | None) -> str:
        """Enters a visitor, or returns why not."""
        if uid not in (None, os.geteuid(), 0):
            _log.warning("the admin socket turned away a process of user %s", uid)
            return "this server belongs to another user"
        if len(self._visits) >= _VISITORS:
            return "too many visitors at once; try again in a moment"
        self._visits[visit] = None
        return ""

    def left(self, visit: _Visit) -> None:
        """Notes the end of a visit."""
        self._visits.pop(visit, None)

    def lead(self, visit: _Visit, query: DoorQuery) -> None:
        """Connects a visitor with the node that it has named."""
        task = asyncio.get_running_loop().create_task(self._lead(visit, query), name="admin visit")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, visit: _Visit, query: DoorQuery) -> None:
        try:
            address = query.to or self._address()
            if not address:
                raise Draining("the server is shutting down", retry_after=1.0)
            answer = DoorAnswer(self.cluster, self._key().hex())
            await self._network.connect(address, lambda: _NodeSide(visit), timeout=_PATIENCE)
        except PdserveError as error:
            visit.refuse(error.message)
        except Exception as error:
            # The visitor has no timer any more: without an answer it would keep its place.
            _log.exception("a visitor of the admin socket could not be let in")
            visit.refuse(f"{type(error).__name__} in the server")
        else:
            visit.connected(answer)


class _Visit(asyncio.Protocol):
    """The visitor's side of one visit."""

    def __init__(self, door: AdminDoor) -> None:
        self._door = door
        self._asked = bytearray()
        self.transport: asyncio.Transport | None = None
        self.node: asyncio.Transport | None = None
        """The other side, once it is connected."""
        self._timer: asyncio.TimerHandle | None = None
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        uid = peer_uid(self.transport.get_extra_info("socket"))
        reason = self._door.admit(self, uid)
        if reason:
            self.refuse(reason)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_PATIENCE, self.refuse, "no node was named in time")

    def data_received(self, data: bytes) -> None:
        if self._open:
            if self.node is not None:
                self.node.write(data)
            return
        self._asked += data
        if len(self._asked) < PREFIX.size:
            return
        wanted = PREFIX.size + PREFIX.unpack_from(self._asked)[0]
        if wanted > LONGEST or len(self._asked) > wanted:
            self.refuse("this is no query for a node")
        elif len(self._asked) == wanted:
            self._ask(bytes(self._asked[PREFIX.size :]))

    def _ask(self, body: bytes) -> None:
        self._stop_timer()
        try:
            query = msgspec.json.decode(body, type=DoorQuery)
        except (msgspec.DecodeError, ValueError):
            self.refuse("this is no query for a node")
            return
        assert self.transport is not None
        self.transport.pause_reading()
        self._door.lead(self, query)

    def connected(self, answer: DoorAnswer) -> None:
        """Both sides are there."""
        if self.transport is None or self.node is None:
            self.abort()
            return
        self._open = True
        self.transport.write(framed(answer))
        self.transport.resume_reading()
        self.node.resume_reading()

    def refuse(self, reason: str) -> None:
        """Says why, and ends the visit."""
        if self.transport is not None:
            self.transport.write(framed(DoorAnswer(error=reason[:_LONGEST_REASON])))
        self.end()

    def end(self) -> None:
        """Ends the visitor's side when it has read all, or after a while if it does not read."""
        self._stop_timer()
        if self.transport is not None:
            self.transport.close()
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self.abort)

    def abort(self) -> None:
        """Ends both sides now."""
        self._stop_timer()
        for side in (self.transport, self.node):
            if side is not None:
                side.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        if self.node is not None:
            self.node.pause_reading()

    def resume_writing(self) -> None:
        if self.node is not None:
            self.node.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.transport = None
        self._door.left(self)
        if self.node is not None:
            self.node.close()


class _NodeSide(asyncio.Protocol):
    """The node's side of one visit."""

    def __init__(self, visit: _Visit) -> None:
        self._visit = visit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The answer to the visitor is to be its first bytes.
        transport = cast("asyncio.Transport", transport)
        transport.pause_reading()
        self._visit.node = transport
        if self._visit.transport is None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._visit.transport is not None:
            self._visit.transport.write(data)

    def pause_writing(self) -> None:
        if self._visit.transport is not None:
            self._visit.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._visit.transport is not None:
            self._visit.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visit.node = None
        self._visit.end()
