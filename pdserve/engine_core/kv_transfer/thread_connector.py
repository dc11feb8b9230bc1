"""Runs a `LoopKvConnector` in a thread beside the core's: `ThreadKvConnector`.

A core's step takes long, and here no call of a peer, no connection and no fence waits for it. Calls
go in by `call_soon_threadsafe`; events come out by a deque that both threads may use. The node's
control calls come and go by a socket of this thread. If the thread breaks down, the core's next
`poll` raises, since its grants can no longer be relied on.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from pdserve.engine_core.kv_transfer.control_socket import ControlSocket
from pdserve.engine_core.kv_transfer.loop_connector import LoopKvConnector
from pdserve.errors import EngineDied, EngineError
from pdserve.transfer.backends import backend_offers, make_backends

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.kv_transfer.connector import AttemptKey, ConnectorEvent
    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.engine import PathState, TransferSpec
    from pdserve.messages.transfer import BackendOffers, TransferTicket
    from pdserve.transfer.backends import TransferBackend
    from pdserve.transfer.base import GrantSpec, KvPart, Region

__all__ = ["ThreadKvConnector", "make_thread_connector"]

_log = logging.getLogger(__name__)

_START: Final[Seconds] = 30.0
_CLOSE: Final[Seconds] = 15.0
"""Time to close all paths. This waits for a copy or a device, never for a peer."""


def make_thread_connector(
    spec: TransferSpec, nudge: Callable[[], None], control: socket.socket
) -> ThreadKvConnector:
    """Make a connector with the back ends that `spec` allows. Raises `ConfigError` for an unknown
    one."""
    return ThreadKvConnector(make_backends(spec), nudge, control)


class ThreadKvConnector:
    """A `KvConnector` in a thread of its own. Used by one thread, the core's. After `close` all
    calls are ignored."""

    def __init__(
        self,
        backends: Sequence[TransferBackend],
        nudge: Callable[[], None],
        control: socket.socket,
    ) -> None:
        """`nudge` wakes the loop that steps the core; called from the connector's thread. `control`
        is a connected stream socket, with the node at its other end; it stays the caller's until
        `start`."""
        self._backends = backends
        self._nudge = nudge
        self._control = control
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mover: LoopKvConnector | None = None
        self._broken: EngineDied | None = None
        self._wake: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ the thread

    def _run(self, regions: Sequence[Region], offers: BackendOffers) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._live(regions, offers))
        except BaseException as error:
            # The core must learn of any error, also of the loop's own.
            self._break(EngineDied(f"the engine's transport thread broke down: {error!r}"))
        finally:
            self._started.set()

    async def _live(self, regions: Sequence[Region], offers: BackendOffers) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._over = asyncio.Event()
        control = ControlSocket(self._control_broke)
        mover = LoopKvConnector(
            self._backends, say=control.say, nudge=self._nudge, on_broken=self._break
        )
        mover.use(regions, offers, self._wake)
        control.on_command = mover.take
        self._mover = mover
        await loop.create_unix_connection(lambda: control, sock=self._control)
        self._started.set()
        await self._over.wait()
        await mover.closed()
        control.close()
        self._mover = None
        loop.set_exception_handler(None)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("in the transport thread: %s", context.get("message"), exc_info=error)
        if error is not None:
            self._break(EngineDied(f"the engine's transport thread broke down: {error!r}"))

    def _control_broke(self, reason: str) -> None:
        self._break(EngineDied(f"the transports' control socket broke: {reason}"))

    def _break(self, error: EngineDied) -> None:
        if self._broken is None:
            self._broken = error
            self._wake()
            self._nudge()

    # ------------------------------------------------------------------ life

    @property
    def running(self) -> bool:
        """Whether the thread was started and not closed."""
        return self._thread is not None

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        """Start the thread with the allocated pool; returns the usable back ends. Raises
        `ConfigError` if there is none, `EngineError` if the thread does not start."""
        offers = backend_offers(self._backends, region.pools)
        self._wake = wake
        self._thread = threading.Thread(
            target=self._run, args=(region.pools, offers), name="pdserve-transports", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START):
            raise EngineError(f"the transport thread has not started within {_START:g} s")
        if self._broken is not None:
            raise self._broken
        return tuple(offers.places)

    def close(self) -> None:
        """Close every path and end the thread. Raises `EngineError` if the thread does not end in
        time; peers may then still write to the pool."""
        thread, loop = self._thread, self._loop
        if thread is None:
            return
        if loop is not None:
            self._post(loop, self._over.set)
        thread.join(_CLOSE)
        if thread.is_alive():
            raise EngineError(f"the transports have not ended within {_CLOSE:g} s")
        self._thread = self._loop = None

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
        try:
            loop.call_soon_threadsafe(call, *args)
        except RuntimeError as error:
            # The loop is closed.
            if self._broken is None and self._thread is not None and self._thread.is_alive():
                self._broken = EngineDied(f"the transport thread is gone: {error}")

    def _call(self, method: str, *args: Any) -> None:
        loop, mover = self._loop, self._mover
        # Without a loop or a mover the connector is closed.
        if loop is not None and mover is not None:
            self._post(loop, getattr(mover, method), *args)

    # ------------------------------------------------------------------ calls

    def attach(self, peer: NodeLife) -> None:
        """Exchange KV as this (node, epoch) from now on."""
        self._call("attach", peer)

    def open(self, key: AttemptKey, peer: NodeLife, order: GrantSpec) -> None:
        """Connect to the peer and let it fill these blocks."""
        self._call("open", key, peer, order)

    def finish(self, key: AttemptKey) -> None:
        """End an attempt of which all parts have arrived."""
        self._call("finish", key)

    def revoke(self, key: AttemptKey) -> None:
        """End an attempt in any state; `AttemptFenced` follows."""
        self._call("revoke", key)

    def deliver(self, handle: int, peer: NodeLife, ticket: TransferTicket, part: KvPart) -> None:
        """Send a part to the peer's blocks; `PartDelivered` follows."""
        self._call("deliver", handle, peer, ticket, part)

    def withdraw(self, handle: int, peer: NodeLife, ticket: TransferTicket) -> None:
        """Send no more parts for this ticket."""
        self._call("withdraw", handle, peer, ticket)

    # ------------------------------------------------------------------ events

    def poll(self) -> list[ConnectorEvent]:
        """Return all events since the last call. Raises `EngineDied` if the thread has broken
        down."""
        if self._broken is not None:
            raise self._broken
        return [] if self._mover is None else self._mover.poll()

    def paths(self) -> list[PathState]:
        """State of every path to a peer."""
        return [] if self._mover is None else self._mover.paths()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
            "uvloop"
        ).new_event_loop
    except ImportError:
        return None
    return factory
