"""Small names for the values that travel everywhere. No behaviour beyond making a fresh id."""

from __future__ import annotations

import secrets
from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""What the user sees: `x-request-id`, unique per request, printable ASCII."""

SequenceKey = tuple[int, int]
"""(handle, choice): one sequence on one engine. The handle is the engine port's own number."""

NodeId = NewType("NodeId", str)
"""A process in the cluster, across its lives: printable ASCII, at most 128 characters."""

Epoch = int
"""One life of a node: wall-clock milliseconds at its start; a later life has a larger one."""

TokenId = int
Seconds = float
Bytes = int

MOST_CHOICES: Final = 1 << 16
"""Of one request: more than anybody wants, and few enough to be counted one by one. Here, because
the command line names it without knowing messages."""


def new_request_id() -> RequestId:
    """A fresh request id with 96 random bits."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def new_seed() -> int:
    """A fresh sampling seed in [0, 2**63)."""
    return secrets.randbits(63)
