"""Decides which workers may take a request, or names the reason why none may.

This holds for every policy: never a worker that drains, is not ready, has failed the request, or is
excluded by the request's own filters; a suspect one only if no other is left. The policy chooses
among those that remain. Pure; `core.py` acts on the result.
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
    """Why no worker can take a request. The first reason that fits, from the top, is reported."""

    UNKNOWN_MODEL = "unknown_model"
    """No worker serves the model, now or recently: the client's mistake."""
    NO_WORKER = "no_worker"
    """The model's last worker left recently."""
    PREFILL_ONLY = "prefill_only"
    """The model has only prefill workers."""
    NOT_ALLOWED = "not_allowed"
    """The client named workers, and none of them is here."""
    NO_ADAPTER = "no_adapter"
    """No worker of the model has the LoRA adapter."""
    EXCLUDED = "excluded"
    """The request has failed at, or excludes, every worker that could take it."""
    NOT_READY = "not_ready"
    """The model's workers are loading or restarting."""
    DRAINING = "draining"
    """All workers of the model are draining."""


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
    """No worker may take the request, and why."""

    why: RejectReason
    request: RouteRequest

    def error(self, retry_after: Seconds) -> PdserveError:
        """The error for the frontend and its client."""
        request = self.request
        message = _MESSAGES[self.why].format(
            model=shorten(request.model),
            allowed=shorten(", ".join(request.allowed)),
            lora=shorten(request.lora),
        )
        if self.why is RejectReason.UNKNOWN_MODEL:
            return ModelNotFound(message, param="model")
        kind = NotReady if self.why is RejectReason.NOT_READY else NoWorker
        return kind(message, retry_after=retry_after)


def candidates(
    request: RouteRequest, model: ModelView, adapted: Collection[NodeId] | None = None
) -> tuple[WorkerView, ...] | RouteRejection:
    """The workers that may take the request, at least one, or the rejection. `adapted`: the workers
    with its LoRA adapter, if it names one."""
    excluded, allowed = frozenset(request.excluded), frozenset(request.allowed)
    for workers in (model.sound, model.doubtful):
        if excluded:
            workers = tuple(w for w in workers if w.node not in excluded)
        if allowed:
            workers = tuple(w for w in workers if w.node in allowed)
        if adapted is not None:
            workers = tuple(w for w in workers if w.node in adapted)
        if workers:
            return workers
    return RouteRejection(_why(request, model, adapted), request)


def explain_eligibility(
    worker_filter: WorkerFilter,
    worker: WorkerView,
    known: WorkerEligibility,
    adapted: Collection[NodeId] | None = None,
) -> str:
    """For an explanation: the worker's own state, or why the request excludes it."""
    if known in (WorkerEligibility.DRAINING, WorkerEligibility.UNREADY):
        return str(known.value)
    if worker.node in worker_filter.excluded:
        return "excluded by the request"
    if worker_filter.allowed and worker.node not in worker_filter.allowed:
        return "not allowed by the request"
    if adapted is not None and worker.node not in adapted:
        return f"has no adapter {worker_filter.lora!r}"
    return str(known.value)


def _why(
    request: RouteRequest, model: ModelView, adapted: Collection[NodeId] | None
) -> RejectReason:
    """Why no worker can take a request for the model."""
    if not model.known:
        return RejectReason.UNKNOWN_MODEL
    takers = (*model.sound, *model.doubtful)
    allowed = frozenset(request.allowed)
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
