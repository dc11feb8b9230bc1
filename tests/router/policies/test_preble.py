"""Exploit what matches, explore what does not."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.router.policies.preble import Preble
from tests.router.policies.support import BLOCK, ask, snapshot, weighed, worker

MODEL = LatencyModel(base=0.0, per_token=0.001, per_pair=0.0)


def chosen(policy: Preble, first: float, second: float, overlap: int) -> str:
    workers = [worker("a", window_work=first), worker("b", window_work=second)]
    state = snapshot(workers, overlaps={"a": overlap}, model=MODEL)
    return policy(ask(10), state, Random()).node


def test_a_long_match_is_exploited_until_its_worker_carries_too_much():
    assert chosen(Preble(), 1.4, 1.0, 6) == "a"
    assert chosen(Preble(), 1.6, 1.0, 6) == "b"
    assert chosen(Preble(imbalance=2), 1.6, 1.0, 6) == "a"


def test_half_a_match_is_explored():
    assert chosen(Preble(), 1.4, 1.0, 5) == "b"
    assert chosen(Preble(), 1.1, 1.0, 5) == "a"


def test_eviction_costs_what_may_be_asked_for_again():
    full = worker("a", blocks_total=20, blocks_used=10, blocks_cached=6)
    state = snapshot([full], model=MODEL)
    terms = weighed(Preble(reuse=0.5), ask(10), state)["a"]
    assert terms["eviction"] == pytest.approx(0.5 * 6 * BLOCK * 0.001)
    assert terms["prefill"] == pytest.approx(0.32)


@pytest.mark.parametrize("options", [{"imbalance": 0.5}, {"reuse": 2.0}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]):
    with pytest.raises(ValueError, match="must be"):
        Preble(**options)
