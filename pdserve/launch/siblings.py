"""Frontends that share one port: the first process starts the others, restarts and ends them.

Each sibling is a whole frontend process, with a node of its own, listening on the same port by
SO_REUSEPORT. It gets its configuration from us, through a pipe whose end is also the sign that we
are gone: then it ends at once, whatever ended us. A sibling that dies is started again after a
pause; too many deaths are the failure of the group. Owned by the frontend part.
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
from pdserve.launch.config import PREFIX, RESERVED, RESERVED_PREFIXES
from pdserve.launch.options import BY_NAME
from pdserve.net.address import join, split, without_port
from pdserve.runtime.supervisor import ChildSpec, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds
    from pdserve.launch.config import Config
    from pdserve.runtime.node import Node

__all__ = ["Siblings", "is_sibling", "sharing", "sibling_flags"]

_log = logging.getLogger(__name__)

_MARGIN: Final[Seconds] = 6.0
"""Beyond draining: last words to clients, leaving the cluster, closing."""
_PROGRAM: Final = "pdserve.launch.sibling"
_OWN: Final = (
    *("role", "config", "frontends", "port", "metrics-port"),
    *("node-name", "listen", "advertise", "join"),
)
"""Options that siblings do not take as they are."""


def sharing(config: Config) -> Config:
    """The configuration of the first process of a group; without `--frontends` as it was."""
    process, cluster = config.process, config.cluster
    if process.frontends == 1 or process.role not in ("all-in-one", "frontend"):
        return config
    if process.role == "all-in-one" and cluster.alone:
        # Siblings cannot reach a network in memory; a free port leaves 7700 to others.
        cluster = dataclasses.replace(cluster, listen="127.0.0.1:0")
    group = f"frontends-{secrets.token_hex(4)}"
    frontend = dataclasses.replace(config.frontend, reuse_port=True, group=group)
    return dataclasses.replace(config, frontend=frontend, cluster=cluster)


def is_sibling(config: Config) -> bool:
    """Whether this process was started by the first of its group."""
    return bool(config.frontend.group) and config.process.frontends == 1


def sibling_flags(config: Config, port: int, seed: str, number: int) -> dict[str, str]:
    """Option names and texts for sibling `number`: ours, but for what only one process can have.

    Args: `port` is the shared one, `seed` a node of this process.
    """
    cluster = config.cluster
    flags = {
        name: text
        for name, text in config.given.items()
        if name not in _OWN
        and BY_NAME[name].target.partition(".")[0] in ("frontend", "process", "cluster")
    }
    flags |= {"role": "frontend", "config": "none", "port": str(port)}
    flags["join"] = ",".join(dict.fromkeys((seed, *cluster.join)))
    if cluster.listen:
        flags["listen"] = join(split(cluster.listen)[0], 0)
    if cluster.advertise:
        flags["advertise"] = without_port(cluster.advertise)
    if cluster.node_name:
        flags["node-name"] = f"{cluster.node_name}-frontend-{number}"
    return flags


class Siblings:
    """See above. `start`, then `stop`; on the loop of its node, whose tasks it uses."""

    def __init__(
        self, config: Config, node: Node, on_failed: Callable[[BaseException], None]
    ) -> None:
        """`on_failed` hears once that restarts are exhausted."""
        self._config = config
        self._node = node
        self._on_failed = on_failed
        self._supervisor: Supervisor | None = None
        self._running: dict[int, _Sibling] = {}
        self._stopping = False

    async def start(self, port: int, seed: str) -> None:
        """Start all of them; they listen by and by. Errors: `OSError`."""
        numbers = range(2, self._config.process.frontends + 1)

        def spec(number: int) -> ChildSpec:
            flags = sibling_flags(self._config, port, seed, number)
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
        """Have all read their key files again."""
        for sibling in tuple(self._running.values()):
            sibling.send(signal.SIGHUP)

    async def stop(self, timeout: Seconds) -> None:
        """Let them drain for `timeout`, all at once; whoever is not gone some seconds after that is
        killed. Idempotent."""
        self._stopping = True
        for sibling in tuple(self._running.values()):
            if timeout > 0:
                sibling.send(signal.SIGTERM)
            else:
                sibling.let_go()
        if self._supervisor is not None:
            await self._supervisor.stop(timeout=timeout + _MARGIN)

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
    """One life of one of them; a `supervisor.Child`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._error: BaseException | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @staticmethod
    async def launch(number: int, flags: Mapping[str, str], group: str) -> _Sibling:
        """Start it, and tell it what it is."""
        process = await asyncio.create_subprocess_exec(
            # -P: its search path is ours, not whatever directory we happen to stand in.
            *(sys.executable, "-P", "-m", _PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            env=_environ(os.environ),
            start_new_session=True,  # a terminal's Ctrl-C is for us; we pass on what it means
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"flags": dict(flags), "group": group}).encode() + b"\n")
        _log.info("frontend %d is process %d", number, process.pid)
        return _Sibling(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def watch(self) -> None:
        """Wait for its end, and tell."""
        status = await self._process.wait()
        self.let_go()
        self._error = None if status == 0 else Unavailable(_describe(status))
        self._over.set_result(None)
        for callback in self._callbacks:
            callback(self._error)

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `supervisor.Child`."""
        if self._over.done():
            asyncio.get_running_loop().call_soon(callback, self._error)
        else:
            self._callbacks.append(callback)

    async def stop(self, *, timeout: Seconds) -> None:
        """See `supervisor.Child`: SIGTERM, then, after `timeout`, SIGKILL."""
        self.send(signal.SIGTERM)
        await asyncio.wait({self._over}, timeout=timeout)
        if not self._over.done():
            _log.warning("process %d did not end in time: killed", self.pid)
            self.send(signal.SIGKILL)
            await asyncio.wait({self._over}, timeout=_MARGIN)

    def send(self, number: signal.Signals) -> None:
        """A signal, if it is still there."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def let_go(self) -> None:
        """Close the pipe: it ends at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def _environ(ours: Mapping[str, str]) -> dict[str, str]:
    """What was set by variables has become flags. The child imports exactly what we would."""
    kept = {
        name: value
        for name, value in ours.items()
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(RESERVED_PREFIXES)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
