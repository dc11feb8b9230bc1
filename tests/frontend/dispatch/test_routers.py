"""Which router is asked next."""

from __future__ import annotations

from pdserve.frontend.dispatch.routers import Routers, RouterSearch
from pdserve.ids import NodeId

A, B, C = (NodeId(name) for name in "abc")


def routers() -> Routers:
    made = Routers()
    made.order = (A, B, C)
    return made


def test_the_first_in_order_is_asked() -> None:
    assert routers().choose(0.0, RouterSearch(0.0)) == A
    assert Routers().choose(0.0, RouterSearch(0.0)) is None


def test_one_that_could_not_be_reached_is_left_alone_for_a_second() -> None:
    some = routers()
    some.unreachable(0.0, A)
    assert (some.choose(0.9, RouterSearch(0.0)), some.next_change(0.9)) == (B, 1.0)
    assert (some.choose(1.0, RouterSearch(0.0)), some.next_change(1.0)) == (A, None)


def test_one_that_fails_inside_comes_last_and_for_longer_each_time() -> None:
    some = routers()
    some.failed(0.0, A)
    assert [some.choose(at, RouterSearch(0.0)) for at in (0.9, 1.0)] == [B, A]
    for at, until in ((1.0, 3.0), (3.0, 7.0)):
        some.failed(at, A)
        assert [some.choose(t, RouterSearch(0.0)) for t in (until - 0.1, until)] == [B, A]
    for _ in range(20):
        some.failed(10.0, A)
    assert some.choose(40.0, RouterSearch(0.0)) == A, "the longest pause is bounded"


def test_one_that_fails_is_better_than_none() -> None:
    some = routers()
    for router in some.order:
        some.failed(0.0, router)
    assert some.choose(0.5, RouterSearch(0.0)) == A


def test_what_failed_on_a_question_is_not_asked_that_again() -> None:
    some, search = routers(), RouterSearch(0.0)
    search.failed = {A, B}
    assert some.choose(0.0, search) == C
    assert not some.all_failed(search)
    search.failed.add(C)
    assert some.choose(0.0, search) is None
    assert some.all_failed(search)
    some.order = ()
    assert not some.all_failed(search), "a router may come"


def test_an_answer_and_the_end_of_a_life_clear_the_penalty() -> None:
    some = routers()
    some.failed(0.0, A)
    some.failed(0.0, B)
    assert set(some.failing) == {A, B}
    assert some.answered(A)
    assert not some.answered(A)
    some.forget(B)
    assert not some.failing
