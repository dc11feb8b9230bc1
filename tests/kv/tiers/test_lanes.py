"""Lanes: what they learn from jobs, and that no byte is lost."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.kv.tiers.lanes import ASSUMED, Lane, LaneEstimate, estimate_of
from pdserve.messages.tiers import LaneLoad

MIB = 1 << 20


def work(lane: Lane, size: int, now: float, seconds: float) -> float:
    """One job alone on the lane; returns the time of its end."""
    lane.submit(size, now)
    lane.done(size, now + seconds, seconds)
    return now + seconds


def test_the_finish_is_latency_and_all_bytes_ahead() -> None:
    assert LaneEstimate(100.0, latency=0.5, backlog=50).seconds(150) == 2.5


def test_an_unknown_lane_is_assumed_to_be_a_modest_one() -> None:
    lane = Lane("disk_read")
    lane.submit(1000, 0.0)
    assert lane.load() == LaneLoad("disk_read", 1000, 0.0, 0.0)
    assumed = ASSUMED["disk_read"]
    assert lane.estimate() == LaneEstimate(assumed.bandwidth, assumed.latency, 1000)
    assert estimate_of(LaneLoad("h2d", 7, 4e9, 1e-3)) == LaneEstimate(4e9, 1e-3, 7)


def test_bandwidth_and_latency_are_learnt_apart() -> None:
    lane, now = Lane("disk_read"), 0.0
    for _ in range(200):
        now = work(lane, 64 * MIB, now + 0.5, 0.004 + 64 * MIB / 2e9)
        now = work(lane, 64 * 1024, now + 0.5, 0.004 + 64 * 1024 / 2e9)
    found = lane.estimate()
    assert found.bandwidth == pytest.approx(2e9, rel=0.02)
    assert found.latency == pytest.approx(0.004, rel=0.02)
    assert found.seconds(256 * MIB) == pytest.approx(0.004 + 256 * MIB / 2e9, rel=0.02)


def test_idle_time_does_not_count() -> None:
    lane, now = Lane("d2h"), 0.0
    for _ in range(20):
        now = work(lane, 16 * MIB, now + 10.0, 0.01)
    assert lane.load().bandwidth == pytest.approx(16 * MIB / 0.01)


def test_a_result_that_is_noticed_late_does_not_slow_the_lane_down() -> None:
    lane = Lane("h2d")
    for size in (8 * MIB, 8 * MIB, 8 * MIB):
        lane.submit(size, 0.0)
    for _ in range(3):  # each took 2 ms; the core looked after a step of 100 ms
        lane.done(8 * MIB, 0.1, 0.002)
    assert lane.load().bandwidth == pytest.approx(8 * MIB / 0.002)


def test_jobs_at_the_same_time_share_the_lane() -> None:
    lane, now = Lane("disk_read", width=4), 0.0
    for _ in range(30):
        for _ in range(4):
            lane.submit(8 * MIB, now)
        now += 0.040
        for _ in range(4):
            lane.done(8 * MIB, now, 0.040)
    assert lane.load().bandwidth == pytest.approx(32 * MIB / 0.040)


def test_small_jobs_alone_tell_the_latency_and_no_speed() -> None:
    lane, now = Lane("h2d"), 0.0
    for _ in range(50):
        now = work(lane, 10_000, now, 0.001)
    assert lane.load().bandwidth == 0.0
    assert lane.estimate().bandwidth == ASSUMED["h2d"].bandwidth
    assert lane.estimate().latency == pytest.approx(0.001, rel=0.01)
    work(lane, 32 * MIB, now, 0.011)
    assert lane.load().bandwidth == pytest.approx(32 * MIB / 0.010, rel=0.01)


def test_one_slow_moment_is_forgotten() -> None:
    lane = Lane("disk_read")
    now = work(lane, 4 * MIB, 0.0, 20.0)
    now = work(lane, 1000, now, 3.0)
    slow = lane.estimate()
    assert slow.seconds(MIB) > 1.0
    lane.age(now + 30.0)
    assert lane.estimate() == slow
    lane.submit(1000, now + 90.0)
    lane.age(now + 90.0)
    assert lane.load().bandwidth == slow.bandwidth, "it is being measured"
    lane.failed(1000, now + 91.0)
    lane.age(now + 91.0)
    assert lane.estimate() == ASSUMED["disk_read"]


def test_a_lane_begins_with_what_was_measured() -> None:
    measured = LaneEstimate(3e9, 1e-4)
    lane = Lane("disk_read", measured=measured)
    assert lane.estimate().bandwidth == pytest.approx(3e9)
    assert lane.load() == LaneLoad("disk_read", 0, lane.estimate().bandwidth, 1e-4)
    now = work(lane, 64 * MIB, 0.0, 1.0)
    assert lane.estimate().bandwidth < 0.2e9, "a second of work counts for more"
    lane.age(now + 90.0)
    assert lane.estimate().bandwidth == pytest.approx(3e9), "and not the assumed one"
    assert lane.estimate().latency == measured.latency


def test_a_fast_lane_is_remembered() -> None:
    lane = Lane("disk_read")
    now = work(lane, 64 * MIB, 0.0, 0.01)
    fast = lane.estimate()
    lane.age(now + 1e6)
    assert lane.estimate() == fast


def test_a_lane_that_slows_down_is_noticed_within_seconds() -> None:
    lane, now = Lane("disk_read"), 0.0
    for _ in range(1000):
        now = work(lane, 16 * MIB, now, 0.01)
    for _ in range(60):
        now = work(lane, 16 * MIB, now, 0.1)
    assert lane.load().bandwidth == pytest.approx(16 * MIB / 0.1, rel=0.5)


def test_a_failed_job_says_nothing_of_the_speed() -> None:
    lane = Lane("fetch")
    lane.submit(64 * MIB, 0.0)
    lane.submit(64 * MIB, 0.0)
    lane.failed(64 * MIB, 5.0)
    assert lane.load() == LaneLoad("fetch", 64 * MIB, 0.0, 0.0)
    lane.done(64 * MIB, 5.1, 0.1)
    assert lane.load().bandwidth == pytest.approx(64 * MIB / 0.1)
    assert (lane.submitted, lane.moved, lane.lost) == (128 * MIB, 64 * MIB, 64 * MIB)


def test_bytes_that_were_not_submitted_are_refused() -> None:
    lane = Lane("d2h")
    lane.submit(10, 0.0)
    with pytest.raises(ValueError, match="not submitted"):
        lane.done(11, 1.0, 1.0)
    lane.done(10, 1.0, 1.0)
    with pytest.raises(ValueError, match="not submitted"):
        lane.failed(0, 1.0)


def test_every_byte_is_moved_lost_or_waiting(seed: int) -> None:
    random, lane, now = Random(seed), Lane("fetch"), 0.0
    waiting: list[int] = []
    for _ in range(3000):
        now += random.random() * 0.01
        if not waiting or random.random() < 0.5:
            waiting.append(random.randint(0, 20 * MIB))
            lane.submit(waiting[-1], now)
        else:
            size = waiting.pop(random.randrange(len(waiting)))
            if random.random() < 0.2:
                lane.failed(size, now)
            else:
                lane.done(size, now, random.random() * 0.02)
        assert lane.backlog == sum(waiting)
        assert lane.submitted == lane.moved + lane.lost + lane.backlog
        assert lane.estimate().bandwidth > 0
        assert lane.estimate().latency >= 0
