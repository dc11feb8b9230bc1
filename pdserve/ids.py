"""Types and names for values that travel everywhere: request, node and epoch ids, units."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""The id that users see in `x-request-id`: unique per request, printable ASCII."""

SequenceKey = tuple[int, int]
"""(handle, choice): one sequence in one engine. The handle is the engine port's number."""

NodeId = NewType("NodeId", str)
"""A process of the cluster, across restarts: printable ASCII, at most 128 characters."""

Epoch = int
"""Identifies one life of a node: wall-clock milliseconds at its start; a later life has a larger
one.
"""


class NodeLife(NamedTuple):
    """One life (process run) of a node; its leases, streams and bookings end with it. A tuple,
    because lives are keys of many tables and are made for each request.
    """

    node: NodeId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.node}/{self.epoch}"


TokenId = int
Seconds = float
Bytes = int

MAX_CHOICES: Final = 1 << 16
"""Most choices (`n`) of one request. Defined here because the command line needs it without
importing messages.
"""


def new_request_id() -> RequestId:
    """A new request id with 96 random bits."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def new_seed() -> int:
    """A new sampling seed in [0, 2**63)."""
    return secrets.randbits(63)
