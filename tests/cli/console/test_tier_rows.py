import pytest

from pdserve.cli.console.layout import lines_of
from pdserve.cli.console.tier_rows import duration, tier_table
from pdserve.ids import NodeId
from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport, TierReport

DISK = TierReport(
    name="disk",
    capacity=200 << 30,
    valid=50 << 30,
    retention=7200.0,
    hit_tokens=900,
    stored=30,
    evicted=20,
    unsaved=2,
    failed=1,
    trouble="write failed: no space left",
)


def status(now: float, *tiers: TierReport, epoch: int = 1) -> ClusterStatus:
    worker = MemberStatus(
        node=NodeId("w1"), role="worker", epoch=epoch, report=NodeReport(tiers=tiers)
    )
    silent = MemberStatus(node=NodeId("w2"), role="worker", epoch=1, silence="no answer")
    return ClusterStatus(cluster="c", asked=NodeId("r"), now=now, members=(worker, silent))


def test_each_tier_of_each_worker_has_a_row() -> None:
    table = tier_table(status(10.0, TierReport(name="host", capacity=1 << 30), DISK))
    host, disk = table.rows
    assert host == ("w1", "host", "1.0 GiB", "0%", "-", "0", "0", "0", "0", "0", "")
    assert disk == (
        *("w1", "disk", "200.0 GiB", "25%", "2h", "900", "30", "20", "2", "1"),
        "write failed: no space left",
    )
    assert tier_table(status(10.0)).rows == []


def test_hits_per_second_are_of_one_life() -> None:
    then = status(10.0, TierReport(name="disk", hit_tokens=300), TierReport(name="host"))
    now = status(12.0, DISK)
    assert tier_table(now, then).heads[5] == "HITS/S"
    assert tier_table(now, then).rows[0][5] == "300"
    other_life = status(12.0, DISK, epoch=2)
    assert tier_table(other_life, then).rows[0][5] == "-"


def test_the_trouble_goes_below_a_narrow_row() -> None:
    lines = lines_of(tier_table(status(10.0, DISK)), 60)
    assert lines[-1].strip() == "write failed: no space left"
    assert "UNSAVED" not in lines[0]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "-"), (90, "90s"), (150, "2min"), (7200, "2h"), (3 * 86400, "3d")],
)
def test_how_long_blocks_stay_is_told_in_one_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
