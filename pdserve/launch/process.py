"""Runs one pdserve process: starts its roles in order and stops them in order.

The order: start the engine process, which imports meanwhile, listen (so that a port in use is found
before a model loads, and `/health` can report loading), join, load, announce, serve, drain, leave,
close. The first signal drains, the second ends the process at once. The roles make the decisions;
this file only orders them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import importlib
import io
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve import __version__, accel
from pdserve.clock import SystemClock
from pdserve.errors import ConfigError, EngineDied, HandshakeRefused, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.cluster import admin_socket
from pdserve.launch.cluster.advertise_check import watch_advertised_name
from pdserve.launch.cluster.membership_log import log_member_event
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import has_worker_pair, roles_of
from pdserve.launch.config.startup_log import log_config_sources, log_listening, warn_about_config
from pdserve.launch.console import Console
from pdserve.launch.frontend_processes import is_child_frontend, with_shared_port
from pdserve.launch.roles.base import RoleContext
from pdserve.net.address import join
from pdserve.observe import logs
from pdserve.observe.degraded import Degradations
from pdserve.observe.loop_lag import LoopLagMonitor
from pdserve.observe.metrics import Metrics
from pdserve.observe.probes import ProbeServer
from pdserve.runtime.orders.drain import Drain, requests_in_words
from pdserve.runtime.tasks import Tasks, close_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.admin_door import AdminDoor
    from pdserve.launch.config.resolve import Config
    from pdserve.launch.early_engine import EarlyEngine
    from pdserve.launch.roles.base import Role
    from pdserve.launch.roles.frontend import FrontendRole
    from pdserve.launch.roles.worker import WorkerRole
    from pdserve.runtime.node import Node
    from pdserve.worker.config import WorkerConfig

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO: Seconds = 0.3
"""A signal this many seconds after the first one is a repetition: `timeout`, and shells that
forward signals, deliver it twice, to the process and to its group."""
_COLLECT_AFTER = (10_000, 10, 5)
"""Thresholds of the garbage collector: containers made and not freed, then runs of the generation
before. Python's own thresholds cost a frontend 6 % of its time. Requests and
connections leave no cycles, but some errors do, by their tracebacks; what has outlived the young
generations is freed after 500,000 containers."""
_CONSEQUENCES: Seconds = 3.0
"""Seconds after one engine's failure in which others can report theirs."""
_SIBLING = (
    "this is one of several frontend processes that share a port, and would be started again: "
    "drain the first of them, which is in charge of all"
)


def serve(config: Config) -> int:
    """Serves until a signal; returns the exit status."""
    _report_crashes()
    # A service manager may start this process without standard error.
    screen = Console(sys.stderr or io.StringIO(), SystemClock())
    said: dict[str, object] = {
        "role": config.process.role,
        "cluster": config.cluster.cluster,
        "pid": os.getpid(),
    }
    logs.configure(config.process.log_format, config.process.log_level, screen, said)
    metrics = Metrics()
    metrics.names = config.process.metrics_names
    degradations = Degradations(metrics)
    _note_degradations(degradations)
    _raise_file_limit(config.frontend.max_connections)
    try:
        runner = asyncio.Runner(loop_factory=_loop_factory(degradations))
        try:
            return runner.run(ServerProcess(config, screen, metrics, degradations, said).run())
        finally:
            close_runner(runner)
    except PdserveError as error:
        screen.finish()
        _log.error("%s", error.message)
        _log.debug("the failed start in detail", exc_info=error)
        return _status_of(error)


def _settle_collector() -> None:
    """Exempts what the start has made from garbage collection, and has the collector run less
    often: hardly anything that a request makes is part of a cycle."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _report_crashes() -> None:
    """Enables stack traces of all threads on standard error if native code crashes; otherwise the
    process would end without a message."""
    if sys.stderr is not None and not faulthandler.is_enabled():
        with suppress(OSError, ValueError):
            # Standard error may not be a file.
            faulthandler.enable()


def _status_of(error: PdserveError) -> int:
    if isinstance(error, HandshakeRefused):
        return exit_codes.CANNOT_JOIN
    if isinstance(error, ConfigError):
        listening = error.param in ("port", "metrics_port", "listen")
        return exit_codes.CANNOT_LISTEN if listening else exit_codes.USAGE
    return exit_codes.ENGINE_FAILED


def _refuse_idle_tls(config: Config) -> None:
    """Raises `ConfigError` if certificates are given and nothing would be encrypted with them."""
    cluster = config.cluster
    files = {"cert": cluster.tls_cert, "key": cluster.tls_key, "ca": cluster.tls_ca}
    given = [name for name, path in files.items() if path is not None]
    if given and config.process.role == "all-in-one" and cluster.alone:
        raise ConfigError(
            f"--tls-{given[0]} encrypts links between nodes, not the API, and this process has no "
            "other nodes: for HTTPS put a proxy that ends TLS before it; for a cluster give "
            "--listen too"
        )


async def _load_all(workers: Sequence[WorkerRole]) -> None:
    """Loads all engines at the same time. If several fail, raises the cause and not its
    consequence: engines that share a process end together, in any order."""
    loads = [asyncio.ensure_future(worker.load()) for worker in workers]
    try:
        if loads:
            await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
        if _failures(loads):
            await asyncio.wait(loads, timeout=_CONSEQUENCES)
            raise _first_cause(_failures(loads))
    finally:
        for each in loads:
            each.cancel()
        await asyncio.gather(*loads, return_exceptions=True)


def _failures(tasks: Sequence[asyncio.Future[None]]) -> list[BaseException]:
    return [error for task in tasks if task.done() and (error := task.exception()) is not None]


def _first_cause(errors: Sequence[BaseException]) -> BaseException:
    """The first cause among simultaneous failures: an engine's own error counts more than its
    unexpected end, which may be the consequence of another engine's failure."""
    return min(errors, key=lambda error: isinstance(error, EngineDied))


class ServerProcess:
    """One process and its roles. Call `run` once, on the loop that it was created for."""

    def __init__(
        self,
        config: Config,
        screen: Console,
        metrics: Metrics,
        degradations: Degradations,
        said: dict[str, object],
    ) -> None:
        """`said`: fields of every log line of this process."""
        _refuse_idle_tls(config)
        self._alone = config.process.role == "all-in-one" and config.cluster.alone
        config = with_shared_port(config)
        if config.process.role == "agent":
            from pdserve.launch.roles.agent import with_kept_name

            config = with_kept_name(config)
        self._config = config
        self._screen = screen
        self._said = said
        role = config.process.role
        self._all_in_one = role == "all-in-one"
        self._membership = NodeFactory(
            config.cluster, private=self._all_in_one and config.cluster.alone
        )
        self._parts: list[Role] = []
        """Roles in the order in which they join; they close in reverse order."""
        self._drain = Drain(
            self._parts,
            config.frontend.drain_timeout,
            self._end,
            _SIBLING if is_child_frontend(config) else "",
        )
        self._context = RoleContext(
            config, self._membership, screen, metrics, degradations, self._drain, said
        )
        self._unheard: list[Callable[[], None]] = []
        """Callbacks that stop logging membership: a node that leaves cannot judge why others
        leave."""
        self._frontend: FrontendRole | None = None
        self._engine: EarlyEngine | None = None
        self._workers: list[WorkerRole] = []
        self._tasks = Tasks("process", on_stuck=self._on_stuck)
        self._probes: ProbeServer | None = None
        self._door: AdminDoor | None = None
        self._lag = LoopLagMonitor(metrics)
        self._signalled: Seconds | None = None
        """Time of the first signal to end; None before it."""
        metrics.build_info.labels(__version__, role).value = 1

    async def run(self) -> int:
        """Runs from listening to closed; returns the exit status.

        Errors: `ConfigError`, `EngineDied`, `HandshakeRefused` if it cannot start.
        """
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._install_signals()
        self._lag.start()
        drain_timeout = 0.0
        try:
            log_config_sources(self._config)
            await self._make_parts()
            self._watch_advertised()
            self._probes = self._make_probes()
            for part in self._parts:
                await part.begin()
            if self._probes is not None:
                await self._probes.start()
                _log.info("probes at http://%s", join(self._probes_host, self._probes.port))
            await self._unless_stopped(self._start())
            _settle_collector()
            status = await self._exit
            drain_timeout = self._config.frontend.drain_timeout
            return status
        finally:
            await self._close(drain_timeout)
            _ignore_signals()

    # ------------------------------------------------------------------ beginning

    async def _make_parts(self) -> None:
        """Creates the roles, with a router first, as the seed of the others in this process. The
        engine process starts before any of them is imported."""
        names = roles_of(self._config)
        first = self._make_node(names[0], first=True)
        if "worker" in names:
            await self._start_engine()
        for name in names:
            if name == "worker" and has_worker_pair(self._config):
                self._make_pair()
            else:
                node = first if name == names[0] else self._make_node(name)
                self._parts.append(self._make_part(name, node))

    async def _start_engine(self) -> None:
        from pdserve.launch.early_engine import EarlyEngine

        self._engine = EarlyEngine(self._context)
        await self._engine.start()

    def _watch_advertised(self) -> None:
        told = self._config.cluster.advertise
        if told:
            _ = self._tasks.spawn(
                watch_advertised_name(told, self._context.degradations), "advertised name"
            )

    def _make_node(self, role: str, label: str = "", *, first: bool = False) -> Node:
        node = self._membership.node(role, first=first, label=label)
        node.on_superseded = self._on_superseded
        node.on_stuck = self._on_stuck
        self._drain.serve(node)
        if first:
            self._said["node"] = node.id
        # The other nodes of this process get the same events, so only one of them logs.
        if first and not self._membership.private:
            self._unheard.append(node.on_member(log_member_event))
        return node

    def _make_part(self, role: str, node: Node) -> Role:
        """Creates one role; imports only what this role needs, to save time and memory."""
        if role == "router":
            from pdserve.launch.roles.router import RouterRole

            return RouterRole(self._context, node)
        if role == "agent":
            from pdserve.launch.roles.agent import AgentRole

            return AgentRole(self._context, node)
        if role == "worker":
            return self._make_worker(node, self._config.worker, 0)
        if role == "planner":
            from pdserve.launch.roles.planner import PlannerRole

            return PlannerRole(self._context, node)
        from pdserve.launch.roles.frontend import FrontendRole

        own = [part.node.id for part in self._parts if part.node.config.role == "router"]
        self._frontend = FrontendRole(
            self._context, node, self._on_siblings_failed, own[0] if own else None
        )
        return self._frontend

    def _make_pair(self) -> None:
        """Creates a prefill worker and a decode worker; the latter reports for both."""
        from pdserve.launch.roles.all_in_one import worker_pair

        for number, config in enumerate(worker_pair(self._config.worker)):
            node = self._make_node("worker", config.mode)
            self._parts.append(self._make_worker(node, config, number))

    def _make_worker(self, node: Node, config: WorkerConfig, core: int) -> WorkerRole:
        """Creates a worker whose engine is core `core` of the engine process."""
        from pdserve.launch.roles.worker import WorkerRole

        assert self._engine is not None
        launcher = functools.partial(self._engine.launcher, core)
        worker = WorkerRole(
            self._context, node, self._on_given_up, config=config, launcher=launcher
        )
        self._workers.append(worker)
        return worker

    @property
    def _worker(self) -> WorkerRole | None:
        """The worker that takes requests, if this process has one."""
        return self._workers[-1] if self._workers else None

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` unless a signal comes first."""
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
        """Joins, loads and announces. A model whose tokenizer or template fails is not ready,
        whatever the engine reports."""
        if self._frontend is not None and self._frontend.service.listening:
            log_listening(self._config, self._frontend.service.port)
        for part in self._parts:
            await part.join(tuple(p.node.address for p in self._parts if p.node.lives))
            if not self._all_in_one or not self._config.cluster.alone:
                _log.info("%s %s at %s", part.node.config.role, part.node.id, part.node.address)
        await self._open_door()
        warn_about_config(self._config, self._parts[0].node.address)
        await _load_all(self._workers)
        if self._frontend is None:
            return
        if self._worker is None or not await self._frontend.wait_model():
            _ = self._tasks.spawn(self._frontend.announce(), "announce")
            return
        self._screen.finish()
        self._frontend.announce_engine(self._worker.worker.service)

    async def _open_door(self) -> None:
        """Lets this user's commands reach a server that has no cluster. It serves without, too."""
        given = self._config.cluster.admin_socket
        if not self._alone or self._frontend is None or given == "none":
            return
        try:
            port = self._frontend.service.port
            path = Path(given) if given else admin_socket.default_path(port, os.environ)
            door = self._membership.admin_door(path, self._frontend.node)
            await door.open()
        except ConfigError as error:
            self._context.degradations.add(
                "no_admin_socket",
                "`pdserve status`, `top`, `trace` and `drain` do not find this server: "
                f"{error.message}; give another path with --admin-socket, or none to do without",
            )
        else:
            self._door = door
            _log.debug("admin socket at %s", path)

    def _make_probes(self) -> ProbeServer | None:
        port = self._config.process.metrics_port
        if port is None:
            return None
        host, context = self._probes_host, self._context
        pages = context.metrics if self._frontend is None else self._frontend.pages
        return ProbeServer(host, port, pages, context.degradations, self._unready_reason)

    @property
    def _probes_host(self) -> str:
        return self._config.process.metrics_host or self._config.frontend.host

    def _unready_reason(self) -> str | None:
        if self._drain.begun:
            return self._drain.reason()
        reasons = (part.unready_reason() for part in self._parts)
        return next((reason for reason in reasons if reason is not None), None)

    # ------------------------------------------------------------------ end

    def _on_given_up(self) -> None:
        """Ends the process: it cannot serve without that engine."""
        if not self._exit.done():
            self._exit.set_result(exit_codes.ENGINE_FAILED)

    def _on_siblings_failed(self, error: BaseException) -> None:
        """Ends the process, so that a service manager restarts all frontend processes."""
        if not self._exit.done():
            self._exit.set_result(exit_codes.FAILED)

    def _on_superseded(self, reason: str) -> None:
        if not self._exit.done():
            self._exit.set_result(exit_codes.CANNOT_JOIN)

    def _on_stuck(self, words: str) -> None:
        self._context.degradations.add("stuck_tasks", f"{words}: a defect, please report it")

    def _install_signals(self) -> None:
        for number in _STOP_SIGNALS:
            _on_signal(number, functools.partial(self._on_stop_signal, number))
        # `nohup` leaves SIGHUP ignored, and it stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            _on_signal(signal.SIGHUP, self._on_hangup)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._signalled is not None:
            if now - self._signalled < _ECHO or is_child_frontend(self._config):
                # An echo of the first signal is not a second signal. A child frontend leaves the
                # second one to its parent.
                return
            self._screen.finish()
            _log.warning("%s again: ending at once", number.name)
            # The engine core ends when its socket closes.
            os._exit(exit_codes.INTERRUPTED)
        self._signalled = now
        left = requests_in_words(self._drain.left)
        _log.info("%s: finishing %s; again to end at once", number.name, left)
        self._end()

    def _end(self) -> None:
        if not self._exit.done():
            self._exit.set_result(exit_codes.OK)

    def _on_hangup(self) -> None:
        """Handles SIGHUP: the terminal is gone or, without a terminal, the key files are to be read
        again."""
        if sys.stdin is not None and sys.stdin.isatty():
            self._on_stop_signal(signal.SIGHUP)
            return
        if self._frontend is not None:
            self._frontend.siblings.reload()
        self._reload("API keys", self._reload_api_keys)
        self._reload("cluster keys", self._reload_cluster_keys)
        self._reload("certificates", self._membership.reload_certificates)

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
        """Drains and closes every role; a frontend first, since it owns the requests."""
        await self._tasks.close()
        await self._drain.finish(drain_timeout)
        for end in self._unheard:
            end()
        # The parts close concurrently, because each takes about a second to leave the cluster.
        ending = tuple(reversed(self._parts))
        ends = await asyncio.gather(*(part.close() for part in ending), return_exceptions=True)
        for part, error in zip(ending, ends, strict=True):
            if error is not None:
                _log.error("the %s did not close in order", part.node.config.role, exc_info=error)
        if self._engine is not None:
            await self._engine.discard()
        if self._probes is not None:
            await self._probes.stop()
        if self._door is not None:
            await self._door.close()
        self._lag.stop()
        await self._drain.close()
        _log.info("closed")


def _ignore_signals() -> None:
    """Ignores further signals: all is closed, and a repeated signal must not change the exit
    status."""
    for number in (*_STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _on_signal(number: signal.Signals, callback: Callable[[], None]) -> None:
    """Calls `callback` on the running loop. Does not use the loop's own handlers: removing one
    restores the default, which kills, for a moment in which a repeated signal may arrive."""
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
    """Records the degradations known before start-up."""
    if not accel.NATIVE:
        degradations.add("pure_twins", f"hot loops run in pure Python: {accel.REASON}")
    if not hasattr(os, "memfd_create"):
        degradations.add("no_memfd", "KV memory cannot be shared with other processes")


def _raise_file_limit(connections: int) -> None:
    """Raises the soft limit of open files, which is often far below the hard one; each connection
    is a file."""
    wanted = connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    if new < wanted:
        _log.warning("%d files may be open: fewer than --max-connections allows", new)
