"""Sets up where the traces of a node go: its memory, and a collector if one is given.

A frontend traces requests, a planner its changes, a worker its mode switches; the role owns the
object. `pdserve trace` is answered from the memory, so it needs no collector.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve import __version__
from pdserve.clock import SystemClock
from pdserve.errors import ConfigError
from pdserve.runtime.traces import TraceService
from pdserve.tracing.answers import TraceAnswers
from pdserve.tracing.export.exporter import TraceExporter
from pdserve.tracing.export.otel_env import without_password
from pdserve.tracing.export.otlp import RequestFrame
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.sink import NO_SINK, TraceSinks

if TYPE_CHECKING:
    from pdserve.frontend.config import FrontendConfig
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.trace import AttributeValue
    from pdserve.runtime.node import Node
    from pdserve.tracing.sink import TraceSink
    from pdserve.tracing.watches import TraceWatches

__all__ = ["RoleTraces", "trace_resource"]

_log = logging.getLogger(__name__)

_NAME: Final = "service.name"


class RoleTraces:
    """The sinks of one node's traces: `start`, then `close`."""

    def __init__(self, context: RoleContext, node: Node, *, export: bool = True) -> None:
        """`export`: False if another role of the process exports its traces; one is enough, and
        mode switches of an all-in-one are in memory only."""
        self._node = node
        self.on = context.config.frontend.trace_rate > 0
        """False: the operator wants no traces."""
        self._where = without_password(context.config.frontend.otlp_endpoint)
        self._ring = TraceRing()
        self._exporter = _exporter(context, node, self._where) if export else None
        sinks: list[TraceSink] = [self._ring]
        if self._exporter is not None:
            sinks.append(self._exporter)
        self.sink: TraceSink = TraceSinks(*sinks, on_lost=context.metrics.traces_lost.inc)
        """Takes the traces that are kept."""

    def serve(self, watches: TraceWatches) -> None:
        """Answer `pdserve trace` about requests; it can also begin watches."""
        answers = TraceAnswers(self._ring, watches, self._node.id, SystemClock().now)
        TraceService(self._node, answers)

    def serve_changes(self) -> TraceSink:
        """Answer `pdserve trace --changes`. Returns the sink for changes."""
        ring, node = self._ring, self._node
        TraceService(node, lambda query: ring.answer(query, node.id), of="changes")
        return self.sink if self.on else NO_SINK

    def start(self) -> None:
        """Begin to export. Idempotent."""
        if self._exporter is not None and not self._exporter.started:
            self._exporter.start()
            _log.info("traces are exported to %s", self._where)

    async def close(self) -> None:
        """Export what is left, for two seconds at most."""
        if self._exporter is not None:
            await self._exporter.close()


def _exporter(context: RoleContext, node: Node, where: str) -> TraceExporter | None:
    config = context.config.frontend
    if not config.otlp_endpoint:
        return None
    if config.otel.disabled:
        _log.warning("OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER: no traces go to %s", where)
        return None
    # Imports aiohttp: only who exports pays for it at the start.
    from pdserve.tracing.export.collector_http import HttpCollector

    try:
        collector = HttpCollector(config.otlp_endpoint, config.otel)
    except ConfigError as error:
        # The variables may be meant for others, too; serving does not depend on them.
        context.degradations.add("trace_export", f"no traces are exported: {error.message}")
        return None
    return TraceExporter(
        collector,
        RequestFrame(trace_resource(config, node, context.config.cluster.cluster)),
        context.metrics,
        context.degradations,
        where=where,
        timeout=config.otel.timeout,
        gzip=config.otel.compression,
    )


def trace_resource(config: FrontendConfig, node: Node, cluster: str) -> dict[str, AttributeValue]:
    """What is said of this process with all its traces. An operator's own words win."""
    own: dict[str, AttributeValue] = {
        _NAME: "pdserve",
        "service.instance.id": node.id,
        "service.version": __version__,
        "pdserve.cluster": cluster,
        "pdserve.role": node.config.role,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "pdserve",
        "telemetry.sdk.version": __version__,
    }
    named = {_NAME: config.otel.service_name} if config.otel.service_name else {}
    return own | dict(config.otel.resource) | named
