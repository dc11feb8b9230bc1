"""Runs several frontend processes on one port: the first starts, restarts and stops the others.

Each is a whole frontend with its own node, on the same port by SO_REUSEPORT. It gets its
configuration through a pipe and ends when that pipe closes, so it never outlives the first process.
A process that dies is restarted after a pause; too many deaths fail the whole group. The frontend
role owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Final

from pdserve.errors import Unavailable
from pdserve.launch.config.options import BY_NAME
from pdserve.launch.config.resolve import PREFIX, RESERVED, RESERVED_PREFIXES
from pdserve.launch.config.worker_flags import joining_flags
from pdserve.runtime.supervisor import ChildSpec, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds
    from pdserve.launch.config.resolve import Config
    from pdserve.runtime.node import Node

__all__ = [
    "FrontendProcesses",
    "child_environ",
    "child_frontend_flags",
    "is_child_frontend",
    "with_shared_port",
]

_log = logging.getLogger(__name__)

_MARGIN: Final[Seconds] = 6.0
"""Time after the drain to finish responses, leave the cluster and close."""
_PROGRAM: Final = "pdserve.launch.frontend_main"
_OWN: Final = (
    *("role", "config", "frontends", "port", "metrics-port", "metrics-host"),
    *("node-name", "listen", "advertise", "join", "change"),
)
"""Options that the other processes get with different values, or not at all."""


def with_shared_port(config: Config) -> Config:
    """Return the configuration of the first frontend process; unchanged without `--frontends`."""
    process, cluster = config.process, config.cluster
    if process.frontends == 1 or process.role not in ("all-in-one", "frontend"):
        return config
    if process.role == "all-in-one" and cluster.alone:
        # The other processes cannot reach a network in memory. Port 0 takes any free port and
        # leaves the default one to a cluster.
        cluster = dataclasses.replace(cluster, listen="127.0.0.1:0")
    group = f"frontends-{secrets.token_hex(4)}"
    frontend = dataclasses.replace(config.frontend, reuse_port=True, group=group)
    return dataclasses.replace(config, frontend=frontend, cluster=cluster)


def is_child_frontend(config: Config) -> bool:
    """Return True if this process was started by the first frontend process."""
    return bool(config.frontend.group) and config.process.frontends == 1


def child_frontend_flags(config: Config, port: int, seed: str, number: int) -> dict[str, str]:
    """Flags for frontend process `number`: those of this process, except what only one process can
    have.

    Args: `port` is the shared one, `seed` a node of this process.
    """
    cluster = config.cluster
    passed = ["frontend", "process", "cluster"]
    if config.process.with_router:
        passed.append("router")
    flags = {
        name: text
        for name, text in config.given.items()
        if name not in _OWN and BY_NAME[name].target.partition(".")[0] in passed
    }
    flags |= {"role": "frontend", "config": "none", "port": str(port)}
    flags |= joining_flags(cluster, seed)
    if cluster.node_name:
        flags["node-name"] = f"{cluster.node_name}-frontend-{number}"
    return flags


class FrontendProcesses:
    """Supervises the other frontend processes. `start`, then `stop`, on its node's loop."""

    def __init__(
        self, config: Config, node: Node, on_failed: Callable[[BaseException], None]
    ) -> None:
        """`on_failed` is called once when the restarts are exhausted."""
        self._config = config
        self._node = node
        self._on_failed = on_failed
        self._supervisor: Supervisor | None = None
        self._running: dict[int, _Sibling] = {}
        self._stopping = False

    async def start(self, port: int, seed: str) -> None:
        """Start all processes, without waiting until they listen. Errors: `OSError`."""
        numbers = range(2, self._config.process.frontends + 1)

        def spec(number: int) -> ChildSpec:
            flags = child_frontend_flags(self._config, port, seed, number)
            timeout = self._config.frontend.drain_timeout + _MARGIN
            return ChildSpec(
                f"frontend {number}", lambda: self._launch(number, flags), stop_timeout=timeout
            )

        self._supervisor = Supervisor(
            "frontends", [*map(spec, numbers)], tasks=self._node.tasks, random=self._node.random
        )
        self._supervisor.when_ended(self._ended)
        await self._supervisor.start()

    def reload(self) -> None:
        """Make all processes reload their key files."""
        for sibling in tuple(self._running.values()):
            sibling.send(signal.SIGHUP)

    async def stop(self, timeout: Seconds) -> None:
        """Drain all processes at once for `timeout`, then kill those that are left some seconds
        later. Idempotent."""
        self._stopping = True
        for sibling in tuple(self._running.values()):
            if timeout > 0:
                sibling.send(signal.SIGTERM)
            else:
                sibling.let_go()
        if self._supervisor is not None:
            await self._supervisor.stop(timeout=timeout + _MARGIN)

    async def restart(self, port: int, seed: str) -> None:
        """Start the processes again after a `stop` that was cancelled or has ended, each when its
        predecessor has gone; one that was told to end cannot be kept."""
        _ = self._node.tasks.spawn(self._restart(port, seed), "start frontends again")

    async def _restart(self, port: int, seed: str) -> None:
        await self.stop(self._config.frontend.drain_timeout)
        self._stopping = False
        await self.start(port, seed)

    async def _launch(self, number: int, flags: dict[str, str]) -> _Sibling:
        sibling = await _Sibling.launch(number, flags, self._config.frontend.group)
        self._running[number] = sibling
        sibling.when_ended(lambda error: self._gone(number, sibling, error))
        _ = self._node.tasks.spawn(sibling.watch(), f"watch frontend {number}")
        return sibling

    def _gone(self, number: int, sibling: _Sibling, error: BaseException | None) -> None:
        if self._running.get(number) is sibling:
            del self._running[number]
        if not self._stopping:
            why = "ended by itself" if error is None else str(error)
            _log.warning("frontend %d (process %d) %s", number, sibling.pid, why)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and not self._stopping:
            self._on_failed(error)


class _Sibling:
    """One run of one frontend process; a `runtime.supervisor.SupervisedChild`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._error: BaseException | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @staticmethod
    async def launch(number: int, flags: Mapping[str, str], group: str) -> _Sibling:
        """Start the process and send its configuration."""
        process = await asyncio.create_subprocess_exec(
            # -P: the child's search path is this process's, without the current directory.
            *(sys.executable, "-P", "-m", _PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            env=child_environ(os.environ),
            # In its own session it gets no Ctrl-C from the terminal; this process ends it.
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"flags": dict(flags), "group": group}).encode() + b"\n")
        _log.info("frontend %d is process %d", number, process.pid)
        return _Sibling(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def watch(self) -> None:
        """Wait for the process to end and report it."""
        status = await self._process.wait()
        self.let_go()
        self._error = None if status == 0 else Unavailable(_describe(status))
        self._over.set_result(None)
        for callback in self._callbacks:
            callback(self._error)

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback` when the process has ended, with its error."""
        if self._over.done():
            asyncio.get_running_loop().call_soon(callback, self._error)
        else:
            self._callbacks.append(callback)

    async def stop(self, *, timeout: Seconds) -> None:
        """Stop the process: SIGTERM, then SIGKILL after `timeout`."""
        self.send(signal.SIGTERM)
        await asyncio.wait({self._over}, timeout=timeout)
        if not self._over.done():
            _log.warning("process %d did not end in time: killed", self.pid)
            self.send(signal.SIGKILL)
            await asyncio.wait({self._over}, timeout=_MARGIN)

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def let_go(self) -> None:
        """Close the pipe, which ends the process at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def child_environ(ours: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process. Settings are passed as flags instead, and the import
    path is this process's."""
    kept = {
        name: value
        for name, value in ours.items()
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(RESERVED_PREFIXES)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
