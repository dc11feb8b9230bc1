"""One run of a core: launch it, send `StartCore`, watch it, wait for its exit.

`StartCore` takes along one end of a second socket, for the thread of the transports.

Runs inside the client's supervisor task. It knows when a core is late (not ready in time, no
progress although it has work) and what is known of its end. The client handles submissions, sinks
and restarts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.engine.core_connection import CoreConnection
from pdserve.engine.watchdog import StallWatchdog
from pdserve.errors import EngineDied, EngineStalled, PdserveError
from pdserve.messages.engine import ControlEvent, CoreFailed, CoreReady, StartCore, StopCore
from pdserve.messages.engine_errors import error_of
from pdserve.wire.length_prefixed import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.engine.launcher import CoreLauncher
    from pdserve.errors import ProtocolError
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command, ControlCommand, EngineSpec, Event

__all__ = ["CoreRun", "CoreTimeouts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimeouts:
    """Timeouts for a core's load, progress and stop."""

    load_timeout: Seconds = 1800.0
    """Seconds from launch to `CoreReady`; large checkpoints on slow disks take many minutes."""
    stall_timeout: Seconds = 10.0
    """Seconds without progress, although the core has work, after which it is killed; 0: never. A
    step may take longer, since executors report progress within it (`StepPlan.tick`)."""
    stop_timeout: Seconds = 5.0
    """Seconds for an orderly stop, before the core is killed."""
    kill_timeout: Seconds = 2.0
    """Seconds to wait after each kill."""


class CoreRun:
    """The launcher and the connections of one core. Used once."""

    def __init__(
        self,
        launcher: CoreLauncher,
        options: CoreTimeouts,
        clock: Clock,
        *,
        on_event: Callable[[Event | ControlEvent], None],
        on_lost: Callable[[EngineStalled | None], None],
        on_look: Callable[[], None] = lambda: None,
        most_rest: Seconds = float("inf"),
    ) -> None:
        """`on_lost` is called when no more events can come, before the exit is known, with
        `EngineStalled` if the core was killed for that. `on_look` is called after each check that
        found a ready core making progress, at least every `most_rest` seconds."""
        self._launcher = launcher
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_look = on_look
        self._most_rest = most_rest
        self._connection: CoreConnection | None = None
        self._control: CoreConnection | None = None
        self._has_transports = False
        """The core is ready and has transports of its own."""
        self._over = False
        """This side ends the connections."""
        self._ready = False
        self._doomed = False
        self._failure: PdserveError | None = None
        self._reaper: asyncio.TimerHandle | None = None
        """Kills a core that said `CoreFailed` or closed its control socket, but does not end."""
        self._launched: Seconds = clock.now()
        self._stall = StallWatchdog(options.stall_timeout, self._launched)
        self._rest: asyncio.Future[None] | None = None
        """Ends with the next command; None: the core is watched as one that works."""

    async def run(self, spec: EngineSpec) -> PdserveError:
        """Run the core from launch to exit; returns the error that ended it.

        Cancellation: the core is killed; its exit is not waited for.
        """
        try:
            sock = await self._launcher.launch()
        except OSError as error:
            return EngineDied(f"the engine process cannot be started: {error}")
        if self._doomed:
            # `kill` was called during the launch, when there was no process to kill.
            self._launcher.kill()
        try:
            connection, control = await self._connect(sock, spec)
        except OSError as error:
            self._launcher.kill()
            await self._exit()
            return EngineDied(f"the engine process cannot be told what to load: {error}")
        except BaseException:
            self._launcher.kill()
            raise
        try:
            complaint = await self._watch(connection)
        except BaseException:
            self._launcher.kill()
            raise
        finally:
            self._over = True
            connection.close()
            control.close()
            if self._reaper is not None:
                self._reaper.cancel()
        stalled = complaint if isinstance(complaint, EngineStalled) else None
        self._on_lost(stalled)
        exit_text = await self._exit()
        if stalled is not None:
            return stalled
        observed = f"the engine process {exit_text}" if complaint is None else complaint.message
        return self._verdict(observed)

    async def _connect(
        self, sock: socket.socket, spec: EngineSpec
    ) -> tuple[CoreConnection, CoreConnection]:
        """Send `StartCore` with the transports' end of their socket. Both connections are there
        before the core's first event. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        control = CoreConnection(loop, self._on_event, reads=ControlEvent)
        control.lost.add_done_callback(self._control_lost)
        frame = encode_frame(msgspec.msgpack.encode(StartCore(spec=spec)))
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                rest = _send_with(theirs, sock, frame)
            await loop.create_unix_connection(lambda: control, sock=ours)
            connection = CoreConnection(loop, self._receive, first=rest)
            self._connection, self._control = connection, control
            await loop.create_unix_connection(lambda: connection, sock=sock)
        except BaseException:
            self._over = True
            control.close()
            sock.close()
            if ours is not None:
                ours.close()
            raise
        return connection, control

    def _control_lost(self, lost: asyncio.Future[ProtocolError | None]) -> None:
        """Without control messages the core's transports are of no use. The core closes its end
        only when it ends, and then has as long for that as after `CoreFailed`."""
        if self._over or self._connection is None or self._connection.lost.done():
            return
        error = lost.result()
        if error is not None:
            self._connection.fail(error)
        elif self._has_transports:
            self._reap()

    def _reap(self) -> None:
        if self._reaper is None:
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(self._options.stop_timeout, self._launcher.kill)

    def _verdict(self, observed: str) -> PdserveError:
        """The error of the core's end: the core's own error goes before what was observed from
        outside. A core that was ready always ends with `EngineDied`, since a retry meets the next
        core."""
        if self._failure is None:
            return EngineDied(observed)
        if self._ready:
            return EngineDied(f"the engine process gave up: {self._failure.message}")
        return self._failure

    def _receive(self, event: Event) -> None:
        if type(event) is CoreReady:
            self._ready, self._has_transports = True, event.transports
        elif type(event) is CoreFailed:
            self._failure = error_of(event)
            self._reap()
        self._on_event(event)

    # ------------------------------------------------------------------ watching

    async def _watch(self, connection: CoreConnection) -> PdserveError | None:
        """Wait until the connection is lost; returns the reason if the core was killed for being
        late."""
        while not connection.lost.done():
            await self._pause(connection)
            if not connection.lost.done() and (complaint := self._complaint(connection)):
                _log.error("%s", complaint)
                self._launcher.kill()
                return complaint
        return connection.lost.result()

    async def _pause(self, connection: CoreConnection) -> None:
        """Wait until the next check is due, or the connection is lost. A core without work is
        checked when it gets some."""
        now, page = self._clock.now(), self._launcher.page
        wait = min(self._options.load_timeout / 4, self._stall.interval)
        waits_for: set[asyncio.Future[Any]] = {connection.lost}
        if self._ready and page is not None:
            wait = min(self._stall.pause(page.look(), connection.posted, now), self._most_rest)
            if wait > self._stall.interval:
                self._rest = asyncio.get_running_loop().create_future()
                waits_for.add(self._rest)
        await asyncio.wait(waits_for, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        self._rest = None

    def _complaint(self, connection: CoreConnection) -> PdserveError | None:
        """The error of a core that is late or has stalled; None if all is well."""
        now, options, page = self._clock.now(), self._options, self._launcher.page
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
        return EngineStalled(f"the engine stalled for {self._stall.age:.3g} s in {seen.what}")

    @property
    def pid(self) -> int | None:
        """The id of the core's process."""
        return self._launcher.pid

    @property
    def stalled_for(self) -> Seconds:
        """Seconds without progress although the core has work; 0 while it makes progress."""
        return self._stall.age

    async def _exit(self) -> str:
        """Wait for the exit that follows the lost connection, and kill the core if it does not
        come."""
        for _ in range(2):
            try:
                async with asyncio.timeout(self._options.kill_timeout):
                    return await self._launcher.ended()
            except TimeoutError:
                self._launcher.kill()
        _log.error("the engine process does not end; it is left behind")
        return "does not end"

    # ------------------------------------------------------------------ from the client

    @property
    def congested(self) -> bool:
        """Return whether the core does not read what is sent to it."""
        return self._connection is not None and self._connection.congested

    def post(self, command: Command) -> None:
        """Send a command. Without a connection it is dropped, since `run` reports the loss."""
        if self._connection is not None:
            self._connection.post(command)
            if self._rest is not None and not self._rest.done():
                self._rest.set_result(None)

    def control(self, command: ControlCommand) -> None:
        """Send a command to the core's transports, past the thread that computes. Dropped as by
        `post`."""
        if self._control is not None:
            self._control.post(command)

    def ask_to_stop(self) -> None:
        """Ask for an orderly stop: the core frees everything, sends `CoreStopped` and exits."""
        self.post(StopCore())

    def kill(self) -> None:
        """Kill the core with SIGKILL: it ignores SIGTERM, which is the node's to handle."""
        self._doomed = True
        self._launcher.kill()


def _send_with(passed: socket.socket, sock: socket.socket, frame: bytes) -> bytes:
    """Send as much of a frame as the socket takes at once, with a descriptor; returns the rest. The
    core may not read yet, and the loop must not wait for it. Raises `OSError`."""
    sock.setblocking(False)
    try:
        sent = socket.send_fds(sock, [frame], [passed.fileno()])
    except (BrokenPipeError, ConnectionResetError):
        # The core is gone already, as `lost` will say.
        return b""
    return frame[sent:]
