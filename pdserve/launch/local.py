"""All in one: engine core, worker and frontend started from one process, and ended in order.

The order of life: listen (so that a taken port is known before a model is loaded, and `/health` can
tell how far loading is), load, announce, serve, drain, close. One signal drains, a second one ends
the process at once. What the parts decide is theirs; this file only puts them in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import io
import logging
import os
import resource
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Any

from pdserve import __version__, accel
from pdserve.clock import SystemClock
from pdserve.engine.api import EngineState
from pdserve.engine.carrier import ProcessCarrier
from pdserve.engine.client import ClientOptions, CoreClient
from pdserve.errors import ConfigError, PdserveError
from pdserve.frontend.service import FrontendService
from pdserve.launch import exit_codes
from pdserve.launch.announce import is_loopback, ready_line
from pdserve.launch.cpus import read_limits
from pdserve.launch.screen import Screen
from pdserve.observe import logs
from pdserve.observe.degraded import Degradations
from pdserve.observe.loop_lag import LoopLagMonitor
from pdserve.observe.metrics import Metrics
from pdserve.observe.probes import ProbeServer
from pdserve.worker.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.launch.config import Config
    from pdserve.messages.engine import EngineSpec

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO: Seconds = 0.3
"""A signal this soon after the first is the same wish: `timeout` and shells that forward a signal
deliver it twice, to the process and to its group."""


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
            return runner.run(AllInOne(config, screen, metrics, degradations).run())
    except PdserveError as error:
        screen.finish()
        _log.error("%s", error.message)
        _log.debug("the failed start in detail", exc_info=error)
        return _status_of(error)


def _status_of(error: PdserveError) -> int:
    if isinstance(error, ConfigError):
        listening = error.param in ("port", "metrics_port")
        return exit_codes.CANNOT_LISTEN if listening else exit_codes.USAGE
    return exit_codes.ENGINE_FAILED


class AllInOne:
    """One process that is frontend and worker. `run` once, on the loop that it is made for."""

    def __init__(
        self, config: Config, screen: Screen, metrics: Metrics, degradations: Degradations
    ) -> None:
        threads = config.worker.threads or read_limits().threads
        self._config = config
        self._screen = screen
        self._metrics = metrics
        self._worker = WorkerService(
            dataclasses.replace(config.worker, threads=threads),
            self._make_engine,
            metrics,
            hash_secret=secrets.token_bytes(16),
        )
        self._frontend = FrontendService(
            config.frontend, self._worker, metrics, degradations.reasons()
        )
        self._probes = self._make_probes(degradations)
        self._lag = LoopLagMonitor(metrics)
        self._asked_at: Seconds = 0.0
        metrics.build_info.labels(__version__, config.process.role).value = 1

    async def run(self) -> int:
        """From listening to closed; returns the exit status.

        Errors: `ConfigError`, `EngineDied` when it cannot start.
        """
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._install_signals()
        self._lag.start()
        drain_timeout = 0.0
        try:
            await self._frontend.start()
            if self._probes is not None:
                await self._probes.start()
                _log.info("probes on port %d", self._probes.port)
            await self._load()
            status = await self._exit
            drain_timeout = self._config.frontend.drain_timeout
            return status
        finally:
            await self._close(drain_timeout)
            _ignore_signals()

    # ------------------------------------------------------------------ beginning

    async def _load(self) -> None:
        """Load unless a signal comes first; announce."""
        frontend = self._config.frontend
        _log.info("listening on %s, port %d; loading", frontend.host, self._frontend.port)
        if frontend.api_keys_file is None and not is_loopback(frontend.host):
            _log.warning("whoever reaches this address may use it: there is no --api-keys-file")
        loop = asyncio.get_running_loop()
        starting = loop.create_task(self._start(), name="start")
        try:
            either: set[asyncio.Future[Any]] = {starting, self._exit}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                await starting
                self._screen.finish()
                self._announce()
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            self._screen.finish()

    async def _start(self) -> None:
        """A model that cannot turn text into tokens is not ready, whatever the engine says."""
        await self._worker.start(self._screen.progress)
        await self._frontend.make_models()

    def _announce(self) -> None:
        capabilities, cards = self._worker.capabilities, self._worker.cards()
        if capabilities is not None:  # else it died this moment, and restarts
            card = next(iter(cards.values()))
            frontend = self._config.frontend
            _log.info("%s", ready_line(frontend, self._frontend.port, card, capabilities))

    def _make_engine(self, spec: EngineSpec) -> CoreClient:
        process = self._config.process
        options = ClientOptions(load_timeout=self._config.worker.start_timeout)

        def carrier() -> ProcessCarrier:
            return ProcessCarrier(
                log_format=process.log_format,
                log_level=process.log_level,
                on_line=self._screen.write_line,
            )

        return CoreClient(spec, options, on_state=self._on_engine_state, make_carrier=carrier)

    def _make_probes(self, degradations: Degradations) -> ProbeServer | None:
        port = self._config.process.metrics_port
        if port is None:
            return None
        host = self._config.frontend.host
        return ProbeServer(host, port, self._metrics, degradations, self._worker.unready_reason)

    # ------------------------------------------------------------------ end

    def _on_engine_state(self, state: EngineState, reason: str) -> None:
        """An engine that served and is given up leaves nothing to serve with."""
        if state is EngineState.FAILED and self._worker.cards() and not self._exit.done():
            self._exit.set_result(exit_codes.ENGINE_FAILED)

    def _install_signals(self) -> None:
        for number in _STOP_SIGNALS:
            _on_signal(number, functools.partial(self._on_stop_signal, number))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            _on_signal(signal.SIGHUP, self._on_hangup)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._exit.done():
            if now - self._asked_at < _ECHO:
                return
            self._screen.finish()
            _log.warning("%s again: ending at once", number.name)
            os._exit(exit_codes.INTERRUPTED)  # the engine core ends with its socket
        self._asked_at = now
        running = self._frontend.active_requests
        _log.info("%s: finishing %d requests; again to end at once", number.name, running)
        self._exit.set_result(exit_codes.OK)

    def _on_hangup(self) -> None:
        """The terminal is gone, or, where there is none, the key file is to be read again."""
        if sys.stdin is not None and sys.stdin.isatty():
            self._on_stop_signal(signal.SIGHUP)
            return
        if self._config.frontend.api_keys_file is None:
            _log.info("SIGHUP: there is no --api-keys-file to read again")
            return
        try:
            self._frontend.reload_api_keys()
            _log.info("SIGHUP: API keys read again")
        except ConfigError as error:
            _log.error("SIGHUP: the old API keys stay in force: %s", error.message)

    async def _close(self, drain_timeout: float) -> None:
        """Gate, drain, close; the frontend first, since it owns the requests."""
        await self._frontend.stop(drain_timeout)
        await self._worker.stop()
        if self._probes is not None:
            await self._probes.stop()
        self._lag.stop()
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
