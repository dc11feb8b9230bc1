"""One life of a core: launch, `StartCore`, watch, exit.

Runs inside the client's supervisor task. It knows what a live core owes (to become ready in time,
to get on while it has work) and what is known of a dead one; submissions, sinks and
restarts are the client's business.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.core_connection import CoreConnection
from pdserve.engine.watchdog import StallWatchdog
from pdserve.errors import EngineDied, EngineStalled, PdserveError
from pdserve.messages.engine import CoreFailed, CoreReady, StartCore, StopCore
from pdserve.messages.engine_errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.engine.launcher import CoreLauncher
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command, EngineSpec, Event

__all__ = ["CoreRun", "CoreTimeouts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimeouts:
    """How long a core may take for what."""

    load_timeout: Seconds = 1800.0
    """From launch to `CoreReady`; large checkpoints on slow disks take many minutes."""
    stall_timeout: Seconds = 10.0
    """Without any progress of a core that could get on, after which it is killed; 0: never. Steps
    may take longer, since executors show their progress within them (`StepPlan.tick`)."""
    stop_timeout: Seconds = 5.0
    """For an orderly end, before the core is ended by force."""
    kill_timeout: Seconds = 2.0
    """After each act of force, before the next one."""


class CoreRun:
    """Carrier and connection of one core. Used once."""

    def __init__(
        self,
        carrier: CoreLauncher,
        options: CoreTimeouts,
        clock: Clock,
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[EngineStalled | None], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_lost` is called when no event can come any more, before the exit is known, with what
        is known already; `on_look` whenever the core, ready, was looked at and found well."""
        self._carrier = carrier
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_look = on_look
        self._connection: CoreConnection | None = None
        self._ready = False
        self._doomed = False
        self._failure: PdserveError | None = None
        self._reaper: asyncio.TimerHandle | None = None
        """Kills a core that said `CoreFailed` but does not end."""
        self._launched: Seconds = clock.now()
        self._stall = StallWatchdog(options.stall_timeout, self._launched)

    async def run(self, spec: EngineSpec) -> PdserveError:
        """From launch to exit; returns what the core died of.

        Cancellation: the core is killed; its exit is not waited for.
        """
        try:
            sock = await self._carrier.launch()
        except OSError as error:
            return EngineDied(f"the engine process cannot be started: {error}")
        if self._doomed:  # while it was being launched there was nothing to kill
            self._carrier.kill()
        loop = asyncio.get_running_loop()
        connection = CoreConnection(loop, self._receive)
        try:
            await loop.create_unix_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            self._carrier.kill()
            raise
        self._connection = connection
        try:
            connection.post(StartCore(spec=spec))
            complaint = await self._watch(connection)
        except BaseException:
            self._carrier.kill()
            raise
        finally:
            connection.close()
            if self._reaper is not None:
                self._reaper.cancel()
        stalled = complaint if isinstance(complaint, EngineStalled) else None
        self._on_lost(stalled)
        exit_text = await self._exit()
        if stalled is not None:
            return stalled
        observed = f"the engine process {exit_text}" if complaint is None else complaint.message
        return self._verdict(observed)

    def _verdict(self, observed: str) -> PdserveError:
        """What a core says itself counts more than what was seen of its end. Once it was ready it
        died, whatever of: a retry meets its successor."""
        if self._failure is None:
            return EngineDied(observed)
        if self._ready:
            return EngineDied(f"the engine process gave up: {self._failure.message}")
        return self._failure

    def _receive(self, event: Event) -> None:
        if type(event) is CoreReady:
            self._ready = True
        elif type(event) is CoreFailed:
            self._failure = error_of(event)
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(self._options.stop_timeout, self._carrier.kill)
        self._on_event(event)

    # ------------------------------------------------------------------ watching

    async def _watch(self, connection: CoreConnection) -> PdserveError | None:
        """Wait until the connection is lost; returns the reason if it was us who lost patience."""
        interval = min(self._options.load_timeout / 4, self._stall.interval)
        while not connection.lost.done():
            await asyncio.wait({connection.lost}, timeout=interval)
            if not connection.lost.done() and (complaint := self._complaint(connection)):
                _log.error("%s", complaint)
                self._carrier.kill()
                return complaint
        return connection.lost.result()

    def _complaint(self, connection: CoreConnection) -> PdserveError | None:
        """What the core fails to do, if anything."""
        now, options, page = self._clock.now(), self._options, self._carrier.page
        if not self._ready:
            if now - self._launched <= options.load_timeout:
                return None
            return EngineDied(f"the engine was not ready within {options.load_timeout:g} s")
        if page is None:
            return None
        seen = page.look()
        if not self._stall.look(seen, connection.posted, now):
            self._on_look()
            return None
        return EngineStalled(f"the engine stood still for {self._stall.age:.3g} s in {seen.what}")

    @property
    def stalled_for(self) -> Seconds:
        """How long it has made no progress although it could; 0 while it does."""
        return self._stall.age

    async def _exit(self) -> str:
        """Wait for the exit that should follow the lost connection, then enforce it."""
        for _ in range(2):
            try:
                async with asyncio.timeout(self._options.kill_timeout):
                    return await self._carrier.ended()
            except TimeoutError:
                self._carrier.kill()
        _log.error("the engine process does not end; it is left behind")
        return "does not end"

    # ------------------------------------------------------------------ from the client

    @property
    def congested(self) -> bool:
        """The core does not read what is sent to it."""
        return self._connection is not None and self._connection.congested

    def post(self, command: Command) -> None:
        """Send; dropped without connection, whose loss is reported anyway."""
        if self._connection is not None:
            self._connection.post(command)

    def ask_to_stop(self) -> None:
        """The orderly end: free everything, say `Stopped`, exit."""
        self.post(StopCore())

    def kill(self) -> None:
        """SIGKILL: a core leaves SIGTERM to its node."""
        self._doomed = True
        self._carrier.kill()
