"""Which workers a request is not sent to again, and for how long."""

from pdserve.errors import Overloaded, WorkerLost
from pdserve.frontend.dispatch.refusals import Refusals
from pdserve.ids import NodeId, NodeLife

FULL, DEAD = NodeLife(NodeId("full"), 1), NodeLife(NodeId("dead"), 1)


def names(refusals: Refusals, now: float) -> tuple[NodeId, ...]:
    return refusals.excluded(now, lambda _: 1)


def test_a_worker_that_was_full_is_asked_again_although_another_has_just_died() -> None:
    refusals = Refusals()
    refusals.refused(FULL, Overloaded("full"), 10.0)
    refusals.refused(DEAD, WorkerLost("it died"), 12.5)
    assert names(refusals, 12.5) == ("full", "dead")
    assert refusals.let_in_again(12.5)
    assert names(refusals, 12.5) == ("dead",)


def test_a_refusal_of_a_moment_ago_holds() -> None:
    refusals = Refusals()
    assert not refusals.let_in_again(10.0)
    refusals.refused(FULL, Overloaded("full"), 10.0)
    assert not refusals.let_in_again(11.9)
    assert names(refusals, 11.9) == ("full",)
    assert refusals.let_in_again(12.0)
    assert names(refusals, 12.0) == ()
    assert not refusals.let_in_again(20.0), "nobody is left to be let in"


def test_a_worker_that_refuses_again_is_excluded_from_then() -> None:
    refusals = Refusals()
    refusals.refused(FULL, Overloaded("full"), 10.0)
    assert refusals.let_in_again(12.0)
    refusals.refused(FULL, Overloaded("full"), 12.0)
    assert not refusals.let_in_again(13.0)
    assert names(refusals, 13.0) == ("full",)
