"""The least predicted time, and when a fetch pays."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.router.policies.mooncake import Mooncake
from tests.router.policies.support import ask, snapshot, weighed, worker

MODEL = LatencyModel(base=0.0, per_token=0.001, per_pair=0.0, fitted=True)


def test_it_weighs_waiting_against_computing():
    near = snapshot([worker("a", work=0.1), worker("b")], overlaps={"a": 5}, model=MODEL)
    far = snapshot([worker("a", work=0.2), worker("b")], overlaps={"a": 5}, model=MODEL)
    assert Mooncake()(ask(10), near, Random()).node == "a"  # 0.1 + 0.16 < 0.32
    assert Mooncake()(ask(10), far, Random()).node == "b"


def test_a_slower_worker_computes_longer():
    state = snapshot([worker("a", speed=2.0), worker("b", work=0.1)], model=MODEL)
    terms = weighed(Mooncake(), ask(10), state)
    assert terms["a"]["prefill"] == pytest.approx(2 * terms["b"]["prefill"])


def test_a_cheap_fetch_brings_the_best_prefix_to_an_idle_worker():
    busy = [worker("a", work=1.0), worker("b")]
    state = snapshot(busy, overlaps={"a": 10}, model=MODEL)
    terms = weighed(Mooncake(fetch_seconds_per_token=1e-4), ask(10), state)
    assert terms["b"]["fetch"] == pytest.approx(319 * 1e-4)
    assert terms["b"]["prefill"] == pytest.approx(0.001)


def test_a_prefix_not_much_better_is_not_fetched():
    state = snapshot([worker("a"), worker("b")], overlaps={"a": 6, "b": 5}, model=MODEL)
    terms = weighed(Mooncake(fetch_seconds_per_token=1e-4), ask(10), state)
    assert terms["b"]["fetch"] == 0


@pytest.mark.parametrize("options", [{"balancing_threshold": 0.5}, {"fetch_seconds_per_token": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]):
    with pytest.raises(ValueError, match="at least"):
        Mooncake(**options)
