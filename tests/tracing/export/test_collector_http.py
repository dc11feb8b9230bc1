"""Posts over real HTTP to collectors of every temper, and through the exporter."""

import asyncio
import os
import socket
import ssl
from contextlib import asynccontextmanager

import pytest

from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.tracing.export.collector_http import HttpCollector
from pdserve.tracing.export.exporter import TraceExporter
from pdserve.tracing.export.otel_env import OtelSettings
from pdserve.tracing.export.otlp import RequestFrame
from tests.net.certificates import certificate, folder
from tests.support.otlp import FakeCollector, answer, babble, hang, hang_up, nonsense
from tests.support.traces import make_trace

FRAME = RequestFrame({"service.name": "pdserve"})


@asynccontextmanager
async def client_of(url, **settings):
    client = HttpCollector(url, OtelSettings(**settings))
    try:
        yield client
    finally:
        await client.close()


async def test_a_request_has_the_headers_that_collectors_need():
    async with (
        FakeCollector(answer(200, b"{}", Retry_After="3")) as collector,
        client_of(collector.url, headers={"authorization": "Basic x"}) as client,
    ):
        got = await client.post(b"body", gzip=False, timeout=5.0)
    (request,) = collector.requests
    assert (got.status, got.body, got.retry_after, got.failure) == (200, b"{}", "3", "")
    assert request.line == "POST /v1/traces HTTP/1.1"
    assert request.raw == b"body"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == "Basic x"
    assert request.headers["user-agent"] == f"pdserve/{__version__}"
    assert "content-encoding" not in request.headers


async def test_a_connection_is_used_again():
    async with FakeCollector() as collector, client_of(collector.url) as client:
        for _ in range(3):
            assert (await client.post(b"x", gzip=True, timeout=5.0)).status == 200
        assert len(collector._tasks) == 1
    assert {r.headers["content-encoding"] for r in collector.requests} == {"gzip"}


@pytest.mark.parametrize("status", [204, 301, 307, 400, 429, 503])
async def test_every_status_comes_back_as_it_is(status):
    step = answer(status, b"" if status == 204 else b"{}", Location="http://127.0.0.1:1/")
    async with FakeCollector(step) as collector, client_of(collector.url) as client:
        assert (await client.post(b"x", gzip=False, timeout=5.0)).status == status
    assert len(collector.requests) == 1, "a redirection is not followed"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (hang, "it does not answer within 0.3 s"),
        (hang_up, "closes the connection"),
        (nonsense, "does not speak HTTP"),
    ],
)
async def test_a_collector_that_does_not_answer(step, words):
    async with FakeCollector(step) as collector, client_of(collector.url) as client:
        got = await client.post(b"x", gzip=False, timeout=0.3)
    assert got.status == 0
    assert words in got.failure
    assert got.failure
    assert "\n" not in got.failure


async def test_an_answer_without_end_is_read_for_a_while():
    async with FakeCollector(babble) as collector, client_of(collector.url) as client:
        got = await client.post(b"x", gzip=False, timeout=5.0)
    assert (got.status, len(got.body)) == (200, 64 << 10)


@pytest.mark.filterwarnings("ignore:Sending a large body")
async def test_a_collector_that_reads_nothing_costs_no_connection_per_attempt():
    """It is stopped: its system takes connections and some bytes, and that is all."""
    with socket.socket() as stopped:
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.bind(("127.0.0.1", 0))
        stopped.listen(16)
        async with client_of(f"http://127.0.0.1:{stopped.getsockname()[1]}/") as client:
            body = bytes(8 << 20)  # more than the systems of both take
            open_files = []
            for _ in range(3):
                got = await client.post(body, gzip=False, timeout=0.05)
                assert "does not answer" in got.failure
                open_files.append(len(os.listdir("/dev/fd")))
            posting = asyncio.ensure_future(client.post(body, gzip=False, timeout=9.0))
            await asyncio.sleep(0.05)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await asyncio.sleep(0.05)
            assert len(os.listdir("/dev/fd")) <= min(open_files)
            assert max(open_files) == min(open_files)


async def test_nobody_listens():
    async with FakeCollector() as collector:
        url = collector.url
    async with client_of(url) as client:
        got = await client.post(b"x", gzip=False, timeout=5.0)
    assert got.failure == "it cannot be reached: connection refused"


async def test_a_name_that_is_none():
    async with client_of("http://collector.invalid:4318/v1/traces") as client:
        got = await client.post(b"x", gzip=False, timeout=5.0)
    assert got.failure


async def test_a_password_in_the_url_is_not_told():
    async with client_of("http://user:hunter2@collector.invalid:4318/v1/traces") as client:
        got = await client.post(b"x", gzip=False, timeout=5.0)
    assert "hunter2" not in got.failure


async def test_certificates_that_cannot_be_used_are_an_error(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        HttpCollector("https://c:4318", OtelSettings(certificate=file))
    HttpCollector("http://c:4318", OtelSettings(certificate=file))


# ---------------------------------------------------------------- with the exporter


async def exported(collector, traces, *, until):
    """Export traces until the collector has got so many requests."""
    metrics = Metrics()
    client = HttpCollector(collector.url, OtelSettings())
    exporter = TraceExporter(
        client, FRAME, metrics, Degradations(metrics), where=collector.url, timeout=0.3
    )
    exporter.start()
    for number in range(traces):
        exporter.add(make_trace(f"r{number}"))
    async with asyncio.timeout(20):
        while len(collector.requests) < until or exporter.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await exporter.close()
    dropped = {labels[0]: c.value for labels, c in metrics.trace_spans_dropped}
    return metrics.trace_spans_exported.value, dropped


async def test_spans_arrive_packed_and_whole():
    async with FakeCollector() as collector:
        assert await exported(collector, 100, until=2) == (700, {})
    wanted = [make_trace(f"r{n}").trace_id for n in range(100) for _ in range(7)]
    assert [span.trace_id for span in collector.spans] == wanted


async def test_after_trouble_of_all_kinds_each_span_arrives_once():
    script = (hang_up, answer(429, b"", Retry_After="1"), hang, answer(200))
    async with FakeCollector(*script) as collector:
        assert await exported(collector, 80, until=5) == (560, {})
    assert len(collector.spans) == 560
    assert len({(span.trace_id, span.span_id) for span in collector.spans}) == 560


async def test_partial_success_and_refusal_over_http():
    partial = answer(200, b'{"partialSuccess":{"rejectedSpans":"2","errorMessage":"old"}}')
    async with FakeCollector(partial, answer(400)) as collector:
        counts = await exported(collector, 80, until=2)
    assert counts == (511 - 2, {"rejected": 2, "refused": 49})


def server_tls(authority="ca"):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder() / "ca.pem")
    context.load_cert_chain(*certificate("collector", authority))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def test_both_sides_show_certificates():
    shown, key = certificate("pdserve", "ca")
    own = {"client_certificate": shown, "client_key": key, "certificate": folder() / "ca.pem"}
    async with (
        FakeCollector(tls=server_tls()) as collector,
        client_of(collector.url, **own) as client,
    ):
        assert (await client.post(b"x", gzip=False, timeout=5.0)).status == 200


async def test_a_collector_of_another_authority_gets_nothing():
    async with (
        FakeCollector(tls=server_tls("other-ca")) as collector,
        client_of(collector.url, certificate=folder() / "ca.pem") as client,
    ):
        got = await client.post(b"x", gzip=False, timeout=5.0)
    assert got.failure.startswith("its certificate is not trusted (")
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in got.failure
    assert collector.requests == []
