"""Dynamo's cost, term by term."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pdserve.router.policies.kv_load import KvLoad
from tests.router.policies.support import BLOCK, ask, snapshot, weighed, worker


def cost(policy: KvLoad, overlap: int = 0, **fields: int) -> float:
    state = snapshot([worker("a", **fields), worker("b")], overlaps={"a": overlap})
    return weighed(policy, ask(10), state)["a"]["cost"]


def test_an_idle_worker_costs_the_prompt_twice():
    assert cost(KvLoad()) == 20


def test_backlog_and_decode_add_up_and_overlap_is_taken_off():
    busy = {"prefill_tokens": 5 * BLOCK, "kv_tokens": 7 * BLOCK}
    assert cost(KvLoad(), **busy) == 5 + 10 + 7 + 10
    assert cost(KvLoad(), 4, **busy) == 5 + 10 - 4 + 7 + 10
    assert cost(KvLoad(overlap_credit=2, prefill_scale=3), 4, **busy) == 3 * (15 - 8) + 17


def test_prefill_is_never_less_than_nothing():
    assert cost(KvLoad(overlap_credit=4), 10) == 10


def test_sequences_count_if_asked_for():
    busy = {"sequences": 4, "prefill_tokens": 0, "kv_tokens": 0}
    assert cost(KvLoad(request_weight=2.5), **busy) == 30


def test_credit_decays_with_the_backlog_beyond_the_least():
    busy = {"prefill_tokens": 20 * BLOCK}
    assert cost(KvLoad(credit_decay=1), 9, **busy) == pytest.approx(30 - 9 / 3 + 10)
    assert cost(KvLoad(credit_decay=1), 9) == 11


def test_lower_tiers_earn_less():
    state = snapshot([worker("a")], overlaps={"a": 2})
    lower = snapshot([worker("a")], overlaps={"a": 2}, lower={"a": (4, 8)})
    costs = [weighed(KvLoad(), ask(10), s)["a"]["cost"] for s in (state, lower)]
    assert costs[0] - costs[1] == pytest.approx(2 * 0.75 + 4 * 0.25)


def test_the_least_cost_wins_and_ties_are_drawn():
    state = snapshot([worker("a"), worker("b"), worker("c", prefill_tokens=64)])
    random = Random(1)
    assert {KvLoad()(ask(), state, random).node for _ in range(50)} == {"a", "b"}


def test_temperature_draws_the_cheaper_more_often():
    state, random = snapshot([worker("a"), worker("b", prefill_tokens=640)]), Random(2)
    drawn = Counter(str(KvLoad(temperature=1.0)(ask(), state, random).node) for _ in range(500))
    assert 300 < drawn["a"] < 430  # 500 / (1 + 1 / e) = 366


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_options_that_cannot_work_are_refused(bad: float):
    with pytest.raises(ValueError, match="at least 0"):
        KvLoad(overlap_credit=bad)
