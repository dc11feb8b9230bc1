from pdserve.observe.engine_metrics import EngineSample, merge_by_labels
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.observe.tier_metrics import (
    LANE_METRICS,
    MISS_METRICS,
    PLAN_METRICS,
    TIER_METRICS,
    LaneSample,
    MissSample,
    PlanSample,
    TierSample,
    merge_named,
)

DISK = TierSample(capacity=100, valid=40, hit_tokens=7, retention=5.0)


def page(*engines: EngineSample) -> str:
    metrics = Metrics()
    for engine in engines:
        metrics.attach_engine(lambda engine=engine: engine)  # type: ignore[misc]
    return render(metrics.families()).decode()


def test_each_field_of_a_sample_has_its_metric() -> None:
    assert [one.field for one in TIER_METRICS] == list(TierSample.__dataclass_fields__)
    assert [one.field for one in LANE_METRICS] == list(LaneSample.__dataclass_fields__)
    assert [one.field for one in PLAN_METRICS] == list(PlanSample.__dataclass_fields__)
    assert [one.field for one in MISS_METRICS] == list(MissSample.__dataclass_fields__)


def test_a_worker_without_tiers_shows_none() -> None:
    assert "kv_tier" not in page(EngineSample(model="m"))
    assert "kv_lane" not in page(EngineSample(model="m"))
    assert "kv_plan" not in page(EngineSample(model="m"))
    assert "kv_missed" not in page(EngineSample(model="m"))


def test_tiers_and_lanes_are_on_the_page_by_name() -> None:
    tiers = {"host": TierSample(valid=3, trouble=1), "disk": DISK}
    lanes = {"h2d": LaneSample(backlog=9, bandwidth=2.5, latency=0.25)}
    found = page(EngineSample(model="m", mode="decode", tiers=tiers, lanes=lanes))
    for line in (
        'pdserve_kv_tier_capacity_bytes{mode="decode",model="m",tier="disk"} 100.0',
        'pdserve_kv_tier_valid_bytes{mode="decode",model="m",tier="host"} 3.0',
        'pdserve_kv_tier_hit_tokens_total{mode="decode",model="m",tier="disk"} 7.0',
        'pdserve_kv_tier_trouble{mode="decode",model="m",tier="host"} 1.0',
        'pdserve_kv_tier_trouble{mode="decode",model="m",tier="disk"} 0.0',
        'pdserve_kv_lane_backlog_bytes{lane="h2d",mode="decode",model="m"} 9.0',
        'pdserve_kv_lane_bandwidth_bytes_per_second{lane="h2d",mode="decode",model="m"} 2.5',
        'pdserve_kv_lane_latency_seconds{lane="h2d",mode="decode",model="m"} 0.25',
    ):
        assert line in found


def test_plans_and_misses_of_two_workers_are_added() -> None:
    plans = {"peer": PlanSample(plans=2, predicted=1.0, actual=1.5, gained=4.0, lost=0.5)}
    one = EngineSample(model="m", plans=plans, misses={"absent": MissSample(blocks=3)})
    other = EngineSample(model="m", plans=plans, misses={"busy": MissSample(blocks=1)})
    found = page(one, other)
    of = 'mode="aggregated",model="m"'
    for line in (
        f'pdserve_kv_plans_total{{{of},source="peer"}} 4.0',
        f'pdserve_kv_plan_predicted_seconds_total{{{of},source="peer"}} 2.0',
        f'pdserve_kv_plan_actual_seconds_total{{{of},source="peer"}} 3.0',
        f'pdserve_kv_plan_gained_seconds_total{{{of},source="peer"}} 8.0',
        f'pdserve_kv_plan_lost_seconds_total{{{of},source="peer"}} 1.0',
        f'pdserve_kv_missed_blocks_total{{{of},reason="absent"}} 3.0',
        f'pdserve_kv_missed_blocks_total{{{of},reason="busy"}} 1.0',
    ):
        assert line in found


def test_workers_with_the_same_labels_are_one() -> None:
    host = TierSample(valid=1)
    one = EngineSample(model="m", tiers={"disk": DISK}, lanes={"d2h": LaneSample(latency=1.0)})
    other = EngineSample(
        model="m",
        tiers={"host": host, "disk": TierSample(capacity=20, retention=9.0, trouble=1)},
        lanes={"d2h": LaneSample(backlog=2, latency=0.5)},
    )
    (both,) = merge_by_labels([one, other])
    assert both.tiers == {
        "host": host,
        "disk": TierSample(capacity=120, valid=40, hit_tokens=7, retention=9.0, trouble=1),
    }
    assert both.lanes == {"d2h": LaneSample(backlog=2, latency=1.0)}
    assert merge_named({}, {"disk": DISK}) == {"disk": DISK}
