"""Searches find the cheapest pool that fits, with few looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.planner.what_if.records import MODES, CandidatePool, CandidateWorker, Outcome
from pdserve.planner.what_if.search import Mix, cheapest_mix, mixes_around, smallest_fit

if TYPE_CHECKING:
    from collections.abc import Callable


def pool_of(mix: Mix, price: float = 1.0) -> CandidatePool:
    workers = tuple(
        CandidateWorker(mode=mode, price=price)
        for mode, count in zip(MODES, mix, strict=True)
        for _ in range(count)
    )
    return CandidatePool(str(tuple(mix)), workers)


def judge(misses: Callable[[CandidatePool], float]) -> Callable[[CandidatePool], Outcome]:
    def evaluate(pool: CandidatePool) -> Outcome:
        miss = misses(pool)
        return Outcome(
            pool=pool,
            requests=100,
            unreachable=0.0,
            miss=miss,
            miss_ttft=miss,
            miss_itl=0.0,
            spread=0.0,
        )

    return evaluate


@pytest.mark.parametrize("answer", range(1, 33))
def test_the_smallest_number_that_fits_is_found(answer: int):
    evaluate = judge(lambda pool: 0.0 if len(pool.workers) >= answer else 0.5)
    fit = smallest_fit(evaluate, lambda number: pool_of(Mix(number)), 32, 0.05)
    assert fit.chosen is not None
    assert len(fit.chosen.pool.workers) == answer
    assert len(fit.tried) <= 11
    assert fit.best is fit.chosen


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_nothing_fits(most: int):
    evaluate = judge(lambda pool: 1 / len(pool.workers))
    fit = smallest_fit(evaluate, lambda number: pool_of(Mix(number)), most, 0.05)
    assert fit.chosen is None
    assert fit.best is not None
    assert len(fit.best.pool.workers) == most


def test_mixes_stay_near_and_serve():
    found = set(mixes_around(Mix(prefill=1, decode=2), modes=("prefill", "decode")))
    assert found == {Mix(0, p, d, 0) for p in range(4) for d in range(1, 5)}
    assert all(mix.serves and not mix.wasteful for mix in mixes_around(Mix(1, 1, 1, 1)))


def test_mixes_keep_the_least_and_the_most():
    found = list(mixes_around(Mix(2, 2, 2), least=4, most=5))
    assert found
    assert all(4 <= sum(mix) <= 5 for mix in found)


def test_the_cheapest_mix_with_the_fewest_moves_is_chosen():
    """Three workers are needed, one of them for prompts: 1:2 is as dear as 2:1, and nearer."""

    def miss(pool: CandidatePool) -> float:
        return 0.0 if len(pool.workers) >= 3 and pool.count().get("prefill") else 0.3

    pools = {mix: pool_of(mix) for mix in mixes_around(Mix(0, 1, 3), modes=("prefill", "decode"))}
    fit = cheapest_mix(judge(miss), pools, Mix(0, 1, 3), 0.05)
    assert fit.chosen is not None
    assert fit.chosen.pool.count() == {"prefill": 1, "decode": 2}


def test_a_dearer_kind_is_taken_if_only_it_fits():
    pools = {Mix(2): pool_of(Mix(2)), Mix(1): pool_of(Mix(1), price=5.0)}
    fit = cheapest_mix(judge(lambda pool: pool.cost < 4), pools, Mix(2), 0.05)
    assert fit.chosen is not None
    assert fit.chosen.pool.cost == 5.0


def test_hopeless_mixes_are_not_tried():
    pools = {Mix(n): pool_of(Mix(n)) for n in range(1, 6)}
    evaluate = judge(lambda pool: 0.0)
    fit = cheapest_mix(evaluate, pools, Mix(3), 0.05, lambda pool: pool.cost < 3)
    assert [len(outcome.pool.workers) for outcome in fit.tried] == [3]


def test_a_search_ends():
    pools = {mix: pool_of(mix) for mix in mixes_around(Mix(3, 3, 3, 3))}
    fit = cheapest_mix(judge(lambda pool: 1.0), pools, Mix(3, 3, 3, 3), 0.05, most=7)
    assert fit.chosen is None
    assert len(fit.tried) == 7
