"""Shares of an overloaded cluster, by weight and priority, where one router sees all requests."""

from __future__ import annotations

import pytest

from bench.fairness import Case, Outcome, Tenant, backlogged, measure, prices
from pdserve.sim.replay.metrics import quantile
from pdserve.sim.replay.record import ReplayRecord

SECONDS = 12.0


@pytest.fixture(scope="module")
def cost() -> dict[int, float]:
    return prices(1)


def outcomes(case: Case, cost: dict[int, float]) -> dict[str, Outcome]:
    return {outcome.tenant.name: outcome for outcome in measure(case, cost, SECONDS, seed=1)}


def heavy_share(cost: dict[int, float], **options: str) -> float:
    """What weight 3 gets beside weight 1, where both ask for the same, and for too much."""
    tenants = (Tenant("light", 1, 0.9), Tenant("heavy", 3, 0.9))
    found = outcomes(Case("", tenants, options=options), cost)
    light, heavy = found["light"].work, found["heavy"].work
    assert light > 0
    return heavy / (light + heavy)


def test_work_follows_weights_while_requests_wait_in_the_router(cost) -> None:
    assert heavy_share(cost) == pytest.approx(0.75, abs=0.06)


@pytest.mark.long(one_in=3)
def test_weights_do_not_depend_on_the_order_within_a_tenant(cost) -> None:
    assert heavy_share(cost, queue_order="fifo") == pytest.approx(0.75, abs=0.06)


@pytest.mark.long(one_in=3)
def test_nothing_is_shared_out_where_nothing_is_held(cost) -> None:
    assert heavy_share(cost, hold_work="0") < 0.62


@pytest.mark.long(one_in=3)
def test_who_asks_for_little_does_not_wait_behind_who_asks_for_much(cost) -> None:
    tenants = (Tenant("modest", 1, 0.15), Tenant("greedy", 1, 1.5))
    found = outcomes(Case("", tenants), cost)
    modest, greedy = found["modest"], found["greedy"]
    assert modest.served > 0.9 > greedy.served
    assert quantile(modest.firsts, 0.9) < quantile(greedy.firsts, 0.5) / 2


@pytest.mark.long(one_in=3)
def test_a_higher_priority_goes_first_whatever_the_weights(cost) -> None:
    tenants = (Tenant("urgent", 1, 0.4, priority=1), Tenant("usual", 100, 1.1))
    found = outcomes(Case("", tenants), cost)
    assert found["urgent"].served > 0.9 > found["usual"].served
    assert quantile(found["urgent"].firsts, 0.9) < quantile(found["usual"].firsts, 0.5) / 2


def test_backlog_is_when_all_have_requests_without_a_first_token() -> None:
    def asked(tenant: str, arrival: float, first: float) -> ReplayRecord:
        return ReplayRecord(
            number=0, arrival=arrival, prompt_tokens=1, wanted_tokens=1, tenant=tenant, first=first
        )

    records = [asked("a", 0, 4), asked("a", 6, 9), asked("b", 1, 3), asked("b", 2, 7)]
    assert backlogged(records, {"a", "b"}) == [(1, 4), (6, 7)]
    assert backlogged([*records, asked("c", 2, 3)], {"a", "b"}) == [(1, 4), (6, 7)]
