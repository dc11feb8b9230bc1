from pdserve.messages.engine import EngineStats
from pdserve.worker.cumulative_stats import COUNTERS, CumulativeStats


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
    }
