"""Types and names for values that travel everywhere: request, node and epoch ids, units."""

from __future__ import annotations

import os
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


CHANGE_PATTERN: Final = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z"
"""Ids of a planner's changes. They are parts of command lines, file names and names of units and
jobs. Defined here because the command line needs it, too.
"""


_RANDOM_BYTES: Final = 12
_AT_ONCE: Final = 256
"""Random numbers that are taken from the system at once. A system call for each would cost more
than the rest of an id, and would let another thread take the interpreter."""

_random: list[bytes] = []
"""Random numbers that nothing has used yet."""
# A child process must not use the numbers of its parent.
os.register_at_fork(after_in_child=_random.clear)


def new_random() -> bytes:
    """96 random bits of the system's generator. Thread-safe."""
    while True:
        try:
            return _random.pop()
        except IndexError:
            fresh = os.urandom(_AT_ONCE * _RANDOM_BYTES)
            _random.extend(
                [fresh[at : at + _RANDOM_BYTES] for at in range(0, len(fresh), _RANDOM_BYTES)]
            )


def new_request_id() -> RequestId:
    """A new request id with 96 random bits."""
    return RequestId(f"req-{new_random().hex()}")


def new_seed() -> int:
    """A new sampling seed in [0, 2**63)."""
    return int.from_bytes(new_random()[:8]) >> 1
