from pdserve.observe.engine_metrics import (
    EngineSample,
    merge_by_labels,
    one_by_process,
    sum_by_labels,
)
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics


def test_an_empty_pool_is_not_in_use():
    assert EngineSample().kv_usage == 0.0


def test_workers_of_a_process_are_told_apart_by_model_and_mode():
    samples = [
        EngineSample(model="m", mode="prefill", ready=True, blocks_total=8, blocks_used=2),
        EngineSample(model="m", mode="decode", ready=True, blocks_total=16, blocks_used=4),
    ]
    assert merge_by_labels(samples) == samples


def test_workers_with_the_same_labels_are_summed():
    one = EngineSample(model="m", ready=True, running=2, stalled_for=0.5)
    other = EngineSample(model="m", ready=False, running=3, stalled_for=0.25)
    (both,) = merge_by_labels([one, other])
    assert (both.model, both.mode, both.ready, both.running) == ("m", "aggregated", False, 5)
    assert both.stalled_for == 0.5


def test_a_process_with_several_engines_is_counted_once():
    shared = [
        EngineSample(model="m", mode="prefill", pid=7, memory=100, cpu=1.5),
        EngineSample(model="m", mode="decode", pid=7, memory=100, cpu=1.5),
        EngineSample(model="n", pid=8, memory=10),
        EngineSample(model="n", pid=9, memory=5),
        EngineSample(model="n", memory=1),
    ]
    processes = one_by_process(shared)
    assert [one.mode for one in processes] == ["decode+prefill", "aggregated", "aggregated"]
    assert sum_by_labels(processes, lambda one: one.memory) == {
        ("m", "decode+prefill"): 100,
        ("n", "aggregated"): 15,
    }


def test_the_memory_of_engines_is_on_the_page_and_in_one_number():
    metrics = Metrics()
    assert "engine_process" not in render(metrics.families()).decode()
    for mode in ("prefill", "decode"):
        sample = EngineSample(model="m", mode=mode, pid=7, memory=100, cpu=1.5)
        metrics.attach_engine(lambda sample=sample: sample)  # type: ignore[misc]
    page = render(metrics.families()).decode()
    labels = '{mode="decode+prefill",model="m"}'
    assert f"pdserve_engine_process_resident_memory_bytes{labels} 100.0" in page
    assert f"pdserve_engine_process_cpu_seconds_total{labels} 1.5" in page
    assert metrics.engine_memory == 100
