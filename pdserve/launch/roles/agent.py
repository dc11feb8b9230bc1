"""Runs the agent role in a process: it starts workers of this host as planners ask."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.agent.measures import AgentMeasures
from pdserve.agent.processes import SystemProcesses
from pdserve.agent.records import RecordStore
from pdserve.agent.service import AgentService
from pdserve.agent.workers import WorkerCommand, Workers
from pdserve.launch.config.worker_flags import as_arguments, kind_flags, shared_flags
from pdserve.launch.frontend_processes import child_environ
from pdserve.launch.metrics_samples import sample_node
from pdserve.launch.roles.base import node_card, node_report
from pdserve.runtime.status import StatusService
from pdserve.runtime.traces import TraceService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.agent.records import WorkerRecord
    from pdserve.ids import Seconds
    from pdserve.launch.config.resolve import Config
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.status import NodeReport
    from pdserve.runtime.node import Node

__all__ = ["AgentRole", "agent_directory", "with_kept_name"]

_log = logging.getLogger(__name__)

_PROGRAM: Final = "pdserve.launch.worker_main"


def agent_directory(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the agent's records are: as configured, else in the user's state directory."""
    if config.agent.directory:
        return Path(config.agent.directory).expanduser().absolute()
    home = Path(environ.get("HOME") or "/")
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local/state")
    return state / "pdserve" / "agent" / config.cluster.cluster


def with_kept_name(config: Config) -> Config:
    """Returns the configuration with the agent's name of its earlier lives, unless one is given.
    Errors: `ConfigError`."""
    if config.cluster.node_name:
        return config
    host = socket.gethostname().partition(".")[0] or "localhost"
    name = RecordStore(agent_directory(config)).name(f"agent-{host}")
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, node_name=name))


class AgentRole:
    """The agent role. Its workers run on when it ends."""

    def __init__(self, context: RoleContext, node: Node) -> None:
        """Errors: `ConfigError` without slots, and for flags of a kind that no worker takes."""
        config = context.config
        config.agent.validate()
        self.node = node
        self._context = context
        self._kinds = {
            kind: kind_flags(kind, words) for kind, words in config.agent.kinds().items()
        }
        self._store = RecordStore(agent_directory(config))
        self._shared: dict[str, str] = {}
        self.service = AgentService(node, context.degradations)
        self._ready = False
        context.metrics.attach_node(lambda: sample_node(node))
        StatusService(node, self._report, time.time)
        TraceService(node)

    def _report(self) -> NodeReport:
        report = node_report(self._context, self)
        return replace(report, agent=self.service.report()) if self._ready else report

    async def begin(self) -> None:
        """Takes the directory, so that a second agent is found first. Errors: `ConfigError`."""
        self._store.open()

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)
        self._shared = shared_flags(self._context.config, self.node.address)
        workers = Workers(
            self._context.config.agent.slots,
            self._kinds,
            self._store,
            SystemProcesses(),
            self._command,
            self.node.id,
            AgentMeasures(self._context.metrics, self._kinds),
        )
        self.service.begin(workers)
        self._ready = True
        self.node.publish_card(node_card(self._context, "agent"), {})
        _log.info(
            "starts workers in slots %s; records and logs in %s",
            *(", ".join(self._kinds), self._store.directory),
        )

    def _command(self, record: WorkerRecord, devices: str) -> WorkerCommand:
        own = {"node-name": record.node, "mode": record.mode, "change": record.change}
        flags = self._shared | self._kinds[record.kind] | own
        # -P: the worker's search path is this process's, without the current directory.
        exit_file = str(self._store.exit_file(record.change))
        words = (sys.executable, "-P", "-m", _PROGRAM, exit_file, *as_arguments(flags))
        return WorkerCommand(words, child_environ(os.environ) | {"CUDA_VISIBLE_DEVICES": devices})

    async def drain(self, timeout: Seconds) -> None:
        """Announces that it starts nothing more. Workers serve on: they are drained one by one."""
        self._set_draining(draining=True)
        if self._ready and self.service.workers.running:
            _log.info(
                "%d workers serve on without this agent; a later one finds them",
                self.service.workers.running,
            )

    async def undo_drain(self) -> None:
        """Starts workers again."""
        self._set_draining(draining=False)

    def _set_draining(self, *, draining: bool) -> None:
        self.service.draining = draining
        if self.node.card is not None:
            self.node.publish_card(replace(self.node.card, draining=draining), {})

    def needed(self) -> str:
        """Never: workers serve without their agent."""
        return ""

    @property
    def left(self) -> int:
        """Number of requests that a drain waits for: an agent has none."""
        return 0

    async def close(self) -> None:
        await self.node.leave()
        await self.node.close()
        self._store.close()

    def unready_reason(self) -> str | None:
        return None if self._ready else "the agent is joining the cluster"
