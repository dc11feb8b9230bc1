"""One process: its roles started in order, and ended in order.

The order of life: listen (so that a taken port is known before a model is loaded, and `/health` can
tell how far loading is), join, load, announce, serve, drain, leave, close. One signal drains, a
second one ends the process at once. What the parts decide is theirs; this file only puts them in
order.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import io
import logging
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from pdserve import __version__, accel
from pdserve.clock import SystemClock
from pdserve.engine.api import EngineState
from pdserve.errors import ConfigError, HandshakeRefused, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.cluster import Membership
from pdserve.launch.config import idle_flags, splits
from pdserve.launch.drain import Drain, requests_in_words
from pdserve.launch.parts.base import Context
from pdserve.launch.screen import Screen
from pdserve.launch.siblings import is_sibling, sharing
from pdserve.launch.witness import note_member
from pdserve.net.address import is_loopback
from pdserve.observe import logs
from pdserve.observe.degraded import Degradations
from pdserve.observe.loop_lag import LoopLagMonitor
from pdserve.observe.metrics import Metrics
from pdserve.observe.probes import ProbeServer
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pdserve.ids import Seconds
    from pdserve.launch.config import Config
    from pdserve.launch.parts.base import Part
    from pdserve.launch.parts.frontend import FrontendPart
    from pdserve.launch.parts.worker import WorkerPart
    from pdserve.runtime.node import Node

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO: Seconds = 0.3
"""A signal this soon after the first is the same wish: `timeout` and shells that forward a signal
deliver it twice, to the process and to its group."""
_SIBLING = (
    "this is one of several frontend processes that share a port, and would be started again: "
    "drain the first of them, which is in charge of all"
)


def serve(config: Config) -> int:
    """Serve until a signal says otherwise; returns the exit status."""
    # A service manager may start us without a standard error.
    screen = Screen(sys.stderr or io.StringIO(), SystemClock())
    logs.configure(config.process.log_format, config.process.log_level, screen)
    metrics = Metrics()
    degradations = Degradations(metrics)
    _note_degradations(degradations)
    _raise_file_limit(config.frontend.max_connections)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(degradations)) as runner:
            return runner.run(Process(config, screen, metrics, degradations).run())
    except PdserveError as error:
        screen.finish()
        _log.error("%s", error.message)
        _log.debug("the failed start in detail", exc_info=error)
        return _status_of(error)


def _status_of(error: PdserveError) -> int:
    if isinstance(error, HandshakeRefused):
        return exit_codes.CANNOT_JOIN
    if isinstance(error, ConfigError):
        listening = error.param in ("port", "metrics_port", "listen")
        return exit_codes.CANNOT_LISTEN if listening else exit_codes.USAGE
    return exit_codes.ENGINE_FAILED


class Process:
    """One process and its roles. `run` once, on the loop that it is made for."""

    def __init__(
        self, config: Config, screen: Screen, metrics: Metrics, degradations: Degradations
    ) -> None:
        config = sharing(config)
        self._config = config
        self._screen = screen
        role = config.process.role
        self._all_in_one = role == "all-in-one"
        self._membership = Membership(
            config.cluster, private=self._all_in_one and config.cluster.alone
        )
        self._parts: list[Part] = []
        """In the order in which they join; they end the other way round."""
        self._drain = Drain(
            self._parts,
            config.frontend.drain_timeout,
            self._end,
            _SIBLING if is_sibling(config) else "",
        )
        self._context = Context(
            config, self._membership, screen, metrics, degradations, self._drain
        )
        self._unheard: list[Callable[[], None]] = []
        """Each ends what the log tells of members: who leaves does not judge who leaves too."""
        self._frontend: FrontendPart | None = None
        self._workers: list[WorkerPart] = []
        self._tasks = Tasks("process")
        self._probes: ProbeServer | None = None
        self._lag = LoopLagMonitor(metrics)
        self._signalled: Seconds | None = None
        """When the first signal came to end it; None: there was none."""
        metrics.build_info.labels(__version__, role).value = 1

    async def run(self) -> int:
        """From listening to closed; returns the exit status.

        Errors: `ConfigError`, `EngineDied`, `HandshakeRefused` when it cannot start.
        """
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._install_signals()
        self._lag.start()
        drain_timeout = 0.0
        try:
            self._make_parts()
            self._probes = self._make_probes()
            for part in self._parts:
                await part.begin()
            if self._probes is not None:
                await self._probes.start()
                _log.info("probes on port %d", self._probes.port)
            await self._unless_stopped(self._start())
            status = await self._exit
            drain_timeout = self._config.frontend.drain_timeout
            return status
        finally:
            await self._close(drain_timeout)
            _ignore_signals()

    # ------------------------------------------------------------------ beginning

    def _make_parts(self) -> None:
        """A router first, as the seed of the others in this process."""
        role = self._config.process.role
        roles = ("router", "worker", "frontend") if self._all_in_one else (role,)
        for name in roles:
            if name == "worker" and splits(self._config):
                self._make_pair()
            else:
                self._parts.append(self._make_part(name, self._make_node(name)))

    def _make_node(self, role: str, label: str = "") -> Node:
        node = self._membership.node(role, first=not self._parts, label=label)
        node.on_superseded = self._on_superseded
        self._drain.serve(node)
        if not self._membership.private:
            self._unheard.append(node.on_member(note_member))
        return node

    def _make_part(self, role: str, node: Node) -> Part:
        """Imports what this role needs: what the others need costs time and memory."""
        if role == "router":
            from pdserve.launch.parts.router import RouterPart

            return RouterPart(self._context, node)
        if role == "worker":
            from pdserve.launch.parts.worker import WorkerPart

            worker = WorkerPart(self._context, node, self._on_engine_state)
            self._workers.append(worker)
            return worker
        from pdserve.launch.parts.frontend import FrontendPart

        self._frontend = FrontendPart(self._context, node, self._on_siblings_failed)
        return self._frontend

    def _make_pair(self) -> None:
        """One worker for prompts and one for the rest; the latter answers for both."""
        from pdserve.launch.parts.pair import pair
        from pdserve.launch.parts.worker import WorkerPart

        for config, carrier in pair(self._context):
            node = self._make_node("worker", config.mode)
            worker = WorkerPart(
                self._context, node, self._on_engine_state, config=config, carrier=carrier
            )
            self._workers.append(worker)
            self._parts.append(worker)

    @property
    def _worker(self) -> WorkerPart | None:
        """The one that takes requests, if there is one in this process."""
        return self._workers[-1] if self._workers else None

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` unless a signal comes first."""
        starting = asyncio.get_running_loop().create_task(work, name="start")
        try:
            either: set[asyncio.Future[Any]] = {starting, self._exit}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                await starting
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            self._screen.finish()

    async def _start(self) -> None:
        """Join, load, announce. A model that cannot turn text into tokens is not ready, whatever
        the engine says."""
        if self._frontend is not None and self._frontend.service.listening:
            self._note_listening(self._frontend)
        for part in self._parts:
            await part.join(tuple(p.node.address for p in self._parts if p.node.lives))
            if not self._all_in_one or not self._config.cluster.alone:
                _log.info("%s %s at %s", part.node.config.role, part.node.id, part.node.address)
        self._note_oddities()
        await asyncio.gather(*(worker.load() for worker in self._workers))
        if self._frontend is None:
            return
        if self._worker is None or not await self._frontend.wait_model():
            _ = self._tasks.spawn(self._frontend.announce(), "announce")
            return
        self._screen.finish()
        self._frontend.announce_engine(self._worker.service)

    def _note_listening(self, frontend: FrontendPart) -> None:
        config = self._config.frontend
        doing = "loading" if self._all_in_one else "looking for workers"
        _log.info("listening on %s, port %d; %s", config.host, frontend.service.port, doing)
        if config.api_keys_file is None and not is_loopback(config.host):
            _log.warning("whoever reaches this address may use it: there is no --api-keys-file")

    def _note_oddities(self) -> None:
        """What is allowed and most likely not meant."""
        role = self._config.process.role
        idle = idle_flags(self._config)
        if idle:
            _log.warning("a %s has no use for %s", role, ", ".join(idle))
        mode = self._config.worker.mode
        if self._all_in_one and mode != "aggregated":
            _log.warning(
                "all in one has its own workers: nobody looks at --mode=%s without --role=worker",
                mode,
            )
        if role in ("frontend", "worker") and not self._config.cluster.join:
            address = self._parts[0].node.address
            _log.warning("there is no --join: this %s waits for others, at %s", role, address)

    def _make_probes(self) -> ProbeServer | None:
        port = self._config.process.metrics_port
        if port is None:
            return None
        host, context = self._config.frontend.host, self._context
        pages = context.metrics if self._frontend is None else self._frontend.pages
        return ProbeServer(host, port, pages, context.degradations, self._unready_reason)

    def _unready_reason(self) -> str | None:
        if self._drain.begun:
            return self._drain.reason()
        reasons = (part.unready_reason() for part in self._parts)
        return next((reason for reason in reasons if reason is not None), None)

    # ------------------------------------------------------------------ end

    def _on_engine_state(self, state: EngineState, reason: str) -> None:
        """An engine that served and is given up leaves nothing to serve with."""
        served = self._worker is not None and self._worker.service.cards()
        if state is EngineState.FAILED and served and not self._exit.done():
            self._exit.set_result(exit_codes.ENGINE_FAILED)

    def _on_siblings_failed(self, error: BaseException) -> None:
        """A service manager that sees this process end starts all of them afresh."""
        if not self._exit.done():
            self._exit.set_result(exit_codes.FAILED)

    def _on_superseded(self, reason: str) -> None:
        if not self._exit.done():
            self._exit.set_result(exit_codes.CANNOT_JOIN)

    def _install_signals(self) -> None:
        for number in _STOP_SIGNALS:
            _on_signal(number, functools.partial(self._on_stop_signal, number))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            _on_signal(signal.SIGHUP, self._on_hangup)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._signalled is not None:
            if now - self._signalled < _ECHO or is_sibling(self._config):
                return  # a sibling's impatience is that of the process that started it
            self._screen.finish()
            _log.warning("%s again: ending at once", number.name)
            os._exit(exit_codes.INTERRUPTED)  # the engine core ends with its socket
        self._signalled = now
        left = requests_in_words(self._drain.left)
        _log.info("%s: finishing %s; again to end at once", number.name, left)
        self._end()

    def _end(self) -> None:
        if not self._exit.done():
            self._exit.set_result(exit_codes.OK)

    def _on_hangup(self) -> None:
        """The terminal is gone, or, where there is none, the key files are to be read again."""
        if sys.stdin is not None and sys.stdin.isatty():
            self._on_stop_signal(signal.SIGHUP)
            return
        if self._frontend is not None:
            self._frontend.siblings.reload()
        self._reload("API keys", self._reload_api_keys)
        self._reload("cluster keys", self._reload_cluster_keys)

    def _reload(self, what: str, reload: Callable[[], bool]) -> None:
        try:
            if reload():
                _log.info("SIGHUP: %s read again", what)
        except ConfigError as error:
            _log.error("SIGHUP: the old %s stay in force: %s", what, error.message)

    def _reload_api_keys(self) -> bool:
        if self._frontend is None:
            return False
        if self._config.frontend.api_keys_file is None:
            _log.info("SIGHUP: there is no --api-keys-file to read again")
            return False
        self._frontend.service.reload_api_keys()
        return True

    def _reload_cluster_keys(self) -> bool:
        keys = self._membership.keys
        return keys is not None and keys.reload()

    async def _close(self, drain_timeout: float) -> None:
        """Gate, drain, close; a frontend first, since it owns the requests."""
        await self._tasks.close()
        await self._drain.finish(drain_timeout)
        for end in self._unheard:
            end()
        # Side by side: each says goodbye for about a second.
        ending = tuple(reversed(self._parts))
        ends = await asyncio.gather(*(part.close() for part in ending), return_exceptions=True)
        for part, error in zip(ending, ends, strict=True):
            if error is not None:
                _log.error("the %s did not close in order", part.node.config.role, exc_info=error)
        if self._probes is not None:
            await self._probes.stop()
        self._lag.stop()
        await self._drain.close()
        _log.info("closed")


def _ignore_signals() -> None:
    """All is closed and the exit status decided: an echo of the signal must not change it."""
    for number in (*_STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _on_signal(number: signal.Signals, callback: Callable[[], None]) -> None:
    """Call `callback` on the running loop. Not by the loop's own handlers: taking one of those off
    restores the deadly default for a moment, in which an echo of the signal would kill us."""
    loop = asyncio.get_running_loop()
    signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback))


def _loop_factory(degradations: Degradations) -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop]
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError as error:
        degradations.add("no_uvloop", f"plain asyncio serves, slower: {error}")
        return asyncio.new_event_loop
    return factory


def _note_degradations(degradations: Degradations) -> None:
    """What is known to be poorer before anything starts."""
    if not accel.NATIVE:
        degradations.add("pure_twins", f"hot loops run in pure Python: {accel.REASON}")
    if not hasattr(os, "memfd_create"):
        degradations.add("no_memfd", "KV memory cannot be shared with other processes")


def _raise_file_limit(connections: int) -> None:
    """Each connection is an open file; the soft limit is often far below the hard one."""
    wanted = connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    if new < wanted:
        _log.warning("%d files may be open: fewer than --max-connections allows", new)
