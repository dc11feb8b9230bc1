"""Runs the frontend role in a process, with the other processes that share its port."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.frontend.api.metrics_group import GroupMetrics
from pdserve.frontend.node import FrontendNode
from pdserve.frontend.service import FrontendService
from pdserve.launch.frontend_processes import FrontendProcesses, is_child_frontend
from pdserve.launch.metrics_samples import sample_node
from pdserve.launch.ready_message import ready_line, served_line
from pdserve.launch.recent_windows import FrontendRecent
from pdserve.launch.role_traces import RoleTraces
from pdserve.launch.roles.base import node_card, node_report
from pdserve.messages.status import FrontendStats
from pdserve.net.address import join as join_address
from pdserve.runtime.status import StatusService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeId, Seconds
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.status import NodeReport
    from pdserve.observe.scrapes import ScrapeHandler
    from pdserve.runtime.node import Node
    from pdserve.worker.service import WorkerService

__all__ = ["FrontendRole"]

_log = logging.getLogger(__name__)

_MODEL_WAIT: Final[Seconds] = 10.0
"""Seconds; in one process a loaded model reaches the frontend after a few messages."""


class FrontendRole:
    """The frontend role: HTTP on one side, the cluster on the other."""

    def __init__(
        self,
        context: RoleContext,
        node: Node,
        on_failed: Callable[[BaseException], None],
        own_router: NodeId | None = None,
    ) -> None:
        """`on_failed` is called when the processes that share the port die too often. `own_router`:
        the router in this process."""
        config = context.config.frontend
        self.node = node
        secrets = context.membership.secrets(node, context.degradations)
        self.frontend = FrontendNode(
            node, config, secrets, context.degradations, context.metrics, own_router
        )
        self.backend = self.frontend.backend
        self.pages: ScrapeHandler = context.metrics
        """Answers a scrape of this process."""
        if config.group:
            self.pages = GroupMetrics(node, config.group, context.metrics, context.degradations)
        self.siblings = FrontendProcesses(context.config, node, on_failed)
        self._on_failed = on_failed
        self.traces = RoleTraces(context, node)
        self.service = FrontendService(
            config,
            self.backend,
            context.metrics,
            context.degradations.reasons(),
            self.pages,
            self.frontend.hasher,
            context.degradations,
            self.traces.sink,
        )
        self._context = context
        context.metrics.attach_node(lambda: sample_node(node, rerouted=self.backend.rerouted))
        self._recent = FrontendRecent(context.metrics, node.now)
        self.service.on_second = self._recent.note
        StatusService(node, self._report, time.time)
        self.traces.serve(self.service.tracer.watches)

    def _report(self) -> NodeReport:
        service = self.service
        recent, minute = self._recent.windows()
        numbers = FrontendStats(
            service.active_requests,
            service.connections,
            self.backend.rerouted,
            recent=recent,
            minute=minute,
        )
        return replace(node_report(self._context, self), frontend=numbers)

    async def begin(self) -> None:
        """Listens, so that a port in use is found first. A child frontend does not listen yet: it
        has its port, and takes connections once it can serve them."""
        self.traces.start()
        if is_child_frontend(self._context.config):
            return
        if self._context.config.process.frontends > 1:
            self.service.check_port()
        await self.service.start()

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.frontend.join(seeds)
        http = join_address(self._context.config.frontend.host, self.service.port)
        group = self._context.config.frontend.group
        card = replace(node_card(self._context, "frontend"), http=http, group=group)
        self.node.publish_card(card, {})
        if self._context.config.process.frontends > 1:
            await self.siblings.start(self.service.port, self.node.address)

    async def wait_model(self) -> bool:
        """Waits until every served model has its tokenizer and templates; returns False if there is
        no model within `_MODEL_WAIT` seconds, for example because the engine restarts. Errors:
        `ConfigError` names a model whose tokenizer or template is not usable."""
        until = self.node.now() + _MODEL_WAIT
        while self.backend.unready_reason() is not None:
            if self.node.now() >= until:
                return False
            await self.backend.wait_change()
        await self.service.make_models()
        return True

    async def announce(self) -> None:
        """Logs once, when requests can be served, what is served. A child frontend starts to listen
        then."""
        while self.backend.unready_reason() is not None:
            await self.backend.wait_change()
        config = self._context.config.frontend
        if is_child_frontend(self._context.config):
            await self._take_part()
            return
        while (model := await self.service.usable_model()) is None:
            await self.backend.wait_change()
        _log.info("%s", served_line(config, self.service.port, model))

    async def _take_part(self) -> None:
        try:
            await self.service.start()
        except ConfigError as error:
            self._on_failed(error)
            raise
        _log.info("process %d serves on port %d, too", os.getpid(), self.service.port)

    def announce_engine(self, worker: WorkerService) -> None:
        """Logs what is served and the engine's limits; for an engine in this process."""
        cards, capabilities = self.backend.cards(), worker.engine.capabilities
        # Without capabilities the engine has just died and restarts.
        if capabilities is not None and cards:
            model = next(iter(cards.values()))
            config = self._context.config.frontend
            _log.info("%s", ready_line(config, self.service.port, model, capabilities))

    async def drain(self, timeout: Seconds) -> None:
        if self.node.card is not None:
            self.node.publish_card(replace(self.node.card, draining=True), {})
        await asyncio.gather(self.siblings.stop(timeout), self.service.stop(timeout))

    async def undo_drain(self) -> None:
        await self.service.undo_stop()
        if self.node.card is not None:
            self.node.publish_card(replace(self.node.card, draining=False), {})
        if self._context.config.process.frontends > 1:
            await self.siblings.restart(self.service.port, self.node.address)

    def needed(self) -> str:
        return ""  # a planner drains none

    @property
    def left(self) -> int:
        return self.service.active_requests

    async def close(self) -> None:
        async with AsyncExitStack() as ends:
            # Each follows even if the one before it fails: the node leaves the cluster, whatever
            # became of its traces.
            ends.push_async_callback(self.frontend.close)
            ends.push_async_callback(self.traces.close)
            await self.service.stop(0.0)

    def unready_reason(self) -> str | None:
        return self.backend.unready_reason()
