"""Who waits, and who is next."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.router.admission_queue import AGEING, AdmissionQueue, QueuedRequest
from tests.router.support import life, route

F = life("f")


def held(number: int, cost: float = 1.0, arrived: float = 0.0, **wants: Any) -> QueuedRequest:
    deadline = wants.pop("deadline", None)
    request = replace(route(), request_id=str(number), **wants)
    return QueuedRequest(request, F, lambda outcome: None, arrived, cost, deadline, number)


def order(queue: AdmissionQueue) -> list[int]:
    """Empties it."""
    taken = []
    while (item := queue.take(lambda item: True)) is not None:
        queue.check()
        taken.append(item.number)
    return taken


def filled(*items: QueuedRequest, order: str = "sjf") -> AdmissionQueue:
    queue = AdmissionQueue(order)
    for item in items:
        queue.push(item)
    queue.check()
    return queue


def test_short_work_overtakes_long_work():
    assert order(filled(held(1, 3.0), held(2, 1.0), held(3, 2.0))) == [2, 3, 1]


def test_nobody_waits_for_ever():
    """One that has waited long enough goes before a shorter one that has just come."""
    late = 2.0 / AGEING
    assert order(filled(held(1, 3.0), held(2, 1.0, late - 0.1))) == [2, 1]
    assert order(filled(held(1, 3.0), held(2, 1.0, late + 0.1))) == [1, 2]


def test_time_in_the_frontend_counts_as_waiting():
    assert order(filled(held(1, 1.0), held(2, 1.0, waited=5.0))) == [2, 1]


def test_order_of_arrival_can_be_asked_for():
    assert order(filled(held(1, 3.0), held(2, 1.0, 0.1), order="fifo")) == [1, 2]


def test_priority_comes_first():
    assert order(filled(held(1, 0.1), held(2, 9.0, priority=1), held(3, priority=-1))) == [2, 1, 3]


def test_tenants_share_by_seconds_and_weight():
    """A tenant with ten times the requests gets no more than its share; double weight, double."""
    items = [held(n, 1.0, tenant="many") for n in range(100)]
    items += [held(100 + n, 2.0, tenant="long") for n in range(50)]
    items += [held(200 + n, 1.0, tenant="heavy", weight=2.0) for n in range(100)]
    queue, seconds = filled(*items), Counter[str]()
    for _ in range(60):
        item = queue.take(lambda item: True)
        assert item is not None
        seconds[item.request.tenant] += int(item.cost)
    assert abs(seconds["many"] - seconds["long"]) <= 2
    assert abs(seconds["heavy"] - 2 * seconds["many"]) <= 3


def test_who_was_away_gets_no_credit():
    queue = filled(*(held(n, 1.0, tenant="a") for n in range(20)))
    for _ in range(10):
        queue.take(lambda item: True)
    for n in range(20, 30):
        queue.push(held(n, 1.0, tenant="b"))
    first = [n >= 20 for n in order(queue)[:10]]
    assert sum(first) in (4, 5, 6)


def test_who_comes_back_owes_what_it_had():
    """Leaving the queue for a moment does not wash a tenant clean."""
    queue = filled(held(1, 9.0, tenant="a"), held(2, 1.0, tenant="b"), held(3, 1.0, tenant="b"))
    assert queue.take(lambda item: item.number == 1) is not None
    queue.push(held(4, 0.5, tenant="a"))
    assert order(queue) == [2, 3, 4]


def test_who_does_not_fit_is_passed_over():
    queue = filled(held(1, 1.0, allowed=("w9",)), held(2, 2.0))
    assert (len(queue), len(queue.filters)) == (2, 1)
    item = queue.take(lambda item: item.worker_filter is None)
    assert item is not None
    assert item.number == 2
    assert queue.take(lambda item: False) is None
    assert len(queue) == 1


def test_deadlines_are_known_in_order():
    soon, late = held(1, deadline=3.0), held(2, deadline=7.0)
    queue = filled(late, soon, held(3))
    assert queue.next_deadline == 3.0
    assert queue.expired(2.9) == []
    assert queue.expired(7.0) == [soon, late]
    assert queue.remove(soon)
    assert not queue.remove(soon)
    assert queue.next_deadline == 7.0


def test_the_least_important_can_be_found():
    queue = filled(held(1, priority=1), held(2, 1.0), held(3, 5.0))
    assert queue.last_below(0) is None
    last = queue.last_below(2)
    assert last is not None
    assert last.number == 3


@pytest.mark.parametrize("seed", range(20))
def test_every_question_leaves_once_whatever_happens(seed):
    random, queue = Random(seed), AdmissionQueue()
    waiting: dict[int, QueuedRequest] = {}
    gone: list[QueuedRequest] = []
    for number in range(400):
        what = random.random()
        if what < 0.5 or not waiting:
            item = held(
                number,
                random.choice((0.0, 0.01, 1.0, 7.3)),
                number * 0.1,
                tenant=random.choice("abc"),
                weight=random.choice((0.5, 1.0, 3.0)),
                priority=random.choice((0, 0, 5)),
                deadline=random.choice((None, number * 0.1 + random.random() * 9)),
            )
            waiting[number] = item
            queue.push(item)
        elif what < 0.8:
            late = set(random.sample(list(waiting), k=(len(waiting) + 1) // 2))
            taken = queue.take(lambda item: item.number in late)  # noqa: B023  called at once
            if taken is not None:
                gone.append(waiting.pop(taken.number))
        else:
            item = waiting.pop(random.choice(list(waiting)))
            assert queue.remove(item)
            gone.append(item)
        queue.check()
        assert {item.number for item in queue} == waiting.keys()
    gone += [waiting.pop(number) for number in order(queue)]
    assert not waiting
    assert len({item.number for item in gone}) == len(gone)
    assert (len(queue), queue.bytes, queue.work, len(queue.filters)) == (0, 0, 0.0, 0)
    assert queue.next_deadline is None


def test_what_is_ahead_is_what_would_be_begun_before():
    queue = filled(
        held(1, 1.0, tenant="a"),
        held(2, 3.0, tenant="a"),
        held(3, 2.0, tenant="b", weight=2.0),
        held(4, 9.0, tenant="b", weight=2.0),
        held(5, 5.0, tenant="a", priority=1),
        held(6, 7.0, tenant="c", priority=-1),
    )

    def ahead(cost: float, **wants: Any) -> float:
        return queue.ahead(replace(route(), **wants), cost, 0.0)

    assert ahead(2.0, tenant="new") == 5.0, "its turn is next in its band"
    assert ahead(2.0, tenant="a") == 5.0 + 2.0 + 4.0, "half of its own, twice as much of b"
    assert ahead(9.0, tenant="a") == 5.0 + 4.0 + 8.0
    assert ahead(0.1, tenant="a") == 5.0
    assert ahead(0.1, tenant="a", priority=2) == 0.0
    assert ahead(0.1, tenant="a", priority=-2) == 27.0
