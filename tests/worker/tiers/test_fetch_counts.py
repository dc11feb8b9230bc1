from collections import Counter

from pdserve.observe.metrics import Metrics
from pdserve.worker.tiers.fetch_counts import GrowthCounter


def counted(metrics: Metrics) -> dict[str, float]:
    return {outcome: count.value for (outcome,), count in metrics.kv_pulls_ended}


def test_two_workers_of_a_process_add_up() -> None:
    metrics = Metrics()
    one, other = GrowthCounter(metrics.kv_pulls_ended), GrowthCounter(metrics.kv_pulls_ended)
    one.note(Counter(ok=2))
    other.note(Counter(ok=1, busy=1))
    one.note(Counter(ok=5))
    one.note(Counter(ok=5))
    assert counted(metrics) == {"ok": 6, "busy": 1}


def test_a_count_that_falls_is_no_growth() -> None:
    metrics = Metrics()
    one = GrowthCounter(metrics.kv_pulls_ended)
    one.note({"ok": 3})
    one.note({"ok": 1})
    one.note({"ok": 4, "gone": 0})
    assert counted(metrics) == {"ok": 4}
