"""Runs engine cores behind sockets: in a process of its own (`python -m pdserve.engine_core.child`)
or in a thread of the parent, with the same code.

A process that inherits several sockets runs one core behind each, in one thread per core, and a
`WeightSharingGroup` lets them share weights. The process exits with the last core, or at once when
one breaks down.

Commands are handled between steps. An idle core sleeps until a command comes or a deadline passes.
It ends by a `StopCore` command, by a failure (`CoreFailed`), or when the node closes the socket: a
core never outlives its node. If the node reads too slowly, no further step is computed until it has
caught up; events are never dropped.

A step's events are written when it ends. If the core computes in other processes and says when they
have begun (`flush_events`), the events are written by the next step, and the node reads them while
that step computes. They wait only if the next step follows at once: without work, with a command or
after a failure they are written before anything else happens.

A core whose executor computes in several processes has them checked between steps, also while it is
idle (`executor.SupportsHealthChecks`).

A core that transfers KV gets a `ThreadKvConnector`, whose events also end the sleep. With
`StartCore` comes the descriptor of a second socket, by which the node and the transports exchange
control messages (`kv_transfer.control_socket`): no step delays them.

It knows neither engines nor models. `CoreClient` is its only user.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import queue
import socket
import sys
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.core_socket import CoreSocket, CoreSocketClosed
from pdserve.engine_core.engine_loader import import_early, load_core
from pdserve.engine_core.kv_transfer.thread_connector import make_thread_connector
from pdserve.engine_core.loras import check_loras
from pdserve.engine_core.parent_death import die_with_parent
from pdserve.engine_core.weight_sharing import WeightSharingGroup
from pdserve.errors import ConfigError, PdserveError, ProtocolError
from pdserve.messages.engine import (
    BlocksFreed,
    CoreFailed,
    CoreReady,
    CoreStopped,
    StartCore,
    StopCore,
)
from pdserve.messages.engine_errors import failed_event
from pdserve.observe import logs
from pdserve.observe.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from pdserve.clock import Clock
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.kv_transfer.thread_connector import ThreadKvConnector
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command, EngineSpec, Event, LoadProgress, TransferSpec

__all__ = ["CoreLoop", "main"]

_log = logging.getLogger(__name__)

_LAST_WORDS: Seconds = 2.0
"""Seconds that a core which ends gives the node to read its last events."""


def _lone_core(spec: EngineSpec, clock: Clock, mover: KvConnector | None) -> Core:
    return load_core(spec.engine, clock, mover, optional=spec.moves_optionally)


def _no_turns(say: Callable[[LoadProgress], None]) -> AbstractContextManager[None]:
    return nullcontext()


class CoreLoop:
    """Runs one core from `StartCore` to its end."""

    def __init__(
        self,
        link: CoreSocket,
        clock: Clock,
        make_core: Callable[[EngineSpec, Clock, KvConnector | None], Core] = _lone_core,
        *,
        turn: Callable[[Callable[[LoadProgress], None]], AbstractContextManager[None]] = _no_turns,
        on_ready: Callable[[], None] = lambda: None,
        page: HeartbeatPage | None = None,
    ) -> None:
        """The core is made and loaded within the context `turn`, which may wait and then reports
        progress. The node watches `page`, the heartbeat."""
        self._link = link
        self._clock = clock
        self._make_core = make_core
        self._turn = turn
        self._on_ready = on_ready
        self._page = page or HeartbeatPage.in_memory()
        self._freed: list[tuple[int, str]] = []
        self._flushed = False
        """Whether the core has called `flush_events` in its last step, and so will in the next."""
        self._core: Core | None = None
        self._health: EngineCore | None = None
        """The core, if processes of its executor have to be checked."""
        self._check_at: Seconds = 0.0
        self._control: socket.socket | None = None
        """The transports' socket to the node; theirs as soon as they have started."""
        self._transports: ThreadKvConnector | None = None

    def run(self) -> int:
        """Run until the core ends; returns the exit status: 0 after an orderly stop or when the
        node has closed the socket, 1 after a failure."""
        try:
            return self._run()
        except CoreSocketClosed:
            return 0
        except Exception as error:
            # This is the last chance to report the error.
            if not isinstance(error, PdserveError):
                _log.exception("the engine core broke down")
            self._say_last(failed_event(error))
            return 1
        finally:
            self._close()
            self._link.close()
            # Transports that could not be ended still read it.
            if self._control is not None and not self._have_transports:
                self._control.close()

    def _run(self) -> int:
        first, *commands = self._first_commands()
        core, page = self._load(first), self._page
        self._on_ready()
        page.heard(len(commands))
        while True:
            fresh = self._link.receive()
            page.heard(len(fresh))
            commands += fresh
            if commands:
                self._link.flush()
            for command in commands:
                if isinstance(command, StopCore):
                    self._core = None
                    self._say_last(CoreStopped(leaked_blocks=core.close()))
                    return 0
                core.handle(command)
            commands.clear()
            self._say_freed()
            self._check_health()
            patience = self._patience(core)
            computes = patience is not None and patience <= 0
            if not (computes and self._flushed) or self._link.congested:
                self._link.flush()
            if self._link.congested:
                page.rest(None)
                self._link.wait(None)
            elif computes:
                page.compute()
                if self._step(core):
                    self._say_last()
                    return 1
            else:
                page.rest(patience)
                self._link.wait(patience)

    def _step(self, core: Core) -> bool:
        """One step; returns whether the core has failed. Its events wait for the next step if the
        core has called `flush_events` in this one."""
        self._flushed = False
        events = core.step()
        if self._flushed:
            self._link.queue(events)
        else:
            self._link.send(events)
        self._say_freed()
        return bool(events) and isinstance(events[-1], CoreFailed)

    def _flush_within(self) -> None:
        """Write the last step's events, within a step that computes elsewhere."""
        self._flushed = True
        with suppress(CoreSocketClosed):  # `receive` raises it after the step
            self._link.flush()

    def _patience(self, core: Core) -> Seconds | None:
        """Seconds to sleep unless a command comes; None: no limit."""
        if core.has_work:
            return 0.0
        due = core.wake_at()
        if self._health is not None:
            due = self._check_at if due is None else min(due, self._check_at)
        return None if due is None else due - self._clock.now()

    def _check_health(self) -> None:
        """Let the core check the processes of its executor, if it is time to."""
        if self._health is None or self._clock.now() < self._check_at:
            return
        interval = self._health.health_interval
        assert interval is not None
        self._check_at = self._clock.now() + interval
        self._health.check_health()

    def _load(self, command: Command) -> Core:
        if not isinstance(command, StartCore):
            raise ProtocolError(f"{type(command).__name__} came before StartCore")
        with self._turn(self._say):
            transfer = command.spec.transfer
            mover = None if transfer is None else self._make_connector(transfer)
            self._core = core = self._make_core(command.spec, self._clock, mover)
            try:
                capabilities = core.load(command.spec, self._say)
                # Cores of other packages may not know of adapters, and would answer without them.
                check_loras(command.spec, able="lora" in capabilities.features)
            except (PdserveError, CoreSocketClosed):
                raise
            except ImportError as error:
                raise ConfigError(f"engine {command.spec.engine!r}: {error}") from error
        if isinstance(core, EngineCore):
            core.tick = self._page.tick
            self._health = core if core.health_interval is not None else None
        if hasattr(core, "on_freed"):
            core.on_freed = self._note_freed
        if hasattr(core, "wake"):
            core.wake = self._link.nudge
        if hasattr(core, "keep_alive"):
            core.keep_alive = self._page.tick
        if hasattr(core, "flush_events"):
            core.flush_events = self._flush_within
        self._page.heard(1)
        self._link.send([CoreReady(capabilities, transports=self._have_transports)])
        return core

    def _make_connector(self, spec: TransferSpec) -> KvConnector:
        if self._control is None:
            raise ProtocolError("StartCore came without the transports' socket")
        made = make_thread_connector(spec, self._link.nudge, self._control)
        self._transports = made
        return made

    @property
    def _have_transports(self) -> bool:
        return self._transports is not None and self._transports.running

    def _note_freed(self, handle: int, phase: str) -> None:
        self._freed.append((handle, phase))

    def _say_freed(self) -> None:
        """Send the freed handles now, not with the next step's events."""
        if self._freed:
            self._link.send([BlocksFreed(handles=self._freed)])
            self._freed = []

    def _say(self, progress: LoadProgress) -> None:
        self._link.send([progress])

    def _first_commands(self) -> list[Command]:
        """Wait for the first commands, with which comes the transports' socket."""
        while True:
            commands, fds = self._link.receive_first()
            if fds:
                self._control = socket.socket(fileno=fds[0])
            if commands:
                return commands
            self._link.wait(None)

    def _say_last(self, *events: Event) -> None:
        """Send the last events and give the node up to `_LAST_WORDS` to read them."""
        try:
            self._link.send(events)
            until = self._clock.now() + _LAST_WORDS
            while self._link.unsent and (rest := until - self._clock.now()) > 0:
                self._link.wait(rest)
                self._link.receive()
                self._link.flush()
        except (CoreSocketClosed, ProtocolError):
            pass

    def _close(self) -> None:
        """Close the core. After a failure it may be in any state, so errors are only logged."""
        core, self._core = self._core, None
        try:
            if core is not None:
                core.close()
        except Exception:
            _log.exception("the engine core could not be closed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cores of this process, which `child` has begun."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.engine_core.child")
    parser.add_argument(
        "--fd", type=int, action="append", required=True, help="an inherited socket, one per core"
    )
    parser.add_argument(
        "--page", type=int, action="append", required=True, help="memory, one per core"
    )
    parser.add_argument(
        "--ends", type=int, help="inherited pipe: gets the number of cores that end"
    )
    parser.add_argument("--parent", type=int, required=True, help="process to live and die with")
    parser.add_argument("--engine", help="engine to import at once; errors wait for its load")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-fields", nargs="*", default=[], help="NAME=VALUE of each log line")
    arguments = parser.parse_args(argv)
    _become_child(arguments.parent)
    said: dict[str, object] = {"role": "engine"}
    said |= dict(field.split("=", 1) for field in arguments.log_fields)
    said |= {"pid": os.getpid(), "parent": arguments.parent}
    logs.configure(arguments.log_format, arguments.log_level, said=said)
    links = [CoreSocket(socket.socket(fileno=fd)) for fd in arguments.fd]
    pages = [HeartbeatPage.attach(fd) for fd in arguments.page]
    if arguments.engine:
        import_early(arguments.engine)
    if arguments.ends is None:
        return CoreLoop(links[0], SystemClock(), on_ready=_settle_memory, page=pages[0]).run()
    status = _run_together(links, pages, arguments.ends)
    if status:
        # The other cores compute in threads that cannot be stopped, so there is no clean exit.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_together(links: Sequence[CoreSocket], pages: Sequence[HeartbeatPage], ends: int) -> int:
    """Run a thread per core. Returns 0 when all have stopped in order, or at once the first other
    status. The number of each core that has stopped in order is written to the pipe `ends`, as one
    byte."""
    family = WeightSharingGroup()
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(number: int, link: CoreSocket) -> None:
        status = 1
        try:
            host = CoreLoop(
                link,
                SystemClock(),
                family.make_core,
                turn=family.turn,
                on_ready=_settle_memory,
                page=pages[number],
            )
            status = host.run()
        finally:
            ended.put((number, status))

    for number, link in enumerate(links):
        name = f"engine-core-{number}"
        threading.Thread(target=run, args=(number, link), name=name, daemon=True).start()
    for _ in links:
        number, status = ended.get()
        if status:
            return status
        with suppress(OSError):
            os.write(ends, bytes([number]))
    return 0


def _become_child(parent: int) -> None:
    """Exit with the parent, and send stray prints to stderr."""
    faulthandler.enable()
    os.dup2(2, 1)
    die_with_parent(parent)


def _settle_memory() -> None:
    """Exempt what loading has allocated from garbage collection: it lives as long as the
    process."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
