"""Small names for what router tests are made of."""

from __future__ import annotations

from typing import Any

from pdserve.ids import NodeId
from pdserve.messages.routing import Booked, Route, WorkerLoad
from pdserve.router.bookings import Life
from pdserve.router.pool import Facts


def life(node: str, epoch: int = 1) -> Life:
    return Life(NodeId(node), epoch)


def facts(node: str, *models: str, epoch: int = 1, **changes: Any) -> Facts:
    """A worker of these models, `m` if none is named."""
    return Facts(life(node, epoch), models or ("m",), **changes)


def load(running: int = 0, waiting: int = 0, **changes: Any) -> WorkerLoad:
    """The report of a worker that is ready and runs eight at once."""
    fields = {"ready": True, "max_sequences": 8, **changes}
    return WorkerLoad(running=running, waiting=waiting, **fields)


def route(model: str = "m", *excluded: str, n: int = 1, prompt_tokens: int = 100) -> Route:
    return Route(
        request_id="r",
        model=model,
        prompt_tokens=prompt_tokens,
        max_tokens=10,
        n=n,
        excluded=tuple(map(NodeId, excluded)),
    )


def booked(id: int, worker: Life, sequences: int = 1, prompt_tokens: int = 100) -> Booked:
    return Booked(id, worker.node, worker.epoch, sequences, prompt_tokens)
