"""What a policy is, and what it sees.

A policy is a function from a question, a frozen snapshot and a source of randomness to one of the
snapshot's workers. It keeps nothing between calls and asks nobody, so the same inputs give the same
choice, in tests, in simulation and in production. It need not know who may be chosen at all: only
workers that may are in the snapshot. It must cost no more than O(workers), and must not wait.

Write one as `def choose(question, state, random)` and name it `module:choose`, or register it as an
entry point in the group `pdserve.policies`; `pdserve.testing.policy_conformance` tests it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING

from pdserve.messages.routing import Route

if TYPE_CHECKING:
    from pdserve.ids import Epoch, NodeId

__all__ = ["Policy", "State", "WorkerView", "after"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the moment of the decision."""

    node: NodeId
    epoch: Epoch
    sequences: int
    """Running and waiting there by its own report, and placed there since."""
    max_sequences: int
    """It runs so many at once; at least 1."""
    occupancy: float
    """`sequences / max_sequences`; above 1, some wait."""
    placed_tokens: int = 0
    """Prompt tokens of the bookings that no report of the worker contains yet."""
    blocks_total: int = 0
    """0: it has not reported its pool."""
    blocks_used: int = 0
    blocks_cached: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision rests on."""

    workers: tuple[WorkerView, ...]
    """Whoever may be chosen; at least one; by rising node id."""
    last: NodeId
    """Who was chosen last for this model; need not be among the workers."""


Policy = Callable[[Route, State, Random], WorkerView]

_node = attrgetter("node")


def after(workers: Sequence[WorkerView], last: NodeId) -> WorkerView:
    """The next of `workers` (by rising node id) in rotation, whether or not `last` is among them:
    members that come and go do not upset whose turn it is."""
    index = bisect_right(workers, last, key=_node)
    return workers[index if index < len(workers) else 0]
