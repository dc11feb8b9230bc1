from __future__ import annotations

from pdserve.planner.changes.times import KindHealth, StartTimes
from pdserve.planner.config import PlannerConfig

CONFIG = PlannerConfig()


def test_a_prior_stands_for_what_was_not_seen():
    times = StartTimes(CONFIG)
    assert times.p90("start", "gpu") == 120.0
    assert times.p50("drain", "gpu") == 5.0
    times.add("start", "gpu", 40.0)
    assert times.p90("start", "gpu") == 40.0
    assert times.p90("start", "cpu") == 120.0
    assert times.p90("boot", "gpu") == 120.0


def test_the_newest_twenty_times_count():
    times = StartTimes(CONFIG)
    for second in range(100, 120):
        times.add("boot", "gpu", second)
    assert times.p50("boot", "gpu") == 109
    assert times.p90("boot", "gpu") == 117
    for _ in range(20):
        times.add("boot", "gpu", 10.0)
    assert times.p90("boot", "gpu") == 10.0


def test_failures_back_off_and_disable():
    health = KindHealth(CONFIG)
    health.failed("gpu", 0.0, "no image")
    assert "waits 60 s more: no image" in health.blocked("gpu", 0.0)
    assert health.blocked("gpu", 60.0) == ""
    health.failed("gpu", 60.0, "no image")
    assert health.blocked("gpu", 179.0)
    assert health.blocked("gpu", 180.0) == ""
    health.failed("gpu", 180.0, "no image")
    assert health.blocked("gpu", 1e6) == "kind 'gpu' is disabled: no image"
    assert health.disabled() == {"gpu": "no image"}
    health.enable("gpu")
    assert health.blocked("gpu", 181.0) == ""


def test_a_start_that_works_forgets_failures():
    health = KindHealth(CONFIG)
    for _ in range(2):
        health.failed("gpu", 0.0, "x")
        health.failed("gpu", 0.0, "x")
        health.ready("gpu")
    assert health.disabled() == {}
    assert health.blocked("gpu", 1.0) == ""


def test_a_kind_that_is_not_to_be_had_has_not_failed():
    health = KindHealth(CONFIG)
    for _ in range(9):
        health.away("gpu", 600.0, "the quota is used up")
    assert health.disabled() == {}
    assert "the quota is used up" in health.blocked("gpu", 599.0)
    assert health.blocked("gpu", 600.0) == ""
