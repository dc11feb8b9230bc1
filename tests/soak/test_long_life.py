"""Long lives of a frontend, a router and a worker: what they hold comes back, and memory is level.

A slice is run by `make test`: too short for a slope to be told from caches that fill. `NOISE` says
what each length can see. `make soak` runs a million requests and ten thousand changes
(bench/results/soak.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster
from tests.soak import scenes
from tests.soak.memory import leaks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MIB = 1 << 20
LEAK = 8.0
"""Bytes for each piece of work: a pointer in a list, the least that Python can keep."""
NOISE = 4 * MIB
"""What a process may take besides: Python's allocator asks for a MiB at a time, and the logs that
are kept for readers who fall behind fill, to 4 MiB each. Over the three quarters of the work that
are judged it is, for each piece: of LONG 19 bytes of a request, 1.5 KiB of a handoff, 3 KiB of a
member and 4 KiB of a stream; of SHORT 5 KiB, 100 KiB, 340 KiB and 55 KiB. A smaller leak is not
seen here: that not one entry is kept is `test_lives`' to prove."""


@dataclass(frozen=True)
class Scale:
    """How much work, and what may be noise."""

    count: int
    portions: int
    noise: int = NOISE


SHORT = {
    "requests": Scale(1_600, 4),
    "members": Scale(24, 2),
    "streams": Scale(150, 2),
    "handoffs": Scale(120, 4, 6 * MIB),  # torch's threads and buffers come with the first batches
}
LONG = {
    "requests": Scale(300_000, 60),  # what has bounds is full after 100,000
    "members": Scale(2_000, 20),
    "streams": Scale(2_000, 8),  # both kinds of rounds reach their height in the first two
    "handoffs": Scale(4_000, 20),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def live(name: str, cluster: Cluster, folder: Path, seed: int, *, long: bool) -> None:
    """Run a scene; raises if something has not come back, or memory grows."""
    scale = (LONG if long else SHORT)[name]
    scene = getattr(scenes, name)
    watch = scene(cluster, folder, count=scale.count, portions=scale.portions, seed=seed, say=print)
    found = leaks(watch.lines, per_piece=LEAK, noise=scale.noise)
    assert not found, "\n".join([*found, watch.table(scenes.UNITS[name])])


@pytest.mark.long(one_in=2)
def test_short_requests_leave_nothing_behind(cluster, tmp_path, seed, long):
    live("requests", cluster, tmp_path, seed, long=long)


@pytest.mark.long(one_in=3)
def test_members_that_come_and_go_leave_nothing_behind(cluster, tmp_path, seed, long):
    live("members", cluster, tmp_path, seed, long=long)


@pytest.mark.long(one_in=3)
def test_streams_that_stay_open_leave_nothing_behind(cluster, tmp_path, seed, long, monkeypatch):
    if not long:
        monkeypatch.setattr(scenes, "HELD", 2.0)
    live("streams", cluster, tmp_path, seed, long=long)


@pytest.mark.long
def test_prompts_that_are_handed_over_leave_nothing_behind(cluster, tmp_path, seed, long):
    live("handoffs", cluster, tmp_path, seed, long=long)
