"""A node with the planner role: its topics and its service.

`launch` runs it in a process, `sim` in virtual time. It knows no HTTP and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.planner.service import PlannerService
from pdserve.runtime.topics.service import Topics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.node import NodeCard
    from pdserve.planner.actuators.base import Actuator
    from pdserve.planner.config import PlannerConfig
    from pdserve.runtime.hash_secret import HashSecretSource
    from pdserve.runtime.node import Node

__all__ = ["PlannerNode"]


class PlannerNode:
    """Owns the node and everything on it: `join`, `drain`, then `close`."""

    def __init__(
        self,
        node: Node,
        config: PlannerConfig,
        card: NodeCard,
        secrets: HashSecretSource,
        actuators: Sequence[Actuator],
        **parts: Any,
    ) -> None:
        """`card` is the node's common card. `secrets` of this node pass the cluster's secret on to
        nodes that join by it. `parts`: as `PlannerService`. Errors: `ConfigError`."""
        self.node = node
        self.secrets = secrets
        self.topics = Topics(node, node.timers)
        self.service = PlannerService(config, node, self.topics, card, actuators, **parts)

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """Joins the cluster and begins to decide. `seeds`: addresses to join by, besides the
        configured ones."""
        await self.node.start(beside=seeds)
        self.service.open()

    def drain(self) -> None:
        """Decides no more; other planners take over."""
        self.service.drain()

    def undo_drain(self) -> None:
        """Decides again."""
        self.service.undo_drain()

    async def close(self, *, leave: bool = True) -> None:
        """Releases everything; workers and changes go on. `leave`: tells the other nodes first."""
        await self.service.close()
        if leave:
            await self.node.leave()
        self.topics.close()
        await self.node.close()
