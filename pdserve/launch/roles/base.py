"""Defines the life cycle that all roles share, and what a role gets from its process.

    begin   do everything that can fail at once: addresses, settings; announce nothing yet
    join    join the cluster
    drain   take no new work; finish running work or hand it over
    close   leave, and release everything

Each role has its own node, so that one process with three roles and three processes with one role
look the same to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pdserve.messages.status import NodeReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.node_factory import NodeFactory
    from pdserve.launch.config.resolve import Config
    from pdserve.launch.console import Console
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.orders.drain import Drain

__all__ = ["Role", "RoleContext", "engine_log_fields", "node_card", "node_report"]


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Objects that all roles of one process share."""

    config: Config
    membership: NodeFactory
    screen: Console
    metrics: Metrics
    degradations: Degradations
    drain: Drain | None = None
    """None in tools without a serving process."""
    said: Mapping[str, object] = field(default_factory=dict)
    """Fields of every log line of this process; its node's name comes with its first node."""


class Role(Protocol):
    """A role in a process, with the life cycle `begin`, `join`, `drain`, `close`."""

    node: Node

    async def begin(self) -> None: ...

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """Join the cluster. `seeds`: addresses of this process's nodes that have joined."""
        ...

    async def drain(self, timeout: Seconds) -> None:
        """Drain; return when no request is left or after `timeout`. May be called again."""
        ...

    async def undo_drain(self) -> None:
        """Take new work again, after a drain that was cancelled or has ended. Idempotent. Errors:
        `ConfigError` if it cannot."""
        ...

    def needed(self) -> str:
        """What no other node would do if this one drained, in words; empty: others would."""
        ...

    @property
    def left(self) -> int:
        """Number of requests that a drain waits for."""
        ...

    async def close(self) -> None: ...

    def unready_reason(self) -> str | None:
        """Return why the role cannot serve; None if it can."""
        ...


def engine_log_fields(context: RoleContext) -> dict[str, str]:
    """What the log lines of this process's engines say of it."""
    return {name: str(context.said[name]) for name in ("node", "cluster") if name in context.said}


def node_report(context: RoleContext, part: Role) -> NodeReport:
    """Create the status report of a node; roles add their statistics."""
    degraded = dict(context.degradations.reasons())
    drain = None if context.drain is None else context.drain.state()
    return NodeReport(reason=part.unready_reason() or "", degraded=degraded, drain=drain)


def node_card(context: RoleContext, role: str) -> NodeCard:
    """Create the card of a node; roles add their fields."""
    degraded = tuple(sorted(context.degradations.reasons()))
    return replace(context.membership.card(role), degraded=degraded)
