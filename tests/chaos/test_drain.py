"""Nodes that are asked to go, by a signal or by `pdserve drain`, lose no request."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import eventually
from tests.chaos.load import CHAT, Stream, ask, wait_served
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster, Node

pytestmark = pytest.mark.timeout(240)
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def pdserve(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, as an operator."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    home = {"HOME": str(cluster.home), "XDG_CONFIG_HOME": str(cluster.home / "config")}
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments, "--join", cluster.address],
        env=clean | home | {"PDSERVE_CONFIG": "none"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def state(cluster: Cluster, node: str) -> str:
    """The node's row in the status."""
    lines = pdserve(cluster, "status").stdout.splitlines()
    return next((line for line in lines if line.startswith(node)), "")


def busy(workers: list[Node]) -> Node:
    """The one that has a request."""
    found: list[Node] = eventually(
        lambda: [w for w in workers if w.count("pdserve_num_requests_running") > 0],
        "a worker is busy",
    )
    return found[0]


@pytest.mark.long(one_in=3)
def test_a_drained_worker_hands_its_streams_over_and_ends(cluster: Cluster) -> None:
    _, workers, frontend = cluster.serving(workers=2, rate=20)
    wait_served(frontend)
    refused = pdserve(cluster, "drain", workers[0].name, "worker-7")
    assert refused.returncode == exit_codes.USAGE
    assert "there is no node 'worker-7' in the cluster; did you mean worker-" in refused.stderr

    streams = [Stream(frontend, tokens=300, **USAGE) for _ in range(2)]  # about 15 s
    for stream in streams:
        stream.wait_tokens(5)
    first = busy(workers)
    (second,) = [worker for worker in workers if worker is not first]
    drained = pdserve(cluster, "drain", first.name, "--wait")
    assert drained.returncode == exit_codes.OK, drained.stderr
    assert f"{first.name}: draining: " in drained.stdout
    assert drained.stdout.endswith(f"{first.name}: gone\n")
    assert first.process.wait(PATIENCE) == exit_codes.OK
    for stream in streams:
        assert stream.wait().done, stream
        assert stream.usage["completion_tokens"] == 300
    assert streams[0].text == streams[1].text
    assert sum(stream.usage["pdserve"]["migrations"] or 0 for stream in streams) >= 1

    # The last one: its requests have no other place, and run to their end.
    last = Stream(frontend, tokens=40)
    last.wait_tokens(5)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(PATIENCE) == exit_codes.OK
    assert last.wait().done, last
    assert streams[0].text.startswith(last.text)


def test_a_drained_worker_may_stay(cluster: Cluster) -> None:
    _, workers, frontend = cluster.serving(workers=2, rate=40)
    wait_served(frontend)
    one, other = workers
    assert pdserve(cluster, "drain", f"{one.name},{one.name}", "--stay", "--wait").returncode == 0
    assert one.health() == (503, one.health()[1] | {"status": "draining", "reason": "drained"})
    assert state(cluster, one.name).split()[2] == "drained"
    before = one.count("pdserve_generation_tokens_total")
    for _ in range(8):
        assert ask(frontend).status == 200
    assert one.count("pdserve_generation_tokens_total") == before
    assert other.count("pdserve_generation_tokens_total") > 0

    again = pdserve(cluster, "drain", one.name, "--stay")
    assert (again.returncode, again.stdout) == (0, f"{one.name}: drained\n")
    assert one.process.poll() is None
    assert pdserve(cluster, "drain", one.name, "--wait").returncode == exit_codes.OK
    assert one.process.wait(PATIENCE) == exit_codes.OK


@pytest.mark.long(one_in=3)
def test_a_worker_that_cannot_hand_over_in_time_leaves_it_to_whoever_comes(
    cluster: Cluster,
) -> None:
    cluster.flags = ("--drain-timeout", "1s")
    _, (first,), frontend = cluster.serving(rate=40)
    wait_served(frontend)
    expected = Stream(frontend, tokens=160).wait().text
    stream = Stream(frontend, tokens=160, **USAGE)
    stream.wait_tokens(5)
    first.process.send_signal(signal.SIGTERM)
    first.wait_said(r"not all of 1 requests were gone within \d\.\d s")
    assert first.process.wait(PATIENCE) == exit_codes.OK
    assert stream.running
    cluster.worker(rate=40)
    assert stream.wait().done, stream
    assert stream.text == expected
    assert stream.usage["pdserve"]["migrations"] == 1


@pytest.mark.long(one_in=3)
def test_a_drained_frontend_finishes_its_streams_and_takes_nothing_new(cluster: Cluster) -> None:
    _, _, frontend = cluster.serving(rate=40)
    wait_served(frontend)
    stream = Stream(frontend, tokens=500)  # about 12 s
    stream.wait_tokens(5)
    kept = http.client.HTTPConnection(frontend.host, frontend.port, timeout=PATIENCE)
    kept.connect()
    assert pdserve(cluster, "drain", frontend.name).returncode == exit_codes.OK
    eventually(lambda: frontend.get("/health")[0] == 503, "it says that it goes")
    assert frontend.get("/health")[1]["status"] == "draining"
    assert frontend.health()[1]["status"] == "draining"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    kept.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    with kept.getresponse() as response:
        told = json.loads(response.read())["error"]["code"]
        assert (response.status, told) == (503, "draining")
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["Connection"] == "close"
    kept.close()
    assert stream.running
    assert stream.wait().done, stream
    assert frontend.process.wait(PATIENCE) == exit_codes.OK


def test_a_drained_router_sends_everybody_to_the_other(cluster: Cluster) -> None:
    routers = [cluster.router(), cluster.router()]
    cluster.worker(rate=100)
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_served(frontend)
    streams = [Stream(frontend, tokens=60) for _ in range(8)]
    # Through the other: who is asked must be there to the end.
    drained = pdserve(cluster, "drain", routers[1].name, "--wait")
    assert drained.returncode == exit_codes.OK, drained.stderr
    assert routers[1].process.wait(PATIENCE) == exit_codes.OK
    for _ in range(8):
        assert ask(frontend).status == 200
    assert all(stream.wait().done for stream in streams), streams
    # And one that is asked itself.
    last = pdserve(cluster, "drain", routers[0].name, "--wait")
    assert last.returncode == exit_codes.OK, last.stderr
    assert last.stdout.splitlines()[-1].startswith(f"{routers[0].name}: gone")
