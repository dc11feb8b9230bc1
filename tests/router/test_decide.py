"""Who may be chosen, and what a refusal is called."""

from __future__ import annotations

from random import Random

import pytest

from pdserve import errors
from pdserve.ids import NodeId
from pdserve.router.decide import Refusal, Why, decide
from pdserve.router.policies import round_robin
from pdserve.router.policies.base import State, WorkerView
from pdserve.router.pool import ModelView
from pdserve.testing.policy_conformance import view
from tests.router.support import route

A, B, C = view("a"), view("b"), view("c")


def decided(model: ModelView, *excluded: str) -> WorkerView | Refusal:
    return decide(route("m", *excluded), model, round_robin.choose, Random())


@pytest.mark.parametrize(
    ("model", "excluded", "chosen"),
    [
        (ModelView(sound=(A, B), last=NodeId("a")), (), B),
        (ModelView(sound=(A, B), last=NodeId("a")), ("b",), A),
        (ModelView(sound=(A,), doubtful=(B,), last=NodeId("a")), (), A),
        (ModelView(sound=(A,), doubtful=(B,), last=NodeId("a")), ("a",), B),
        (ModelView(doubtful=(B, C), last=NodeId("b")), (), C),
        (ModelView(sound=(A,), draining=3, unready=2, last=NodeId("c")), ("x",), A),
    ],
)
def test_the_sound_come_first_and_the_excluded_never(model, excluded, chosen):
    assert decided(model, *excluded) is chosen


@pytest.mark.parametrize(
    ("model", "excluded", "why"),
    [
        (ModelView(), (), Why.UNKNOWN_MODEL),
        (ModelView(known=True), (), Why.NO_WORKER),
        (ModelView(known=True, draining=1), (), Why.DRAINING),
        (ModelView(known=True, draining=1, unready=1), (), Why.NOT_READY),
        (ModelView(known=True, sound=(A,), doubtful=(B,), unready=1), ("a", "b"), Why.EXCLUDED),
    ],
)
def test_a_refusal_names_the_reason(model, excluded, why):
    assert decided(model, *excluded) == Refusal(why, "m")


@pytest.mark.parametrize(
    ("why", "kind", "status"),
    [
        (Why.UNKNOWN_MODEL, errors.ModelNotFound, 404),
        (Why.NO_WORKER, errors.NoWorker, 503),
        (Why.EXCLUDED, errors.NoWorker, 503),
        (Why.NOT_READY, errors.NotReady, 503),
        (Why.DRAINING, errors.NoWorker, 503),
    ],
)
def test_a_refusal_is_an_error_of_the_one_tree(why, kind, status):
    error = Refusal(why, "mod\nel" + "l" * 1000).error(2.0)
    assert type(error) is kind
    assert error.http_status == status
    assert error.retry_after == (2.0 if error.retryable else None)
    assert "mod\ufffdel" in error.message
    assert len(error.message) < 200


def test_every_reason_has_words():
    assert all(Refusal(why, "m").error(1.0).message for why in Why)


def test_the_first_turn_is_anybodys():
    """Over seeds every worker begins somewhere: many routers do not start at the same one."""
    model = ModelView(sound=(A, B, C))
    chosen = [decide(route(), model, round_robin.choose, Random(seed)) for seed in range(64)]
    assert all(any(worker is first for first in chosen) for worker in model.sound)


def test_a_policy_sees_only_those_it_may_choose():
    seen: list[State] = []

    def choose(question, state, random):
        seen.append(state)
        return state.workers[0]

    model = ModelView(sound=(A, B), doubtful=(C,), last=NodeId("b"))
    decide(route("m", "a"), model, choose, Random())
    assert seen == [State((B,), NodeId("b"))]
