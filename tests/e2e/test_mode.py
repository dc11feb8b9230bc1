"""`pdserve mode` on a cluster of processes: workers change their mode under streams."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import Cluster, eventually
from tests.chaos.load import Stream, ask, wait_served
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


def pdserve(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, as an operator."""
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
    shown = pdserve(cluster, "status").stdout
    (row,) = (line for line in shown.splitlines() if line.startswith("one ") and "yes" in line)
    assert row.split()[2] == "prefill"


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
