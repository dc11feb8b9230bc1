"""One decision: a question and what is known of its model in, a worker or a named refusal out.

Who may be chosen is decided here, once, for every policy: never a worker that drains, that is not
ready, or that the request has failed at; one in doubt only if nobody else is left. Which of those
that remain is the policy's choice. Nothing is changed here; `desk.py` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pdserve.errors import ModelNotFound, NotReady, NoWorker, PdserveError
from pdserve.openai.fields import shorten
from pdserve.router.policies.base import State, WorkerView

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.routing import Route
    from pdserve.router.policies.base import Policy
    from pdserve.router.pool import ModelView

__all__ = ["Refusal", "Why", "decide"]


class Why(Enum):
    """Why nobody can take a request. The first that fits, from the top, is named."""

    UNKNOWN_MODEL = "unknown_model"
    """Nobody serves such a model, and nobody did lately: the client's mistake."""
    NO_WORKER = "no_worker"
    """Its last worker left not long ago."""
    EXCLUDED = "excluded"
    """The request has failed at every worker that could take it."""
    NOT_READY = "not_ready"
    """Its workers are loading or restarting."""
    DRAINING = "draining"
    """Its workers are all going away."""


_MESSAGES = {
    Why.UNKNOWN_MODEL: "the model '{model}' is not served here",
    Why.NO_WORKER: "no worker serves the model '{model}' now; the last one has left",
    Why.EXCLUDED: "the request failed at every worker of the model '{model}'",
    Why.NOT_READY: "no worker of the model '{model}' is ready",
    Why.DRAINING: "all workers of the model '{model}' are shutting down",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nobody, and why."""

    why: Why
    model: str

    def error(self, retry_after: Seconds) -> PdserveError:
        """As the frontend, and its client, hear it."""
        message = _MESSAGES[self.why].format(model=shorten(self.model))
        if self.why is Why.UNKNOWN_MODEL:
            return ModelNotFound(message, param="model")
        kind = NotReady if self.why is Why.NOT_READY else NoWorker
        return kind(message, retry_after=retry_after)


def decide(
    question: Route, model: ModelView, policy: Policy, random: Random
) -> WorkerView | Refusal:
    """Whatever the policy raises passes through."""
    for workers in (model.sound, model.doubtful):
        allowed = _without(workers, question.excluded)
        if allowed:
            last = model.last
            if last is None:  # routers that start together should not begin at the same worker
                last = random.choice(allowed).node
            return policy(question, State(allowed, last), random)
    return Refusal(_why(model), question.model)


def _without(workers: tuple[WorkerView, ...], excluded: tuple[str, ...]) -> tuple[WorkerView, ...]:
    if not excluded:
        return workers
    nodes = frozenset(excluded)
    return tuple(worker for worker in workers if worker.node not in nodes)


def _why(model: ModelView) -> Why:
    """Of a model that nobody can take a request for."""
    if not model.known:
        return Why.UNKNOWN_MODEL
    if model.sound or model.doubtful:
        return Why.EXCLUDED
    if model.unready:
        return Why.NOT_READY
    return Why.DRAINING if model.draining else Why.NO_WORKER
