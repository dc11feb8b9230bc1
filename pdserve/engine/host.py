"""Runs one core behind a socket: in a process of its own (`python -m pdserve.engine.host`), or in
a thread of the parent, with the same code.

Between steps it takes commands without waiting; when the core is idle it sleeps until a command
comes or a deadline passes. It ends by a `Stop` command, with the core (`Failed`), or when the
other end of the socket closes: a core never outlives the node it belongs to. If the node reads too
slowly, no further step is computed until it has caught up; events are never dropped.

It knows no engine and no model. `CoreClient` is its counterpart and only user.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine.link import LinkClosed, LinkEnd
from pdserve.engine.load import load_core
from pdserve.engine.rejection import failed
from pdserve.errors import ConfigError, PdserveError, ProtocolError
from pdserve.messages.engine import Failed, Ready, Start, Stop, Stopped
from pdserve.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.clock import Clock
    from pdserve.engine.core import Core
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command, Event

__all__ = ["CoreHost", "main"]

_log = logging.getLogger(__name__)

_LAST_WORDS: Seconds = 2.0
"""How long a host that ends waits for the other side to read its last events."""

_PR_SET_PDEATHSIG = 1


class CoreHost:
    """Drives one core from `Start` to its end."""

    def __init__(
        self,
        link: LinkEnd,
        clock: Clock,
        make_core: Callable[[str, Clock], Core] = load_core,
        *,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._clock = clock
        self._make_core = make_core
        self._on_ready = on_ready
        self._core: Core | None = None

    def run(self) -> int:
        """Returns the exit status: 0 after an orderly end, 1 after a failure."""
        try:
            return self._run()
        except LinkClosed:
            return 0
        except Exception as error:  # the last chance to say what happened
            if not isinstance(error, PdserveError):
                _log.exception("the engine core broke down")
            self._say_last(failed(error))
            return 1
        finally:
            self._close()
            self._link.close()

    def _run(self) -> int:
        first, *commands = self._first_commands()
        core = self._load(first)
        self._on_ready()
        while True:
            commands += self._link.receive()
            for command in commands:
                if isinstance(command, Stop):
                    self._core = None
                    self._say_last(Stopped(leaked_blocks=core.close()))
                    return 0
                core.handle(command)
            commands.clear()
            self._link.flush()
            if self._link.congested:
                self._link.wait(None)
                continue
            patience = self._patience(core)
            if patience is not None and patience <= 0:
                events = core.step()
                self._link.send(events)
                if events and isinstance(events[-1], Failed):
                    self._say_last()
                    return 1
            else:
                self._link.wait(patience)

    def _patience(self, core: Core) -> Seconds | None:
        """How long nothing has to be done unless a command comes; None: for ever."""
        if core.has_work:
            return 0.0
        due = core.wake_at()
        return None if due is None else due - self._clock.now()

    def _load(self, command: Command) -> Core:
        if not isinstance(command, Start):
            raise ProtocolError(f"{type(command).__name__} came before Start")
        self._core = core = self._make_core(command.spec.engine, self._clock)
        try:
            capabilities = core.load(command.spec, lambda progress: self._link.send([progress]))
        except (PdserveError, LinkClosed):
            raise
        except ImportError as error:
            raise ConfigError(f"engine {command.spec.engine!r}: {error}") from error
        self._link.send([Ready(capabilities=capabilities)])
        return core

    def _first_commands(self) -> list[Command]:
        """Whatever has arrived when something has."""
        while not (commands := self._link.receive()):
            self._link.wait(None)
        return commands

    def _say_last(self, *events: Event) -> None:
        """Send and give the other side a moment to read."""
        try:
            self._link.send(events)
            until = self._clock.now() + _LAST_WORDS
            while self._link.unsent and (rest := until - self._clock.now()) > 0:
                self._link.wait(rest)
                self._link.receive()
                self._link.flush()
        except (LinkClosed, ProtocolError):
            pass

    def _close(self) -> None:
        """After a failure the core may be in any state: what its end brings up is only logged."""
        core, self._core = self._core, None
        try:
            if core is not None:
                core.close()
        except Exception:
            _log.exception("the engine core could not be closed")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the child process that `CoreClient` starts."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.engine.host")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process to live and die with")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args(argv)
    _become_child(arguments.parent)
    logs.configure(arguments.log_format, arguments.log_level)
    link = LinkEnd(socket.socket(fileno=arguments.fd))
    return CoreHost(link, SystemClock(), on_ready=_settle_memory).run()


def _become_child(parent: int) -> None:
    """Die with the parent, leave signals to it, keep stray prints out of its output."""
    # Terminals send Ctrl-C and service managers SIGTERM to every process; the node drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    os.dup2(2, 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone already")


def _settle_memory() -> None:
    """What loading left behind lives as long as the process: the collector need not visit it."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
