"""The roles as parts of one process, all with the same life: `begin`, `join`, `drain`, `close`.

    begin   whatever can fail at once: addresses, settings; nothing is promised yet
    join    take part in the cluster
    drain   take nothing new, finish what is under way
    close   leave, and let go of everything

Each part has a node of its own, so that one process with three roles and three processes with one
look the same to each other. What a role does is its package's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.engine.carrier import ProcessCarrier
from pdserve.engine.client import ClientOptions, CoreClient
from pdserve.errors import ConfigError, Draining
from pdserve.frontend.cluster import ClusterBackend
from pdserve.frontend.group import GroupMetrics
from pdserve.frontend.service import FrontendService
from pdserve.launch.announce import ready_line, served_line
from pdserve.launch.cpus import read_limits
from pdserve.launch.samples import sample_node
from pdserve.launch.siblings import Siblings, is_sibling
from pdserve.messages.status import FrontendNumbers, Report, RouterNumbers
from pdserve.net.address import join as join_address
from pdserve.router.policies.load import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.status import StatusService
from pdserve.runtime.topics.service import Topics
from pdserve.worker.member import WorkerMember
from pdserve.worker.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.api import EngineState
    from pdserve.ids import Seconds
    from pdserve.launch.cluster import Membership
    from pdserve.launch.config import Config
    from pdserve.launch.screen import Screen
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics, Pages
    from pdserve.observe.node_metrics import NodeSample
    from pdserve.runtime.node import Node

__all__ = ["Context", "FrontendPart", "Part", "RouterPart", "WorkerPart"]

_log = logging.getLogger(__name__)

_MODEL_WAIT: Final[Seconds] = 10.0
"""In one process a loaded model is in the frontend's hands after some messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What the parts of one process share."""

    config: Config
    membership: Membership
    screen: Screen
    metrics: Metrics
    degradations: Degradations


class Part(Protocol):
    """See above."""

    node: Node

    async def begin(self) -> None: ...

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """`seeds`: nodes of this process that have joined."""
        ...

    async def drain(self, timeout: Seconds) -> None: ...

    async def close(self) -> None: ...

    def unready_reason(self) -> str | None:
        """None when the role can do its work, else why not."""
        ...


def _report(context: Context, part: Part) -> Report:
    """What any part says of itself to whoever asks; roles add their numbers."""
    degraded = dict(context.degradations.reasons())
    return Report(reason=part.unready_reason() or "", degraded=degraded)


def _card(context: Context, role: str) -> NodeCard:
    degraded = tuple(sorted(context.degradations.reasons()))
    return replace(context.membership.card(role), degraded=degraded)


class RouterPart:
    """The router role."""

    def __init__(self, context: Context, node: Node) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        config = context.config.router
        self.service = RouterService(
            config,
            load_policy(config.policy),
            node,
            self.topics,
            _card(context, "router"),
            context.degradations,
        )
        self._context = context
        context.metrics.attach_node(self._sample)
        StatusService(node, self._report, time.time)

    def _sample(self) -> NodeSample:
        ledger = self.service.desk.bookings
        return sample_node(
            self.node,
            self.topics,
            routed=self.service.routed,
            refused=self.service.refused,
            bookings=len(ledger),
            bookings_ended={why.value: count for why, count in ledger.ended.items()},
        )

    def _report(self) -> Report:
        routed, refused = self.service.routed, self.service.refused
        numbers = RouterNumbers(routed, refused, len(self.service.desk.bookings))
        return replace(_report(self._context, self), router=numbers)

    async def begin(self) -> None:
        """Nothing can fail before joining."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)
        self.service.open()

    async def drain(self, timeout: Seconds) -> None:
        """Frontends turn to other routers; what was decided is decided."""
        self.service.drain()

    async def close(self) -> None:
        await self.node.leave()
        self.topics.close()
        await self.node.close()

    def unready_reason(self) -> str | None:
        return self.service.unready_reason()


class WorkerPart:
    """The worker role: a node, and an engine in a process of its own."""

    def __init__(
        self,
        context: Context,
        node: Node,
        on_state: Callable[[EngineState, str], None],
    ) -> None:
        config = context.config.worker
        threads = config.threads or read_limits().threads
        self.node = node
        self.topics = Topics(node, node.timers)
        self.service = WorkerService(
            dataclasses.replace(config, threads=threads),
            self._make_engine,
            context.metrics,
            hash_secret=secrets.token_bytes(16),
        )
        self.member = WorkerMember(self.service, node, self.topics, _card(context, "worker"))
        self._context = context
        self._on_state = on_state
        context.metrics.attach_node(lambda: sample_node(node, self.topics))
        StatusService(node, self._report, time.time)

    def _report(self) -> Report:
        return replace(_report(self._context, self), worker=self.member.load())

    def _make_engine(self, spec: EngineSpec) -> CoreClient:
        process = self._context.config.process
        options = ClientOptions(load_timeout=self._context.config.worker.start_timeout)

        def carrier() -> ProcessCarrier:
            return ProcessCarrier(
                log_format=process.log_format,
                log_level=process.log_level,
                on_line=self._context.screen.write_line,
            )

        return CoreClient(spec, options, on_state=self._note_state, make_carrier=carrier)

    def _note_state(self, state: EngineState, reason: str) -> None:
        self.node.call_soon(self.member.tell)  # the engine has the state when this turn ends
        self._on_state(state, reason)

    async def begin(self) -> None:
        """The engine comes after joining, so that others see it load."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)

    async def load(self) -> None:
        """Find the model and start the engine. Errors: see `WorkerService.start`."""
        await self.service.start(self._context.screen.progress)
        self._context.screen.finish()

    async def drain(self, timeout: Seconds) -> None:
        if not await self.member.drain(timeout):
            _log.warning("%d requests did not finish within %g s", self.member.requests, timeout)

    async def close(self) -> None:
        self.member.close()
        await self.node.leave()
        self.topics.close()
        await self.service.stop()
        await self.node.close()

    def unready_reason(self) -> str | None:
        return self.service.unready_reason()


class FrontendPart:
    """The frontend role: HTTP on one side, the cluster on the other."""

    def __init__(
        self, context: Context, node: Node, on_failed: Callable[[BaseException], None]
    ) -> None:
        """`on_failed` hears that the processes which share the port die too often."""
        config = context.config.frontend
        self.node = node
        self.backend = ClusterBackend(node, config, context.degradations)
        self.pages: Pages = context.metrics
        """What a scrape of this process is answered with."""
        if config.group:
            self.pages = GroupMetrics(node, config.group, context.metrics, context.degradations)
        self.siblings = Siblings(context.config, node, on_failed)
        self._on_failed = on_failed
        self.service = FrontendService(
            config, self.backend, context.metrics, context.degradations.reasons(), self.pages
        )
        self._context = context
        context.metrics.attach_node(lambda: sample_node(node, rerouted=self.backend.rerouted))
        StatusService(node, self._report, time.time)

    def _report(self) -> Report:
        service = self.service
        numbers = FrontendNumbers(
            service.active_requests, service.connections, self.backend.rerouted
        )
        return replace(_report(self._context, self), frontend=numbers)

    async def begin(self) -> None:
        """Listen, so that a taken port is known before anything else happens. A sibling has its
        port already, and takes connections once it can serve them: see `announce`."""
        if is_sibling(self._context.config):
            return
        if self._context.config.process.frontends > 1:
            self.service.check_port()
        await self.service.start()

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)
        card = _card(self._context, "frontend")
        http = join_address(self._context.config.frontend.host, self.service.port)
        group = self._context.config.frontend.group
        self.node.publish_card(replace(card, http=http, group=group), {})
        if self._context.config.process.frontends > 1:
            await self.siblings.start(self.service.port, self.node.address)

    async def wait_model(self) -> bool:
        """Wait until the models are here and their text can be dealt with; False if they are not
        within seconds, because the engine restarts, say. Errors: `ConfigError` names a model whose
        tokenizer or template will not do."""
        until = self.node.now() + _MODEL_WAIT
        while self.backend.unready_reason() is not None:
            if self.node.now() >= until:
                return False
            await self.backend.wait_news()
        await self.service.make_models()
        return True

    async def announce(self) -> None:
        """Say once that requests are served, whenever that comes."""
        while self.backend.unready_reason() is not None:
            await self.backend.wait_news()
        config = self._context.config.frontend
        if is_sibling(self._context.config):
            await self._take_part()
            return
        await self.service.make_models()
        for card in tuple(self.backend.cards().values())[:1]:  # none, if it went this moment
            _log.info("%s", served_line(config, self.service.port, card))

    async def _take_part(self) -> None:
        try:
            await self.service.start()
        except ConfigError as error:
            self._on_failed(error)
            raise
        _log.info("process %d serves on port %d, too", os.getpid(), self.service.port)

    def announce_engine(self, worker: WorkerService) -> None:
        """The same where the engine is in this process, with what it is."""
        cards, capabilities = self.backend.cards(), worker.capabilities
        if capabilities is not None and cards:  # else it died this moment, and restarts
            card = next(iter(cards.values()))
            config = self._context.config.frontend
            _log.info("%s", ready_line(config, self.service.port, card, capabilities))

    async def drain(self, timeout: Seconds) -> None:
        if self.node.card is not None:
            self.node.publish_card(replace(self.node.card, draining=True), {})
        await asyncio.gather(self.siblings.stop(timeout), self.service.stop(timeout))

    async def close(self) -> None:
        await self.service.stop(0.0)
        self.backend.close(Draining("the server is shutting down", retry_after=1.0))
        await self.node.leave()
        await self.node.close()

    def unready_reason(self) -> str | None:
        return self.backend.unready_reason()
