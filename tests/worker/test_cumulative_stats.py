from pdserve.messages.engine import EngineStats
from pdserve.messages.tiers import PlanStats, TierStats
from pdserve.worker.cumulative_stats import COUNTERS, TIER_COUNTERS, CumulativeStats


def test_counters_never_fall_over_several_lives():
    totals = CumulativeStats()
    for life in range(3):
        for count in (0, 4, 10):
            totals.note(EngineStats(steps=count, output_tokens=2 * count, step_seconds=count / 4))
            assert totals.snapshot().steps == 10 * life + count
    assert totals.snapshot().output_tokens == 60
    assert totals.snapshot().step_seconds == 7.5


def test_gauges_are_those_of_now():
    totals = CumulativeStats()
    totals.note(EngineStats(running=5, blocks_used=9, steps=3))
    totals.note(EngineStats())
    snapshot = totals.snapshot()
    assert (snapshot.running, snapshot.blocks_used, snapshot.steps) == (0, 0, 3)


def test_every_field_is_a_counter_or_a_gauge_on_purpose():
    assert set(EngineStats.__struct_fields__) - set(COUNTERS) == {
        "running",
        "waiting",
        "blocks_total",
        "blocks_free",
        "blocks_cached",
        "blocks_used",
        "blocks_quarantined",
        "uncomputed_tokens",
        "kv_tokens",
        "itl",
        "remote",
        "sending",
        "tiers",
        "lanes",
        "plans",
        "missed_blocks",
    }


def test_counters_of_tiers_do_not_fall_either():
    totals = CumulativeStats()
    for life in range(3):
        totals.note(EngineStats())  # it loads
        for hits in (0, 5, 9):
            disk = TierStats(tier=2, hit_tokens=hits, written_bytes=2 * hits, blocks_valid=hits)
            host = TierStats(tier=1, early_starts=hits, early_failed=hits // 2)
            totals.note(EngineStats(steps=hits, tiers=(host, disk)))
            host, disk = totals.snapshot().tiers
            assert (host.tier, host.hit_tokens) == (1, 0)
            assert host.early_starts == 9 * life + hits
            assert host.early_failed == 4 * life + hits // 2
            assert (disk.hit_tokens, disk.written_bytes) == (9 * life + hits, 18 * life + 2 * hits)
            assert disk.blocks_valid == hits


def test_a_core_that_loads_shows_the_totals_of_its_tiers():
    totals = CumulativeStats()
    totals.note(EngineStats(steps=4, tiers=(TierStats(tier=2, failed=3, retention=60.0),)))
    totals.note(EngineStats())
    assert totals.snapshot().tiers == (TierStats(tier=2, failed=3),)


def test_a_life_that_only_a_tier_tells_of():
    """Nothing was computed in either life."""
    totals = CumulativeStats()
    totals.note(EngineStats(tiers=(TierStats(tier=2, read_bytes=7),)))
    totals.note(EngineStats(tiers=(TierStats(tier=2, read_bytes=2),)))
    assert totals.snapshot().tiers[0].read_bytes == 9


def test_every_field_of_a_tier_is_a_counter_or_a_gauge_on_purpose():
    assert set(TierStats.__struct_fields__) - set(TIER_COUNTERS) == {
        *("tier", "blocks_total", "blocks_valid", "blocks_filling", "blocks_claimed"),
        *("retention", "trouble", "shared_blocks"),
    }


def test_counters_of_plans_and_missed_blocks_do_not_fall_either():
    totals = CumulativeStats()
    for life in range(3):
        for count in (0, 4, 10):
            peer = PlanStats(source="peer", plans=count, gained=count / 4)
            missed = {"absent": count, f"of life {life}": 1}
            totals.note(EngineStats(plans=(peer,), missed_blocks=missed))
            found = totals.snapshot()
            assert found.missed_blocks["absent"] == 10 * life + count
            assert found.plans[0].plans == 10 * life + count
            assert found.plans[0].gained == (10 * life + count) / 4
    assert totals.snapshot().missed_blocks.keys() == {"absent", *(f"of life {i}" for i in range(3))}
