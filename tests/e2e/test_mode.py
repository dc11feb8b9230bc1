"""`pdserve mode` on a cluster of processes: workers change their mode under streams."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import Cluster, eventually
from tests.chaos.load import Stream, ask, wait_served
from tests.e2e.commands import pdserve
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.cluster import Node

pytestmark = pytest.mark.timeout(300)
NAMES = ("one", "two", "three")
SIM = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=1024")
TALK = [{"role": "user", "content": "tell me of the sea " * 30}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        made.router()
        for name, mode in zip(NAMES, ("prefill", "decode", "decode"), strict=True):
            own = (*SIM, "--disagg", "always", "--mode", mode)
            made.start("worker", name, "--join", made.address, *own)
        made.frontend()
        made.wait_ready()
        wait_served(made.nodes[-1])
        yield made


def pdserve_process(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, as a process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    home = {"HOME": str(cluster.home), "XDG_CONFIG_HOME": str(cluster.home / "config")}
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments, "--join", cluster.address],
        env=clean | home | {"PDSERVE_CONFIG": "none"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


def reports(cluster: Cluster) -> dict[str, Any]:
    """The workers' reports."""
    members = json.loads(pdserve(cluster, "status", "--json").stdout)["members"]
    return {one["node"]: one["report"] for one in members if one["role"] == "worker"}


def modes(cluster: Cluster) -> list[str]:
    found = reports(cluster)
    return [found[name]["mode"]["mode"] for name in NAMES]


def frontend(cluster: Cluster) -> Node:
    return cluster.nodes[-1]


def test_a_worker_changes_its_mode_under_streams_and_comes_back(
    cluster: Cluster, long: bool, seed: int
) -> None:
    draw = random.Random(seed)
    expected = Stream(frontend(cluster), tokens=120, messages=TALK).wait()
    assert expected.done
    before = reports(cluster)
    changed = 0
    for _ in range(100 if long else 2):
        name = draw.choice(("two", "three"))
        streams = [Stream(frontend(cluster), tokens=120, messages=TALK) for _ in range(4)]
        for stream in streams:
            stream.wait_tokens(2)
        for mode in ("prefill", "decode"):
            done = pdserve(cluster, "mode", name, mode, "--wait")
            assert done.returncode == exit_codes.OK, done
            changed += 1
            generation = before[name]["mode"]["generation"] + 1
            assert done.stdout.endswith(f"{name}: {mode}, generation {generation}\n")
            before = reports(cluster)
            assert before[name]["mode"]["mode"] == mode
        for stream in streams:
            assert stream.wait().done, stream
            assert stream.text == expected.text
    assert modes(cluster) == ["prefill", "decode", "decode"]
    assert changed == (200 if long else 4)


def test_where_the_time_of_a_change_went(cluster: Cluster) -> None:
    generation = reports(cluster)["two"]["mode"]["generation"]
    for mode in ("prefill", "decode"):
        assert pdserve(cluster, "mode", "two", mode, "--wait").returncode == exit_codes.OK
    listed = pdserve(cluster, "trace", "--changes", "--limit", "200")
    assert listed.returncode == exit_codes.OK, listed
    asked = f"mode-two-{generation}"
    assert asked in listed.stdout
    drawn = pdserve(cluster, "trace", asked, "--ascii").stdout
    for words in (f"change  {asked}", "result=done", ".leaving", ".proving", "ordered"):
        assert words in drawn, drawn
    requests = pdserve(cluster, "trace", "--limit", "200").stdout
    assert "mode-two" not in requests


def test_a_worker_that_is_needed_refuses_and_its_prefixes_stay(cluster: Cluster) -> None:
    refused = pdserve(cluster, "mode", "one", "decode")
    assert refused.returncode == exit_codes.FAILED
    assert "one: it stays prefill: no other ready worker" in refused.stdout
    fresh = [{"role": "user", "content": "a prompt that nobody has sent " * 20}]
    assert ask(frontend(cluster), messages=fresh).status == 200
    cached = reports(cluster)["one"]["worker"]["blocks_cached"]
    assert cached > 0
    forced = pdserve(cluster, "mode", "one", "both", "--share", "0.25", "--wait")
    assert forced.stdout.endswith("one: both (share 0.25), generation 2\n"), forced
    assert reports(cluster)["one"]["worker"]["blocks_cached"] >= cached
    answer = eventually(
        lambda: next(
            (a for a in [ask(frontend(cluster), worker="one", messages=fresh)] if a.status == 200),
            None,
        ),
        "one takes requests",
    )
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    back = pdserve(cluster, "mode", "one", "prefill", "--wait")
    assert back.returncode == exit_codes.OK, back
    shown = pdserve_process(cluster, "status").stdout
    (row,) = (line for line in shown.splitlines() if line.startswith("one ") and "yes" in line)
    assert row.split()[2] == "prefill"


def test_the_only_worker_that_takes_requests_takes_them_throughout(cluster: Cluster) -> None:
    done = pdserve(cluster, "mode", "three", "prefill", "--wait")
    assert done.returncode == exit_codes.OK, done
    over, statuses = threading.Event(), []

    def go_on_asking() -> None:
        while not over.is_set():
            statuses.append(ask(frontend(cluster), max_tokens=2).status)

    asking = threading.Thread(target=go_on_asking)
    asking.start()
    talks = [[{"role": "user", "content": f"{i} of the sea " * 200}] for i in range(4)]
    streams = [Stream(frontend(cluster), tokens=5, messages=talk) for talk in talks]
    try:
        for mode in ("both", "decode"):
            done = pdserve(cluster, "mode", "two", mode, "--last", "--wait")
            assert done.returncode == exit_codes.OK, done
    finally:
        over.set()
        asking.join()
    assert all(stream.wait().done for stream in streams), streams
    assert set(statuses) == {200}
    assert pdserve(cluster, "mode", "three", "decode", "--wait").returncode == exit_codes.OK


def test_drains_of_all_roles_are_undone_under_streams(cluster: Cluster) -> None:
    expected = Stream(frontend(cluster), tokens=120, messages=TALK).wait()
    for node in ("two", cluster.nodes[0].name, frontend(cluster).name):
        streams = [Stream(frontend(cluster), tokens=120, messages=TALK) for _ in range(3)]
        for stream in streams:
            stream.wait_tokens(2)
        done = pdserve(cluster, "drain", node, "--stay")
        assert done.returncode == exit_codes.OK, done
        undone = pdserve(cluster, "drain", node, "--undo")
        assert (undone.returncode, undone.stdout) == (exit_codes.OK, f"{node}: serves again\n")
        assert all(stream.wait().text == expected.text for stream in streams), streams
        done = pdserve(cluster, "drain", node, "--stay", "--wait")
        assert done.returncode == exit_codes.OK, done
        undone = pdserve(cluster, "drain", node, "--undo")
        assert undone.returncode == exit_codes.OK, undone
        wait_served(frontend(cluster))
    again = pdserve(cluster, "drain", "two", "--undo")
    assert (again.returncode, again.stdout) == (exit_codes.OK, "two: it did not drain\n")
    assert not any(node.process.poll() for node in cluster.nodes)


def test_wrong_names_are_told_before_anything_happens(cluster: Cluster) -> None:
    for words, arguments in (
        ("did you mean 'decode'", ("one", "decod")),
        ("there is no node 'ten'", ("ten", "decode")),
        ("only workers have a mode", (frontend(cluster).name, "decode")),
        ("--share 2", ("one", "both", "--share", "2")),
    ):
        told = pdserve(cluster, "mode", *arguments)
        assert told.returncode == exit_codes.USAGE
        assert words in told.stderr, told
