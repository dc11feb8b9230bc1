"""What fetches came to, against what was predicted."""

from __future__ import annotations

import pytest

from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.engine_core.tiers.plan_tally import PlanTally
from pdserve.messages.tiers import PlanStats

PLAN = FetchPlan(4, seconds=0.5, last="disk", saves=2.0)


@pytest.mark.parametrize(
    ("came", "took", "gained", "lost"),
    [
        (4, 0.5, 1.5, 0.0),
        (4, 2.5, 0.0, 0.5),
        (2, 0.75, 0.25, 0.0),
        (0, 0.75, 0.0, 0.75),
    ],
)
def test_a_fetch_gains_what_it_saves_or_loses_time(
    came: int, took: float, gained: float, lost: float
) -> None:
    tally = PlanTally()
    tally.ended(PLAN, came, took)
    (found,) = tally.stats()
    assert (found.source, found.plans, found.predicted, found.actual) == ("disk", 1, 0.5, took)
    assert (found.gained, found.lost) == (gained, lost)


def test_gains_and_losses_are_added_apart_and_by_source() -> None:
    tally = PlanTally()
    for took in (0.5, 1.0, 3.0):
        tally.ended(PLAN, 4, took)
    tally.ended(FetchPlan(0, 2, seconds=1.0, last="peer", saves=1.5), 2, 1.0)
    disk, peer = tally.stats()
    assert (disk.plans, disk.predicted, disk.actual) == (3, 1.5, 4.5)
    assert (disk.gained, disk.lost) == (2.5, 1.0)
    assert (peer.source, peer.plans, peer.gained, peer.lost) == ("peer", 1, 0.5, 0.0)


def test_a_plan_that_predicted_nothing_is_not_counted() -> None:
    tally = PlanTally()
    tally.ended(FetchPlan(4), 4, 0.1)
    assert tally.stats() == ()


def test_known_sources_are_told_before_their_first_plan() -> None:
    tally = PlanTally(["host", "disk"])
    tally.ended(PLAN, 4, 0.5)
    host, disk = tally.stats()
    assert host == PlanStats(source="host")
    assert (disk.source, disk.plans) == ("disk", 1)
