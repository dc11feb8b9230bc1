"""Small names for what router tests are made of."""

from __future__ import annotations

from typing import Any

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.routing import BookingRecord, RouteRequest, WorkerLoad
from pdserve.router.worker_table import WorkerFacts


def life(node: str, epoch: int = 1) -> NodeLife:
    return NodeLife(NodeId(node), epoch)


def facts(node: str, *models: str, epoch: int = 1, **changes: Any) -> WorkerFacts:
    """A worker of these models, `m` if none is named."""
    return WorkerFacts(life(node, epoch), models or ("m",), **changes)


def load(running: int = 0, waiting: int = 0, **changes: Any) -> WorkerLoad:
    """The report of a worker that is ready and runs eight at once."""
    fields = {"ready": True, "max_sequences": 8, **changes}
    return WorkerLoad(running=running, waiting=waiting, **fields)


def route(model: str = "m", *excluded: str, n: int = 1, prompt_tokens: int = 100) -> RouteRequest:
    return RouteRequest(
        request_id="r",
        model=model,
        prompt_tokens=prompt_tokens,
        max_tokens=10,
        n=n,
        excluded=tuple(map(NodeId, excluded)),
    )


def booked(
    id: int, worker: NodeLife, sequences: int = 1, prompt_tokens: int = 100
) -> BookingRecord:
    return BookingRecord(id, worker.node, worker.epoch, sequences, prompt_tokens)
