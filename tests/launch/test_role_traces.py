"""A frontend's traces: in memory for `pdserve trace`, and at a collector."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager

from pdserve import __version__
from pdserve.clock import SystemClock
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import resolve
from pdserve.launch.console import Console
from pdserve.launch.role_traces import RoleTraces
from pdserve.launch.roles.base import RoleContext
from pdserve.messages.trace import TraceQuery
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.rpc_methods import TRACES
from pdserve.tracing.watches import TraceWatches
from tests.support.otlp import FakeCollector, parse_request
from tests.support.traces import make_trace


@asynccontextmanager
async def traces_of(folder, environ=None, **flags):
    """The traces of a frontend with a node of its own."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    config = resolve({"config": "none", **flags}, environ or {}, folder)
    membership, metrics = NodeFactory(config.cluster, private=True), Metrics()
    screen = Console(io.StringIO(), SystemClock())
    context = RoleContext(config, membership, screen, metrics, Degradations(metrics))
    node = membership.node("frontend")
    traces = RoleTraces(context, node)
    traces.start()
    traces.start()
    try:
        yield traces, context, node
    finally:
        await traces.close()
        await node.close()


async def test_a_collector_gets_the_traces_with_who_we_are(tmp_path):
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "team=search,service.version=9",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret",
    }
    async with FakeCollector() as collector:
        endpoint = {"otlp_endpoint": collector.url, "cluster": "c7"}
        async with traces_of(tmp_path, environ, **endpoint) as (traces, context, node):
            traces.sink.add(make_trace())
        assert context.metrics.trace_spans_exported.value == 7
    (request,) = collector.requests
    assert request.headers["x-key"] == "secret"
    (resource,) = parse_request(request.body).resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes} == {
        "service.name": "pdserve",
        "service.instance.id": node.id,
        "service.version": "9",
        "pdserve.cluster": "c7",
        "pdserve.role": "frontend",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "pdserve",
        "telemetry.sdk.version": __version__,
        "team": "search",
    }


async def test_the_services_own_variable_names_it(tmp_path):
    environ = {
        "OTEL_SERVICE_NAME": "chat",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=other",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }
    async with FakeCollector() as collector:
        environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = collector.url
        async with traces_of(tmp_path, environ) as (traces, _, _):
            traces.sink.add(make_trace())
    (request,) = collector.requests
    assert "content-encoding" not in request.headers
    (resource,) = parse_request(request.body).resource_spans
    names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
    assert names == ["chat"]


async def test_nothing_is_sent_where_opentelemetry_is_switched_off(tmp_path, caplog):
    async with FakeCollector() as collector:
        environ = {"OTEL_SDK_DISABLED": "true"}
        async with traces_of(tmp_path, environ, otlp_endpoint=collector.url) as (traces, _, _):
            traces.sink.add(make_trace())
    assert collector.requests == []
    assert "OTEL_SDK_DISABLED" in caplog.text


async def test_certificates_that_cannot_be_used_are_a_degradation_and_no_end(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(file)}
    flags = {"otlp_endpoint": "https://127.0.0.1:1"}
    async with traces_of(tmp_path, environ, **flags) as (traces, context, _):
        traces.sink.add(make_trace())
        assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in context.degradations.reasons()["trace_export"]


async def test_the_memory_answers_whether_there_is_a_collector_or_not(tmp_path):
    async with traces_of(tmp_path) as (traces, context, node):
        watches = TraceWatches()
        traces.serve(watches)
        traces.sink.add(make_trace("req-1"))
        visitor = context.membership.node("router", first=False)
        await node.start()
        await visitor.start(beside=(node.address,))
        try:
            async with asyncio.timeout(10):
                link = await visitor.link(node.id, timeout=5.0)
                query = TraceQuery(id="req-1", watch="tiny", watch_seconds=60.0)
                reply = await link.request(TRACES, query, timeout=5.0)
        finally:
            await visitor.close()
        assert reply.trace == make_trace("req-1")
        assert watches.watching("tiny", SystemClock().now())
