"""Loyal until it costs too much."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.router.policies.sticky import Sticky
from tests.router.policies.support import ask, snapshot, weighed, worker


def chosen(policy: Sticky, backlog: int, overlap: int = 9) -> str:
    state = snapshot([worker("a", prefill_tokens=backlog), worker("b")], overlaps={"a": overlap})
    return policy(ask(10), state, Random()).node


def test_a_warm_worker_keeps_its_prompts_up_to_its_limit():
    limit = 18 * 15_928
    assert chosen(Sticky(), limit) == "a"
    assert chosen(Sticky(), limit + 1000) == "b"


def test_a_short_match_does_not_bind():
    assert chosen(Sticky(), 1000, overlap=7) == "b"
    assert chosen(Sticky(affinity=0.7), 1000, overlap=7) == "a"


def test_the_learnt_time_can_take_the_throughputs_place():
    model = LatencyModel(base=0.0, per_token=0.001, per_pair=0.0)
    workers = [worker("a", work=1.5, prefill_tokens=1500), worker("b")]
    state = snapshot(workers, overlaps={"a": 9}, model=model)
    assert Sticky(patience=2, throughput=0)(ask(10), state, Random()).node == "a"
    assert Sticky(patience=1, throughput=0)(ask(10), state, Random()).node == "b"


def test_it_shows_what_it_weighed():
    state = snapshot([worker("a", prefill_tokens=680)], overlaps={"a": 5})
    terms = weighed(Sticky(throughput=1000), ask(10), state)["a"]
    assert terms == {"cached_tokens": 160, "estimate": pytest.approx(0.84), "cost": 840}


@pytest.mark.parametrize("options", [{"affinity": 0.0}, {"patience": -1.0}, {"throughput": -1.0}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]):
    with pytest.raises(ValueError, match="must be"):
        Sticky(**options)
