"""Who may be chosen, and what a refusal is called."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from pdserve import errors
from pdserve.ids import NodeId
from pdserve.router.eligibility import RejectReason, RouteRejection, candidates, explain_eligibility
from pdserve.router.policies import round_robin
from pdserve.router.policies.base import RoutingState, WorkerView
from pdserve.router.worker_filter import WorkerFilter
from pdserve.router.worker_table import ModelView, WorkerEligibility
from pdserve.testing.policy_conformance import view
from tests.router.support import route

A, B, C = view("a"), view("b"), view("c")


def decided(model: ModelView, *excluded: str) -> WorkerView | RouteRejection:
    request = route("m", *excluded)
    found = candidates(request, model)
    if isinstance(found, RouteRejection):
        return found
    assert model.last is not None
    return round_robin.choose(request, RoutingState(found, model.last), Random())


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
        (ModelView(), (), RejectReason.UNKNOWN_MODEL),
        (ModelView(known=True), (), RejectReason.NO_WORKER),
        (ModelView(known=True, prefill=2), (), RejectReason.PREFILL_ONLY),
        (ModelView(known=True, draining=1), (), RejectReason.DRAINING),
        (ModelView(known=True, draining=1, unready=1), (), RejectReason.NOT_READY),
        (
            ModelView(known=True, sound=(A,), doubtful=(B,), unready=1),
            ("a", "b"),
            RejectReason.EXCLUDED,
        ),
    ],
)
def test_a_refusal_names_the_reason(model, excluded, why):
    assert decided(model, *excluded) == RouteRejection(why, route("m", *excluded))


@pytest.mark.parametrize(
    ("why", "kind", "status"),
    [
        (RejectReason.UNKNOWN_MODEL, errors.ModelNotFound, 404),
        (RejectReason.NO_WORKER, errors.NoWorker, 503),
        (RejectReason.EXCLUDED, errors.NoWorker, 503),
        (RejectReason.NOT_READY, errors.NotReady, 503),
        (RejectReason.DRAINING, errors.NoWorker, 503),
    ],
)
def test_a_refusal_is_an_error_of_the_one_tree(why, kind, status):
    error = RouteRejection(why, route("mod\nel" + "l" * 1000)).error(2.0)
    assert type(error) is kind
    assert error.http_status == status
    assert error.retry_after == (2.0 if error.retryable else None)
    assert "mod\ufffdel" in error.message
    assert len(error.message) < 200


def test_every_reason_has_words():
    assert all(RouteRejection(why, route()).error(1.0).message for why in RejectReason)


@pytest.mark.parametrize(
    ("wants", "adapted", "found"),
    [
        ({"allowed": ("b", "c")}, None, (B,)),
        ({"allowed": ("c",)}, None, (C,)),
        ({"allowed": ("x",)}, None, RejectReason.NOT_ALLOWED),
        ({"allowed": ("a",), "excluded": ("a",)}, None, RejectReason.EXCLUDED),
        ({"lora": "wit"}, {"b", "c"}, (B,)),
        ({"lora": "wit"}, set(), RejectReason.NO_ADAPTER),
        ({"lora": "wit", "allowed": ("c",)}, {"b"}, RejectReason.EXCLUDED),
    ],
)
def test_a_request_has_filters_of_its_own(wants, adapted, found):
    """Its own workers in doubt are better than none of its own."""
    request = replace(route(), **wants)
    model = ModelView(sound=(A, B), doubtful=(C,), known=True)
    got = candidates(request, model, adapted)
    assert (got.why if isinstance(got, RouteRejection) else got) == found


def test_an_explanation_says_why_a_worker_is_left_out():
    request = replace(route("m", "a"), allowed=(NodeId("a"), NodeId("b")))
    worker_filter = WorkerFilter.of(request)
    words = [
        explain_eligibility(worker_filter, worker, WorkerEligibility.SOUND) for worker in (A, B, C)
    ]
    assert words == ["excluded by the request", "sound", "not allowed by the request"]
    assert explain_eligibility(worker_filter, A, WorkerEligibility.DRAINING) == "draining"
    adapted = WorkerFilter.of(replace(route(), lora="wit"))
    assert "adapter" in explain_eligibility(adapted, A, WorkerEligibility.SOUND, set())
