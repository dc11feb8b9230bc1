"""Launches an engine core in a thread of this process, for tests and debuggers.

The thread shares the interpreter lock and cannot be killed, so no node runs a core this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine_core.core_socket import CoreSocket
from pdserve.engine_core.main import CoreLoop
from pdserve.observe.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from pdserve.engine_core.weight_sharing import WeightSharingGroup

__all__ = ["ThreadLauncher"]


class ThreadLauncher:
    """Launches cores in a daemon thread. Only closing its socket ends it, so a core that hangs in a
    step stays behind. For tests and debuggers."""

    def __init__(self, family: WeightSharingGroup | None = None) -> None:
        """Carriers with the same `family` share the weights."""
        self._family = family
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Event | None = None
        self.page: HeartbeatPage | None = None
        self.pid: int | None = None
        self._status = 0
        self._ours: socket.socket | None = None

    async def launch(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        ended = self._ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        page = self.page = HeartbeatPage.in_memory()

        def run() -> None:
            link, family = CoreSocket(theirs), self._family
            if family is None:
                host = CoreLoop(link, SystemClock(), page=page)
            else:
                host = CoreLoop(link, SystemClock(), family.make_core, turn=family.turn, page=page)
            self._status = host.run()
            with contextlib.suppress(RuntimeError):
                # The loop was closed without waiting for this thread.
                loop.call_soon_threadsafe(ended.set)

        self._ours = ours.dup()
        self._thread = threading.Thread(target=run, name="pdserve-engine-core", daemon=True)
        self._thread.start()
        return ours

    async def ended(self) -> str:
        if self._ended is None or self._thread is None:
            return "never started"
        await self._ended.wait()
        self._thread.join()
        self._hang_up()
        return f"ended with status {self._status} (as a thread)"

    def kill(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        if self._ours is not None:
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)
            self._ours.close()
            self._ours = None
