"""A real Prometheus scrapes a real cluster with the files of `pdserve dashboards`, and every
expression of every board and rule has a value.

The condition of an alert is empty while all is well; its operands are not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pdserve.cli.main import main
from pdserve.dashboards.alerts import Promise, alerts, recordings
from pdserve.dashboards.boards import BOARDS
from pdserve.dashboards.table import selected
from tests.e2e.readme import blocks, free_port, wait_sound
from tests.e2e.server import PATIENCE, Server, serving
from tests.support.prometheus import Prometheus, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
WINDOW = "30s"
"""For `$__rate_interval`: longer than the test's load."""
CALLERS = 12
LONG = {"model": "bundled", "prompt": "x", "stream": True, "max_tokens": 1500, "ignore_eos": True}
SEEN = (
    "rate(pdserve_migration_gap_seconds_count[1m]) > 0",
    'rate(pdserve_migrations_total{outcome="completed"}[1m])',
    "rate(pdserve_cancel_seconds_count[1m]) > 0",
    'rate(pdserve_slo_total{result="bad"}[1m])',
    "pdserve_router_held_total > 0",
    "pdserve_router_prediction_ratio",
    "rate(pdserve_trace_spans_dropped_total[1m])",
    'rate(pdserve_transfer_bytes_total{direction="sent"}[1m]) > 0',
    "pdserve:error_budget",
    'vllm:request_success_total{finished_reason="stop"}',
)
"""What must have happened before the expressions are computed."""
QUIET = (
    *("PdserveSplitView", "PdserveScrapeDown", "PdserveTopicDivergence", "PdserveModelConflict"),
    *("PdservePlannerNoOwner", "PdservePlannerChangesFail", "PdservePlannerStartStuck"),
    "PdserveAgentWorkersFail",
)
LOUD = ("PdserveSloBurnFast", "PdserveSloBurn", "PdserveDegraded", "PdserveSpansDropped")
"""Alerts whose conditions must not hold in this cluster, and that must; `for` keeps them silent."""
VLLM_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
)
VLLM_COUNTERS = (
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
)
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
MAY_BE_UNDEFINED = (
    "pdserve_prefill_queue_tokens",  # over tokens per second: 0/0 where no prefill worker works
)
"""Metrics of quotients that may be 0/0 at a moment."""


PLANNED = """
[planner]
tick = "1s"
[[planner.pool]]
model = "bundled"
slo-ttft = "1s"
min = 1
max = 2
"""
"""The planner starts nothing, since it has no actuator, and each worker is the last of its mode."""


class Cluster:
    """Router, frontend, prefill and decode worker, planner and agent, and what clients do."""

    def __init__(
        self,
        *others: Server,
        decode: Server,
        front: Server,
        port: int,
    ) -> None:
        self.others, self.decode, self.front = (*others, decode), decode, front
        self.prometheus = port
        """Where it will be."""
        self.ended = threading.Event()

    def targets(self) -> list[str]:
        """Where their `/metrics` are."""
        pattern = r"probes at (?:http://)?(\S+:\d+)"
        probes = [one.wait_for_line(pattern)[1] for one in self.others]
        return [f"127.0.0.1:{self.front.port}", *probes]

    def post(
        self,
        path: str,
        body: dict[str, Any],
        read: int = -1,
        then: Callable[[], None] | None = None,
    ) -> int:
        """The status of one request; after `read` bytes the client leaves, or does `then` and reads
        the rest."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.front.url + path, data)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                answer.read(read)
                if then is not None:
                    then()
                    answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def load(self, number: int) -> None:
        """Requests one after the other, until the test has seen enough; the first client leaves in
        the middle of each."""
        while not self.ended.is_set():
            if number == 0:
                self.post("/v1/completions", LONG, read=100)
                continue
            # Every other prompt is long enough to be computed by the prefill worker.
            text = f"{number}: what is a block? " * (20 if number % 2 else 1)
            question = {"messages": [{"role": "user", "content": text}]}
            body = {"max_tokens": 40, "ignore_eos": True, "unheard_of": 1, **question}
            # 503: the engine is not back yet.
            assert self.post("/v1/chat/completions", body) in (200, 503)
            number += CALLERS

    def trouble(self) -> None:
        """What else clients do, and an engine that dies."""
        assert self.post("/v1/completions", {"model": "bundled", "prompt": "x", "n": -1}) == 400
        assert self.post("/v1/completions", {"model": "nobody", "prompt": "x"}) == 404
        stops = {"stop": list("aeinot"), "max_tokens": 400}
        assert self.post("/v1/completions", {"model": "bundled", "prompt": "x"} | stops) == 200
        self.post("/v1/completions", LONG | {"max_tokens": 600}, read=200, then=self.kill_engine)

    def kill_engine(self) -> None:
        """It streams at this moment, so the stream has to move."""
        self.decode.core().send_signal(signal.SIGKILL)


@pytest.fixture(
    params=[
        # The bundled model without computing it: a third of the processor's time.
        pytest.param(
            ("--engine=sim", "--engine-option=content=on"),
            id="sim",
            marks=pytest.mark.long(one_in=2),
        ),
        pytest.param((), id="torch", marks=pytest.mark.long),
    ]
)
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    program("prometheus")
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    probes = "--metrics-port=0"
    tiers = ("--host-kv=16MiB", f"--disk-kv={tmp_path / 'kv'}:64MiB")
    kept = ("--threads=1", "--kv-memory=64MiB", "--max-sequences=4", probes, *request.param, *tiers)
    port = free_port()
    slo = ("--slo-ttft=50ms", "--slo-itl=1s")
    with Server(None, "--role=router", "--listen=127.0.0.1:0", probes, **home) as router:
        join = "--join=" + router.wait_for_line(r"router \S+ at (\S+)")[1]
        worker = ("--role=worker", join, *kept)
        flags = (join, *slo, f"--otlp-endpoint=http://127.0.0.1:{port}")
        plan = tmp_path / "planner.toml"
        plan.write_text(PLANNED)
        planned = ("--role=planner", "--planner=act", f"--planner-file={plan}", join, probes)
        slots = ("--agent-slots=cpu=x1", f"--agent-dir={tmp_path / 'agent'}")
        with (
            Server(None, *worker, "--mode=prefill", **home) as prefill,
            Server(None, *worker, "--mode=decode", "--disagg-min-tokens=64", **home) as decode,
            # Without the native extension: something is degraded.
            # And no Prometheus takes traces: spans are dropped.
            Server(None, "--role=frontend", *flags, PDSERVE_PURE="1", **home) as front,
            Server(None, *planned, **home) as planner,
            Server(None, "--role=agent", join, *slots, probes, **home) as agent,
        ):
            for server in (prefill, decode, front):
                server.wait_for_line("ready: ")
            wait_sound(front, 1)
            others = (router, prefill, planner, agent)
            yield Cluster(*others, decode=decode, front=front, port=port)


@pytest.fixture
def prometheus(cluster: Cluster, tmp_path: Path) -> Iterator[Prometheus]:
    """Has scraped the cluster under load, and still does."""
    with (
        configured(tmp_path, cluster.targets(), cluster.prometheus) as prometheus,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        callers = [pool.submit(cluster.load, number) for number in range(CALLERS)]
        try:
            prometheus.wait_for('rate(pdserve_requests_total{outcome="completed"}[1m]) > 0')
            cluster.trouble()
            for seen in SEEN:
                prometheus.wait_for(seen)
            yield prometheus
        finally:
            cluster.ended.set()
        for caller in callers:
            caller.result(PATIENCE)


@contextlib.contextmanager
def configured(folder: Path, targets: list[str], port: int) -> Iterator[Prometheus]:
    """A Prometheus with the command's own files, but quicker."""
    flags = [flag for target in targets for flag in ("--target", target)]
    assert main(["dashboards", "--out", str(folder), *flags]) == 0
    config = folder / "prometheus.yml"
    settings = yaml.safe_load(config.read_text())
    (job,) = yaml_of("vLLM's names")[0]["scrape_configs"]
    job["static_configs"] = [{"targets": targets}]
    settings["scrape_configs"].append(job)
    config.write_text(yaml.safe_dump(settings))
    with hurried(config, port) as prometheus:
        yield prometheus


@contextlib.contextmanager
def hurried(config: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus that scrapes more often than the configuration says."""
    config.write_text(config.read_text().replace("15s", "500ms"))
    with Prometheus(config, port) as prometheus:
        yield prometheus


def vllm_expressions() -> Iterator[str]:
    """What programs made for vLLM ask: its board, autoscalers, gateways of llm-d and AIBrix."""
    model = 'model_name="bundled"'
    for name in VLLM_HISTOGRAMS:
        rate = f"rate(vllm:{name}_bucket{{{model}}}[{WINDOW}])"
        yield f"histogram_quantile(0.95, sum by (le) ({rate}))"
        mean = [f"sum(rate(vllm:{name}_{end}{{{model}}}[{WINDOW}]))" for end in ("sum", "count")]
        yield " / ".join(mean)
    for name in VLLM_COUNTERS:
        yield f"sum(rate(vllm:{name}{{{model}}}[{WINDOW}]))"
    for name in VLLM_GAUGES:
        yield f'vllm:{name}{{{model}, engine="0"}}'
    for reason in ("stop", "length", "abort"):
        yield f'vllm:request_success_total{{{model}, finished_reason="{reason}"}}'
    yield str(trigger()["query"])


def yaml_of(title: str) -> list[Any]:
    """The YAML below a heading of docs/observability.md, by block."""
    return [yaml.safe_load("\n".join(block)) for block in shells(title)]


def trigger() -> dict[str, Any]:
    (found,) = yaml_of("vLLM's names")[1]["triggers"]
    return dict(found["metadata"])


def shells(title: str) -> list[list[str]]:
    """The commands below a heading of docs/observability.md, by block."""
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    found = blocks(re.split(r"\n## ", page.partition(f"\n## {title}\n")[2])[0])
    return [block.splitlines() for block in found]


def expressions() -> Iterator[str]:
    """Of boards and rules that must have a value on a sound cluster under load."""
    for board in BOARDS:
        for row in board.rows:
            for query in (query for panel in row.panels for query in panel.queries):
                if not query.rare:
                    yield in_test(selected(query.expr))
    yield from (recording.expr for recording in recordings(Promise()))
    for alert in alerts(Promise()):
        yield from alert.operands


def in_test(expr: str) -> str:
    """With what Grafana puts in for variables."""
    for variable, value in {
        "$__rate_interval": WINDOW,
        "$__range": WINDOW,
        "$cluster": "pdserve",
        "$model": "bundled",
        "$worker": ".*",
    }.items():
        expr = expr.replace(variable, value)
    return expr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_expression_has_a_value(prometheus: Prometheus) -> None:
    missing = [*expressions(), *vllm_expressions()]
    end = time.monotonic() + PATIENCE
    # Load goes on, so a busy machine's handoff or step may come a moment later.
    while missing := [expr for expr in missing if not has_value(prometheus, expr)]:
        assert time.monotonic() < end, "stay without a value:\n" + "\n".join(missing)
        time.sleep(0.5)
    assert not has_value(prometheus, "sum(rate(pdserve_request_total[1m]))")
    conditions = {alert.name: alert.expr for alert in alerts(Promise())}
    # A scrape may come too late on a busy machine; what lasts is wrong.
    while wrong := {name for name in QUIET if prometheus.values(conditions[name])}:
        assert time.monotonic() < end, f"these would fire: {wrong}"
        time.sleep(0.5)
    assert {name for name in LOUD if not prometheus.values(conditions[name])} == set()


def has_value(prometheus: Prometheus, expr: str) -> bool:
    values = prometheus.values(expr)
    undefined = any(name in expr for name in MAY_BE_UNDEFINED)
    return bool(values) and (undefined or not all(map(math.isnan, values)))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_pages_first_commands_lead_to_boards_and_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, but for the ports."""
    (first,), second, (ask, trace, look) = shells("From nothing to a board and a trace")
    serve, write, scrape = map(shlex.split, (first, *second))
    program("prometheus")
    monkeypatch.chdir(tmp_path)
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    with serving(None, *serve[1:], "--kv-memory=64MiB", "--threads=1", **home) as server:
        assert main([*write[1:], "--target", f"127.0.0.1:{server.port}"]) == 0
        assert scrape[:-1] == ["prometheus", *Prometheus.flags(Path("monitoring/prometheus.yml"))]
        assert f"{scrape[-1].partition('=')[2]}/api/v1/query?" in look
        pods(Path("monitoring/prometheus.yml"), server.port)
        with hurried(Path("monitoring/prometheus.yml"), free_port()) as prometheus:
            answer = subprocess.run(
                shlex.split(ask.replace("8000", str(server.port))),
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE,
            ).stdout
            (request,) = re.findall(r"^x-request-id: (\S+)", answer, re.M)
            assert main([*shlex.split(trace)[1:], "--port", str(server.port)]) == 0
            assert request[:12] in capsys.readouterr().out
            prometheus.wait_for(look.rpartition("query=")[2].strip("'"))
            prometheus.wait_for('pdserve_slo_total{cluster="pdserve", result="good"}')
            assert prometheus.wait_for('pdserve_slo_total{cluster="lab", instance="pod-1"}')
            rules = prometheus.get("rules", type="alert")["groups"][0]["rules"]
            assert {one["name"] for one in rules} == {one.name for one in alerts(Promise())}
            states = {one["labels"]["instance"]: one["health"] for one in targets(prometheus)}
            assert states == {f"127.0.0.1:{server.port}": "up", "pod-1": "up"}
        refused = ("duplicate", "out of order", "Error on ingesting")
        log = Path("monitoring/prometheus.log").read_text()
        assert [line for line in log.splitlines() if any(word in line for word in refused)] == []


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_pages_cluster_is_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands there, but for the ports and the engine."""
    program("prometheus")
    monkeypatch.chdir(tmp_path)
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    text = "\n".join(shells("Scraping a cluster")[0])
    for port in ("9000", "9001"):
        text = text.replace(port, str(free_port()))
    start = [shlex.split(line)[1:] for line in text.splitlines()]
    with Server(None, *start[0], "--listen=127.0.0.1:0", **home) as router:
        seed = router.wait_for_line(r"router \S+ at (\S+)")[1]
        worker, frontend, write = (
            [w.replace("127.0.0.1:7700", seed) for w in s] for s in start[1:]
        )
        with (
            Server(None, *worker, "--engine=sim", **home) as serving,
            Server(None, *frontend, "--port=0", **home) as front,
        ):
            for server in (serving, front):
                server.wait_for_line("ready: ")
            assert main([word.replace(":8000", f":{front.port}") for word in write]) == 0
            with hurried(Path("monitoring/prometheus.yml"), free_port()) as prometheus:
                roles = 'count by (role) (pdserve_build_info{cluster="lab"})'
                prometheus.wait_for(f"count({roles}) == 3")


def targets(prometheus: Prometheus) -> list[dict[str, Any]]:
    return list(prometheus.get("targets")["activeTargets"])


def pods(config: Path, port: int) -> None:
    """Adds a job with the rules for Kubernetes, and what Kubernetes says of two pods."""
    name = "__meta_kubernetes_pod_"
    labels = {
        f"{name}ip": "127.0.0.1",
        f"{name}name": "pod-1",
        f"{name}annotation_prometheus_io_scrape": "true",
        f"{name}annotation_prometheus_io_port": str(port),
        f"{name}label_app_kubernetes_io_name": "pdserve",
        f"{name}label_app_kubernetes_io_instance": "lab",
    }
    other = labels | {f"{name}label_app_kubernetes_io_name": "another", f"{name}name": "pod-2"}
    found = [{"targets": ["127.0.0.1:1"], "labels": one} for one in (labels, other)]
    config.with_name("pods.json").write_text(json.dumps(found))
    text = (ROOT / "examples/observability/prometheus-kubernetes.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job |= {"job_name": "pdserve-pods", "file_sd_configs": [{"files": ["pods.json"]}]}
    settings = yaml.safe_load(config.read_text())
    settings["scrape_configs"].append(job)
    config.write_text(yaml.safe_dump(settings))
