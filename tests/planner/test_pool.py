from __future__ import annotations

import pytest

from pdserve.planner.changes.ids import change_id
from pdserve.planner.pool import Coming, Pool, gather, serves, valid_mix
from tests.planner.support import MODEL, instance, worker


def look(workers=(), instances=(), asked=(), boot: float = 30.0, given_up=()) -> Pool:
    return gather(
        MODEL,
        workers,
        instances,
        asked,
        prices={"gpu": 2.0},
        ready_in=lambda change, kind: boot,
        given_up=given_up,
    )


def name(index: int, mode: str = "aggregated") -> str:
    return change_id(MODEL, mode, 1, 1, index)


def test_pending_and_booting_are_charged_and_do_not_serve():
    """Counted as serving they would hide that capacity is missing; not counted at all, starts would
    pile up beyond the budget."""
    found = look(
        [worker(1, kind="gpu", change=name(0))],
        [
            instance(name(0), "running"),
            instance(name(1), "pending"),
            instance(name(2), "booting"),
        ],
    )
    assert found.mix == {"aggregated": 1}
    assert len(found.serving) == 1
    assert found.size == 3
    assert found.cost == 6.0


def test_capacity_to_come_is_capacity_only_if_its_time_is_known():
    found = look(
        instances=[
            instance(name(1), "pending"),
            instance(name(2), "pending", expected=60.0),
            instance(name(3), "booting"),
        ]
    )
    assert {one.change: one.ready_in for one in found.coming} == {
        name(1): None,
        name(2): 90.0,
        name(3): 30.0,
    }


def test_a_loading_worker_and_its_instance_are_one():
    found = look(
        [worker(1, state="loading", change=name(1), kind="gpu")],
        [instance(name(1), "running")],
        [Coming(change=name(1), kind="gpu", mode="aggregated", state="booting", price=2.0)],
    )
    assert found.size == 1
    assert found.cost == 2.0
    assert [one.state for one in found.coming] == ["loading"]


def test_an_asked_start_is_charged_until_a_list_shows_it():
    asked = [Coming(change=name(1), kind="gpu", mode="decode", state="asked", price=2.0)]
    assert look(asked=asked).cost == 2.0
    assert look(asked=asked).size == 1
    shown = look(asked=asked, instances=[instance(name(1), "pending")])
    assert shown.cost == 2.0
    failed = look(asked=asked, instances=[instance(name(1), "failed")])
    assert (failed.cost, failed.size) == (0.0, 0)


def test_an_asked_start_is_charged_while_its_host_does_not_answer():
    """Else another one was started at each tick, beyond the budget."""
    asked = [Coming(change=name(1), kind="gpu", mode="decode", state="asked", price=2.0)]
    unknown = look(asked=asked, instances=[instance(name(1), "unknown")])
    assert (unknown.cost, unknown.size) == (2.0, 1)
    assert [one.ready_in for one in unknown.coming] == [None]
    given_up = look(asked=(), instances=[instance(name(1), "unknown")], given_up=[name(1)])
    assert (given_up.cost, given_up.size) == (2.0, 0), "it may run, and nothing is expected of it"
    lost = look(instances=[instance(name(1), "unknown")])
    assert lost.size == 0, "a worker that served on a host that has died is replaced"


def test_a_draining_worker_costs_and_does_not_serve():
    found = look([worker(1, kind="gpu"), worker(2, kind="gpu", state="draining")])
    assert (found.size, found.cost, found.mix) == (1, 4.0, {"aggregated": 1})
    ending = look([worker(1, kind="gpu")], [instance(name(5), "ending")])
    assert (ending.size, ending.cost) == (1, 4.0)


def test_a_worker_that_changes_its_mode_counts_as_what_it_becomes():
    found = look([worker(1, "decode", state="leaving", target="prefill"), worker(2, "decode")])
    assert found.mix == {"prefill": 1, "decode": 1}
    assert len(found.serving) == 1
    assert found.size == 2


def test_other_models_and_foreign_names_are_left_out():
    other = change_id("other", "aggregated", 1, 1, 1)
    found = look(instances=[instance(other, "booting"), instance("by-hand", "booting")])
    assert found.coming == ()


@pytest.mark.parametrize(
    ("mix", "serving", "valid"),
    [
        ({"aggregated": 1}, True, True),
        ({"decode": 1}, True, False),
        ({"decode": 1, "prefill": 1}, True, True),
        ({"decode": 1, "both": 1}, True, True),
        ({"both": 1}, True, True),
        ({"prefill": 2}, False, False),
        ({"prefill": 1, "aggregated": 1}, True, False),
        ({}, False, False),
    ],
)
def test_mixes(mix, serving, valid):
    assert serves(mix) is serving
    assert valid_mix(mix) is valid
