"""Runs the planner role in a process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.launch.config.planner_file import read_planner_file
from pdserve.launch.metrics_samples import sample_node
from pdserve.launch.role_traces import RoleTraces
from pdserve.launch.roles.base import node_card, node_report
from pdserve.planner.actuators import Home
from pdserve.planner.driver.decision_log import DecisionLog
from pdserve.planner.driver.ports import LoadForecaster
from pdserve.planner.node import PlannerNode
from pdserve.planner.what_if.judge import WhatIfJudge
from pdserve.runtime.status import StatusService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.status import NodeReport
    from pdserve.observe.node_metrics import NodeSample
    from pdserve.runtime.node import Node

__all__ = ["PlannerRole"]


class PlannerRole:
    """The planner role."""

    def __init__(self, context: RoleContext, node: Node) -> None:
        """Errors: `ConfigError` for a planner file that is missing or cannot work."""
        process = context.config.process
        if process.planner_file is None:
            raise ConfigError(
                "--role=planner needs --planner-file: it names the models, their objectives and "
                "how workers are started; examples/planner.toml is one",
                param="planner_file",
            )
        given = read_planner_file(process.planner_file, process.planner)
        acts = given.config.mode == "act"
        home = Home(node.config.cluster, tuple(_flags(context.config.cluster)), node, acts)
        self.node = node
        self.traces = RoleTraces(context, node)
        self.planner = PlannerNode(
            node,
            given.config,
            node_card(context, "planner"),
            context.membership.secrets(node, context.degradations),
            [kind.make(settings, home) for kind, settings in given.actuators],
            judge=WhatIfJudge(),
            forecaster=lambda: LoadForecaster(time.time),
            wall=time.time,
            log=DecisionLog(time.time, process.planner_log),
            degradations=context.degradations,
            metrics=context.metrics,
            traces=self.traces.serve_changes(),
        )
        self._context = context
        context.metrics.attach_node(self._sample)
        StatusService(node, self._report, time.time)

    def _sample(self) -> NodeSample:
        return sample_node(self.node, self.planner.topics)

    def _report(self) -> NodeReport:
        return replace(node_report(self._context, self), planner=self.planner.service.report())

    async def begin(self) -> None:
        """Does nothing: the file was read before, and actuators are asked after joining."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.planner.join(seeds)
        self.traces.start()

    async def drain(self, timeout: Seconds) -> None:
        """Other planners take over; what it has begun goes on without it."""
        self.planner.drain()

    async def undo_drain(self) -> None:
        self.planner.undo_drain()

    def needed(self) -> str:
        return ""  # without planners nothing changes

    @property
    def left(self) -> int:
        return 0

    async def close(self) -> None:
        await self.planner.close()
        await self.traces.close()

    def unready_reason(self) -> str | None:
        return self.planner.service.unready_reason()


def _flags(cluster: ClusterConfig) -> Iterator[str]:
    """The flags that lead a worker into this cluster."""
    if cluster.join:
        yield f"--join={','.join(cluster.join)}"
    yield f"--cluster={cluster.cluster}"
    for name in ("cluster_key_file", "hash_secret_file", "tls_cert", "tls_key", "tls_ca"):
        path = getattr(cluster, name)
        if path is not None:
            yield f"--{name.replace('_', '-')}={path.absolute()}"
