"""Traces of a real server: at a collector that comes and goes, and by `pdserve trace`."""

from __future__ import annotations

import gzip
import http.server
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.server import PATIENCE, Server
from tests.support.otlp import parse_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


class Collector:
    """Listens on a port in a thread; keeps what it has answered with 200."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200:
                    collector.take(gzip.decompress(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        for resource in parse_request(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


class Scene:
    """A server that exports all its traces, and its collector."""

    def __init__(self, server: Server, collector: Collector, environ: dict[str, str]) -> None:
        self.server, self.collector, self.environ = server, collector, environ

    def trace(self, *arguments: str) -> str:
        """What `pdserve trace` prints about this server."""
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", "trace", "--port", str(self.server.port), *arguments],
            env=self.server.environ | self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        return done.stdout

    def ask(self) -> str:
        """Ask something; returns the answer's id, which has the request's."""
        return self.server.post(CHAT, HELLO)["id"].removeprefix("chatcmpl-")


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    own = {"XDG_RUNTIME_DIR": str(runtime)}
    collector = Collector()
    environ = own | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "chat"}
    flags = ("--engine", "instant", "--trace-sample", "1", "--log-requests")
    with collector.listening(), Server(tiny_model, *flags, **environ) as server:
        server.wait_for_line("ready: ")
        yield Scene(server, collector, own)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_request_is_at_the_collector_in_the_terminal_and_in_the_log(scene):
    request = scene.ask()
    scene.server.wait_for_line(rf"requests: POST {CHAT}: 200 .*model=\S+ .*\[{request}\]")
    shown = json.loads(scene.trace(request, "--json"))
    drawn = scene.trace(request[:16], "--ascii")
    assert f"request {request}" in drawn
    assert "decode" in drawn
    ids = {span["span_id"] for span in shown["spans"]}
    until(lambda: ids <= {span.span_id.hex() for span in scene.collector.spans})
    ours = [s for s in scene.collector.spans if s.span_id.hex() in ids]
    assert {span.trace_id.hex() for span in ours} == {shown["trace_id"]}
    assert [span.name for span in ours] == [span["name"] for span in shown["spans"]]
    assert request in scene.trace("--limit", "1", "--json")


def test_a_collector_that_fails_harms_no_request_and_is_reported(scene):
    scene.collector.status = 401
    scene.ask()
    until(lambda: "trace_export" in scene.server.get("/health")[1].get("degraded", {}))
    why = scene.server.get("/health")[1]["degraded"]["trace_export"]
    assert "401" in why
    assert "OTEL_EXPORTER_OTLP_HEADERS" in why
    dropped = scene.server.metric('pdserve_trace_spans_dropped_total{reason="refused"}')
    assert dropped > 0
    assert scene.server.get("/health")[0] == 200
    scene.collector.status = 200
    scene.ask()
    until(lambda: "trace_export" not in scene.server.get("/health")[1].get("degraded", {}))
    assert scene.server.metric("pdserve_trace_spans_exported_total") > 0


def test_a_watch_prints_requests_as_they_end(scene):
    model = scene.server.get("/v1/models")[1]["data"][0]["id"]
    command = ("trace", "--port", str(scene.server.port), "--watch", f"model={model}")
    with subprocess.Popen(
        [sys.executable, "-m", "pdserve", *command, "--for", "1s", "--json"],
        env=scene.server.environ | scene.environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        asked: list[str] = []
        while process.poll() is None and len(asked) < 100:
            asked.append(scene.ask())
            time.sleep(0.1)
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(PATIENCE) == 0
    assert lines
    assert {line["request_id"] for line in lines} <= set(asked)
    assert all("watch" in line["kept"] for line in lines[:1])
