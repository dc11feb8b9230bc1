"""Wishes of requests that wait, and what looking at them costs."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.router.admission_queue import QueuedRequest
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies.least_loaded import choose
from pdserve.router.worker_filter import WorkerFilter, WorkerFilters, WorkerSet, filter_bytes
from tests.router.support import facts, life, route


def names(*words: str) -> tuple[NodeId, ...]:
    return tuple(map(NodeId, words))


def crowd(sound: str = "", doubtful: str = "", adapted: str = "") -> WorkerSet:
    return WorkerSet(
        frozenset(names(*sound)), frozenset(names(*doubtful)), lambda lora: {*names(*adapted)}
    )


@pytest.mark.parametrize(
    ("allowed", "excluded", "workers", "meets"),
    [
        ("", "a", "ab", True),
        ("", "ab", "ab", False),
        ("", "a", "", False),
        ("a", "", "ab", True),
        ("c", "", "ab", False),
        ("ab", "a", "ac", False),
        ("ab", "a", "bc", True),
    ],
)
def test_a_wish_meets_workers_that_it_allows(allowed, excluded, workers, meets) -> None:
    worker_filter = WorkerFilter(frozenset(names(*allowed)), frozenset(names(*excluded)), "")
    assert worker_filter.meets(frozenset(names(*workers))) == meets


def test_equal_wishes_are_one_and_end_with_their_last_question() -> None:
    filters = WorkerFilters()
    assert filters.add(route()) is None
    first = filters.add(replace(route(), excluded=names("a", "b")))
    second = filters.add(replace(route(), excluded=names("b", "a")))
    assert first is second
    assert first is not None
    assert len(filters) == 1
    filters.remove(first)
    assert len(filters) == 1
    filters.remove(first)
    assert len(filters) == 0


def wished(filters: WorkerFilters, **wants: object) -> WorkerFilter:
    worker_filter = filters.add(replace(route(), **wants))
    assert worker_filter is not None
    return worker_filter


def test_doubtful_workers_are_open_only_to_those_that_have_no_sound_one() -> None:
    filters = WorkerFilters()
    only_d = wished(filters, allowed=names("d"))
    either = wished(filters, allowed=names("a", "d"))
    nobody = wished(filters, allowed=names("x"))
    everybody, open_ = crowd("ab", "d"), crowd("b", "d")
    assert [filters.is_open(w, everybody, open_) for w in (only_d, either, nobody)] == [
        True,
        False,
        False,
    ]
    assert not filters.possible(nobody, everybody)


def test_an_adapter_narrows_the_crowd() -> None:
    filters = WorkerFilters()
    worker_filter = wished(filters, lora="fr")
    everybody = crowd("ab", adapted="a")
    assert filters.possible(worker_filter, everybody)
    assert not filters.is_open(worker_filter, everybody, crowd("b", adapted="a"))
    assert filters.is_open(worker_filter, everybody, crowd("a", adapted="a"))
    assert everybody.having("fr") is everybody.having("fr")


def busy_core(workers: int, held: int, many: int) -> RouterCore:
    """Workers with enough to do, and requests that wait, each with so many names of its own."""
    core = RouterCore(RouterConfig(), choose, Random(1), clock=lambda: 100.0)
    for i in range(workers):
        core.worker(100.0, facts(f"w{i}", max_sequences=1))
        core.offer(100.0, life("f"), route(prompt_tokens=1000), lambda outcome: None)
    for i in range(held):
        worker_filter = names(*(f"x{i}-{j}" for j in range(many)))
        request = replace(route(prompt_tokens=1000), excluded=worker_filter)
        assert isinstance(
            core.offer(100.0, life("f"), request, lambda outcome: None), QueuedRequest
        )
    return core


def test_a_look_costs_no_more_than_the_wishes_that_wait() -> None:
    """It was workers times names times filters: a fifth of a second with each first token."""
    core = busy_core(workers=8, held=20, many=64)
    (queue,) = core._queues.values()
    core.look(100.0)
    assert queue.filters.judged <= 2 * 20
    before = queue.filters.judged
    for _ in range(10):
        core.look(100.0)
    assert queue.filters.judged == before, "neither the workers nor who is open have changed"
    core.worker(100.0, facts("another", max_sequences=1))
    core.look(100.0)
    assert queue.filters.judged <= before + 3 * 20
    core.check()


def test_the_names_of_a_wish_count_as_memory() -> None:
    plain = busy_core(workers=1, held=1, many=0)
    wishing = busy_core(workers=1, held=1, many=100)
    (less,), (more,) = ([q.bytes for q in core._queues.values()] for core in (plain, wishing))
    request = replace(route(), excluded=names(*(f"x0-{j}" for j in range(100))))
    assert more - less == filter_bytes(request) > 100 * 100
