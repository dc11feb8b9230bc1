"""One decision: a question and what is known of its model in, a worker or a named refusal out.

Who may be chosen is decided here, once, for every policy: never a worker that drains, that is not
ready, that the request has failed at, or that its own filters leave out; one in doubt only if
nobody else is left. Which of those that remain is the policy's choice. Nothing is changed here;
`core.py` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pdserve.errors import ModelNotFound, NotReady, NoWorker, PdserveError
from pdserve.protocols.unsupported_fields import shorten
from pdserve.router.worker_table import WorkerEligibility

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import WorkerView
    from pdserve.router.worker_filter import WorkerFilter
    from pdserve.router.worker_table import ModelView

__all__ = ["RejectReason", "RouteRejection", "candidates", "explain_eligibility"]


class RejectReason(Enum):
    """Why nobody can take a request. The first that fits, from the top, is named."""

    UNKNOWN_MODEL = "unknown_model"
    """Nobody serves such a model, and nobody did lately: the client's mistake."""
    NO_WORKER = "no_worker"
    """Its last worker left not long ago."""
    PREFILL_ONLY = "prefill_only"
    """All its workers compute prompts for others, and none of those others is there."""
    NOT_ALLOWED = "not_allowed"
    """The client named its workers, and none of them is there."""
    NO_ADAPTER = "no_adapter"
    """No worker of the model has the adapter."""
    EXCLUDED = "excluded"
    """The request has failed at every worker that could take it, or will not have it."""
    NOT_READY = "not_ready"
    """Its workers are loading or restarting."""
    DRAINING = "draining"
    """Its workers are all going away."""


_MESSAGES = {
    RejectReason.UNKNOWN_MODEL: "the model '{model}' is not served here",
    RejectReason.NO_WORKER: "no worker serves the model '{model}' now; the last one has left",
    RejectReason.PREFILL_ONLY: "the model '{model}' has only prefill workers now, which take no "
    "requests: start a worker with --mode=decode or --mode=aggregated",
    RejectReason.NOT_ALLOWED: "none of the workers that the request allows ({allowed}) is there "
    "and takes requests for the model '{model}'",
    RejectReason.NO_ADAPTER: "no worker of the model '{model}' has the adapter '{lora}'",
    RejectReason.EXCLUDED: "no worker of the model '{model}' is left: the request excludes it, "
    "or has failed there",
    RejectReason.NOT_READY: "no worker of the model '{model}' is ready",
    RejectReason.DRAINING: "all workers of the model '{model}' are shutting down",
}


@dataclass(frozen=True, slots=True)
class RouteRejection:
    """Nobody, and why."""

    why: RejectReason
    question: RouteRequest

    def error(self, retry_after: Seconds) -> PdserveError:
        """As the frontend, and its client, hear it."""
        question = self.question
        message = _MESSAGES[self.why].format(
            model=shorten(question.model),
            allowed=shorten(", ".join(question.allowed)),
            lora=shorten(question.lora),
        )
        if self.why is RejectReason.UNKNOWN_MODEL:
            return ModelNotFound(message, param="model")
        kind = NotReady if self.why is RejectReason.NOT_READY else NoWorker
        return kind(message, retry_after=retry_after)


def candidates(
    question: RouteRequest, model: ModelView, adapted: Collection[NodeId] | None = None
) -> tuple[WorkerView, ...] | RouteRejection:
    """Who may take it; at least one. `adapted`: who has the adapter, if it wants one."""
    excluded, allowed = frozenset(question.excluded), frozenset(question.allowed)
    for workers in (model.sound, model.doubtful):
        if excluded:
            workers = tuple(w for w in workers if w.node not in excluded)
        if allowed:
            workers = tuple(w for w in workers if w.node in allowed)
        if adapted is not None:
            workers = tuple(w for w in workers if w.node in adapted)
        if workers:
            return workers
    return RouteRejection(_why(question, model, adapted), question)


def explain_eligibility(
    wish: WorkerFilter,
    worker: WorkerView,
    known: WorkerEligibility,
    adapted: Collection[NodeId] | None = None,
) -> str:
    """For an explanation: the worker's own standing, or why the request will not have it."""
    if known in (WorkerEligibility.DRAINING, WorkerEligibility.UNREADY):
        return str(known.value)
    if worker.node in wish.excluded:
        return "excluded by the request"
    if wish.allowed and worker.node not in wish.allowed:
        return "not allowed by the request"
    if adapted is not None and worker.node not in adapted:
        return f"has no adapter {wish.lora!r}"
    return str(known.value)


def _why(
    question: RouteRequest, model: ModelView, adapted: Collection[NodeId] | None
) -> RejectReason:
    """Of a model that nobody can take a request for."""
    if not model.known:
        return RejectReason.UNKNOWN_MODEL
    takers = (*model.sound, *model.doubtful)
    allowed = frozenset(question.allowed)
    if allowed and not any(w.node in allowed for w in takers):
        return (
            RejectReason.NOT_ALLOWED
            if takers or model.unready or model.draining
            else RejectReason.NO_WORKER
        )
    if takers and adapted is not None and not any(w.node in adapted for w in takers):
        return RejectReason.NO_ADAPTER
    if takers:
        return RejectReason.EXCLUDED
    if model.unready:
        return RejectReason.NOT_READY
    if model.draining:
        return RejectReason.DRAINING
    return RejectReason.PREFILL_ONLY if model.prefill else RejectReason.NO_WORKER
