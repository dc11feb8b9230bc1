from pdserve.observe.engine_metrics import EngineSample, merge_by_labels


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
