"""Requests and workers for tests of single policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replaced

from pdserve.testing.policy_conformance import ROUTE_REQUEST, state_of, view
from tests.support.records import replace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import Explains, RoutingState, Terms, WorkerView

__all__ = ["BLOCK", "ask", "snapshot", "weighed", "worker"]

BLOCK = 32


def ask(blocks: int = 10, *, first: int = 0, **fields: Any) -> RouteRequest:
    """A prompt of whole blocks; those with another `first` share nothing with it."""
    names = b"".join((first * 1000 + i).to_bytes(8, "little") for i in range(1, blocks + 1))
    known = {"prompt_tokens": blocks * BLOCK, "names": names, "block_size": BLOCK}
    return replaced(ROUTE_REQUEST, **{**known, **fields})


def worker(node: str, sequences: int = 0, max_sequences: int = 8, **fields: Any) -> WorkerView:
    """One with these numbers and no others."""
    idle = replace(view(node, 0, max_sequences), sequences=sequences)
    return replace(idle, occupancy=sequences / max_sequences, **fields)


def snapshot(workers: Sequence[WorkerView], **fields: Any) -> RoutingState:
    """These, with overlaps and whatever else a state has."""
    return replace(state_of(workers), **fields)


def weighed(policy: Explains, request: RouteRequest, state: RoutingState) -> Mapping[str, Terms]:
    """Its terms, by name."""
    return {str(node): terms for node, terms in policy.terms(request, state).items()}
