"""A node with the router role: its topics, its service and its secret of block hashes.

`launch` runs it in a process, `sim.replay` in virtual time. It knows no HTTP and no metrics page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.router.policies.loader import load_policy
from pdserve.router.service import SETTLE, RouterService
from pdserve.runtime.topics.service import Topics

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.router.config import RouterConfig
    from pdserve.runtime.hash_secret import HashSecretSource
    from pdserve.runtime.node import Node

__all__ = ["RouterNode"]


class RouterNode:
    """Owns the node and everything on it: `join`, `drain`, then `close`."""

    def __init__(
        self,
        node: Node,
        config: RouterConfig,
        card: NodeCard,
        secrets: HashSecretSource,
        degradations: Degradations,
        *,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """`card` is the node's common card. `secrets` of this node pass the cluster's secret on to
        nodes that join by it. `on_move` is called for each running request that a frontend is asked
        to move.

        Errors: `ConfigError` for a policy that does not exist, or options that it does not have.
        """
        self.node = node
        self.secrets = secrets
        self.topics = Topics(node, node.timers)
        policy = load_policy(config.policy, config.policy_options)
        self.service = RouterService(
            config, policy, node, self.topics, card, degradations, on_move=on_move
        )

    async def join(self, seeds: tuple[str, ...] = (), *, settle: Seconds = SETTLE) -> None:
        """Joins the cluster and answers routing requests after `settle` seconds. `seeds`: addresses
        to join by, besides the configured ones."""
        await self.node.start(beside=seeds)
        self.service.open(settle)

    def drain(self) -> None:
        """Announces the drain, so that frontends use other routers; decisions made so far stay."""
        self.service.drain()

    def undo_drain(self) -> None:
        """Announces that frontends may use this router again."""
        self.service.undo_drain()

    async def close(self, *, leave: bool = True) -> None:
        """Releases everything. `leave`: tells the other nodes first."""
        self.service.close()
        if leave:
            await self.node.leave()
        self.topics.close()
        await self.node.close()
