"""Accepts connections and bounds how many of them are unauthenticated.

Each connection gets a task until its client is known; at the bound the host with the most of them
loses its oldest (`handshake_limit`). For a Unix socket the owner defines what counts as a host.
Without file descriptors accepting pauses, since retrying at once would fail again. The owner
defines how a connection authenticates.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pdserve.net.address import join
from pdserve.net.handshake_limit import PendingHandshakes

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from pdserve.ids import Seconds

__all__ = ["BoundedAcceptor"]

_log = logging.getLogger(__name__)

_AT_A_TIME: Final = 1024
"""Connections accepted before other callbacks get their turn."""
_PAUSE: Final[Seconds] = 1.0
"""Pause after an error that an immediate retry would repeat, such as too many open files."""


def _by_address(_: socket.socket, peername: Any) -> str:
    return str(peername[0])


class BoundedAcceptor:
    """Accepts on listening sockets, which it owns, until `close`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        bound: int,
        welcome: Callable[[socket.socket, str], Coroutine[object, object, None]],
        host_of: Callable[[socket.socket, Any], str] = _by_address,
    ) -> None:
        """Args: `welcome` gets each connection and its host, owns the connection, and ends within a
        deadline; it is cancelled when another connection takes its place. `host_of` maps a
        connection and the peer's address to the host that it counts for. Create it inside the
        running loop.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._welcome = welcome
        self._host_of = host_of
        self._pending: PendingHandshakes[asyncio.Task[None]] = PendingHandshakes(bound)
        self._unbegun: dict[asyncio.Task[None], socket.socket] = {}
        """Tasks that have not run yet: a cancelled one never runs and cannot close its
        connection."""
        self._resuming: asyncio.TimerHandle | None = None
        name = sockets[0].getsockname()
        self.port: int = name[1] if isinstance(name, tuple) else 0
        self.address = join(name[0], name[1]) if isinstance(name, tuple) else "a Unix socket"
        self._watch()

    @property
    def pending(self) -> int:
        """Number of connections whose client is not known yet."""
        return len(self._pending)

    @property
    def evicted(self) -> int:
        """Number of connections ended to make room."""
        return self._pending.evicted

    @property
    def paused(self) -> bool:
        """True while it waits for file descriptors."""
        return self._resuming is not None

    def _watch(self) -> None:
        self._resuming = None
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _unwatch(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accepts waiting connections, up to a backlog's worth per turn."""
        for _ in range(_AT_A_TIME):
            try:
                accepted, peername = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("cannot accept on %s for now: %s", self.address, error)
                self._unwatch()
                self._resuming = self._loop.call_later(_PAUSE, self._watch)
                return
            accepted.setblocking(False)
            self._begin(accepted, self._host_of(accepted, peername))

    def _begin(self, accepted: socket.socket, host: str) -> None:
        task = self._loop.create_task(self._greet(accepted, host), name=f"accept {host}")
        self._unbegun[task] = accepted
        victim = self._pending.add(task, host)
        task.add_done_callback(partial(self._settled, host))
        if victim is not None:
            victim.cancel()

    def _settled(self, host: str, task: asyncio.Task[None]) -> None:
        self._pending.remove(task, host)
        accepted = self._unbegun.pop(task, None)
        if accepted is not None:
            accepted.close()

    async def _greet(self, accepted: socket.socket, host: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._unbegun[task]
        try:
            await self._welcome(accepted, host)
        except Exception:
            # A bug in `welcome` must not affect later connections.
            _log.exception("a connection from %s could not be set up", host)
            accepted.close()

    async def close(self) -> None:
        """Accepts no more; connections whose client is known go on."""
        self._unwatch()
        if self._resuming is not None:
            self._resuming.cancel()
        for listening in self._sockets:
            listening.close()
        unfinished = self._pending.drain()
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
