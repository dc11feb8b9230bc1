"""A planner, an agent and workers as processes: what is ordered happens once, and costs no request.

Fifty streams run all the time, and half as many while modes are switched. Each answer is compared
with the only right one, token by token.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.ids import NodeId
from pdserve.planner.core import owner_of
from tests.chaos.cluster import eventually
from tests.chaos.load import ask
from tests.e2e.planner.crowd import Streams, Surge, Talk
from tests.e2e.planner.site import Site, site_at

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tests.chaos.cluster import Node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="an agent reads /proc"),
]
STREAMS = 50
LONG = Talk(20, 1500)
"""A stream that outlives the test."""
SHORT = Talk(20, 40)
HEAVY = Talk(200, 5)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_at(tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.fixture
def planner(site: Site) -> Iterator[Node]:
    """A planner with the usual file, pinned to the only worker that there is."""
    with site.planner("planner-1") as node:
        pin(site, {"aggregated": 1})
        site.until_whole()
        site.front.wait_ready()
        yield node


@pytest.fixture
def streams(site: Site, planner: Node, seed: int) -> Iterator[Streams]:
    """Fifty, which begin before the test and go on until its end."""
    with Streams(site.front, STREAMS, LONG, seed) as running:
        running.wait_running()
        yield running


def test_one_worker_becomes_four_and_one_again(site: Site, planner: Node, seed: int) -> None:
    half = STREAMS // 2
    site.say("unpin", "bundled")
    with Streams(site.front, STREAMS, LONG, seed) as first:
        first.wait_running()
        with Surge(site.front, 10.0, HEAVY, seed):
            eventually(lambda: site.present() == {"aggregated": 4}, site.shown, 90.0)
        with Streams(site.front, half, LONG, seed + 1) as rest:
            rest.wait_running()
            before = moves(site.front)
            site.until_present(90.0, aggregated=1)
            assert moves(site.front) - before >= half // 2, "streams were on all workers"
            assert len(first.open) + len(rest.open) == STREAMS + half
    assert planner.said("bundled: stop") is not None
    site.until_whole()
    assert len(site.pids()) == 1


@pytest.mark.long(one_in=2)
def test_modes_are_switched_and_prefixes_stay(
    site: Site, planner: Node, long: bool, seed: int
) -> None:
    pins = ({"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1})
    pin(site, {"aggregated": 3})
    names = sorted(site.workers())
    for name in names:
        remember(site.front, name)
    with Streams(site.front, STREAMS // 2, SHORT, seed) as streams:
        streams.wait_running()
        pin(site, pins[0])
        before = site.workers()
        for number in range(200 if long else 6):
            pin(site, pins[(number + 1) % 2])
            after = site.workers()
            assert sum(generation(after[one]) - generation(before[one]) for one in names) == 1
            assert [one for one in names if cached(after[one]) < cached(before[one])] == []
            before = after
            streams.check()
        pin(site, {"aggregated": 3})
    assert [one for one in names if remember(site.front, one) < 100] == []
    assert sorted(site.workers()) == names, "a switch needs no other worker"


@pytest.mark.long(one_in=3)
def test_a_planner_that_is_killed_is_followed_by_one_that_finds_all(
    site: Site, streams: Streams, planner: Node, seed: int
) -> None:
    draw = random.Random(seed)
    planner.kill()
    known = {one.change for one in site.records()}
    with site.planner("planner-1", pool={"min": 3}) as first:
        kill_in_a_start(site, first, draw)
    with site.planner("planner-1", pool={"min": 3}) as second:
        site.until_present(aggregated=3)
        site.until_whole()
        assert len(started(site, known)) == 2, "each was ordered once"
        site.say("pin", "bundled", "aggregated=1")
        begun = kill_in_a_drain(site, second, draw)
    with site.planner("planner-1", paces={"stable": "1h"}):
        site.until_whole()
        assert len(started(site, known)) == 2
        left = len(site.pids())
        assert left == 2 or (left == 3 and not begun), "a drain that was begun is over"
    streams.check()


@pytest.mark.long(one_in=3)
def test_two_planners_of_which_the_one_that_acts_is_killed(
    site: Site, streams: Streams, planner: Node, seed: int
) -> None:
    draw = random.Random(seed)
    known = {one.change for one in site.records()}
    with site.planner("planner-2") as other:
        nodes = {node.name: node for node in (planner, other)}
        owner = str(owner_of("bundled", [NodeId(name) for name in nodes], budget=0.0))
        eventually(lambda: deciding(site) == [owner], site.shown)
        term = site.plan()["term"]
        site.say("pin", "bundled", "aggregated=3")
        kill_in_a_start(site, nodes[owner], draw)
        site.until_present(aggregated=3)
        site.until_whole()
        assert site.plan()["term"] > term
        assert len(started(site, known)) == 2, "the one that follows repeats no order"
        with site.planner(owner) as again:
            eventually(lambda: deciding(site) == [owner], site.shown)
            term = site.plan()["term"]
            site.say("pin", "bundled", "aggregated=1")
            kill_in_a_drain(site, again, draw)
        site.until_present(aggregated=1)
        site.until_whole()
        assert site.plan()["term"] > term
        assert len(started(site, known)) == 2
        streams.check()


@pytest.mark.long(one_in=3)
def test_a_start_that_hangs_is_given_up_and_tried_again(
    site: Site, streams: Streams, planner: Node
) -> None:
    planner.kill()
    patience = {"start-prior": "4s", "ready-factor": 2, "start-backoff": "1s"}
    with site.planner("planner-1", paces=patience | {"start-failures": 20}) as node:
        site.until_present(aggregated=1)
        known = {one.change for one in site.records()}
        site.say("pin", "bundled", "aggregated=2")
        hung, pid = eventually(lambda: next(new_pids(site, known), None), site.shown)
        os.killpg(pid, signal.SIGSTOP)
        eventually(lambda: "was not ready" in site.shown(), site.shown)
        streams.check()
        eventually(lambda: len(started(site, known)) > 1, site.shown)
        os.killpg(pid, signal.SIGCONT)
        site.until_present(aggregated=2)
        assert node.said("start cpu .*: given_up: it was not ready .* s after its process began")
        site.until_whole()
        assert hung not in site.pids()


def kill_in_a_start(site: Site, planner: Node, draw: random.Random) -> None:
    """When the order is decided, or when its process runs."""
    before = len(site.records())
    planner.wait_said(": start |; start ")
    if draw.random() < 0.5:
        eventually(lambda: len(site.records()) > before, site.shown)
    planner.kill()


def kill_in_a_drain(site: Site, planner: Node, draw: random.Random) -> bool:
    """When the order is decided, or when its worker drains, as is returned."""
    planner.wait_said("; stop ")
    begun = draw.random() < 0.6
    if begun:
        eventually(lambda: any(one.draining for one in site.live_records()), site.shown)
    planner.kill()
    return begun


def deciding(site: Site) -> list[str]:
    """The planners that decide, once both are there."""
    reports = site.reports()
    return [name for name, one in reports.items() if one["plans"]] if len(reports) == 2 else []


def started(site: Site, known: Collection[str]) -> list[str]:
    """Changes that have started a worker since."""
    return [one.change for one in site.records() if one.change not in known]


def new_pids(site: Site, known: Collection[str]) -> Iterator[tuple[str, int]]:
    return (one for one in site.pids().items() if one[0] not in known)


def moves(front: Node) -> float:
    """Requests that went on at another worker."""
    with contextlib.suppress(LookupError):
        return front.count('pdserve_migrations_total{outcome="completed"}')
    return 0.0


def pin(site: Site, mix: dict[str, int]) -> None:
    """Has the planner make this of the workers that there are."""
    words = ",".join(f"{mode}={count}" for mode, count in mix.items())
    assert "pinned to" in site.say("pin", "bundled", words)
    site.until_present(**mix)


def generation(report: dict[str, Any]) -> int:
    return report["mode"]["generation"]


def cached(report: dict[str, Any]) -> int:
    return report["worker"]["blocks_cached"]


def remember(front: Node, worker: str) -> int:
    """Asks a worker always the same; returns how many tokens it had kept."""
    prompt = [{"role": "user", "content": f"{worker} " + "the sea is deep " * 60}]
    answer = eventually(lambda: served(front, worker, prompt), f"{worker} takes requests")
    details = answer.body["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def served(front: Node, worker: str, prompt: object) -> Any:
    answer = ask(front, worker=worker, messages=prompt, max_tokens=1)
    return answer if answer.status == 200 else None
