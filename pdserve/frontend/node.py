"""A node with the frontend role, without HTTP: its client of the cluster and its prompt hasher.

`launch` adds HTTP in a process; `sim.replay` brings token ids in virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Draining
from pdserve.frontend.dispatch.cluster_client import ClusterClient
from pdserve.frontend.preprocess.prompt_hashes import PromptHasher

if TYPE_CHECKING:
    from pdserve.frontend.config import FrontendConfig
    from pdserve.ids import NodeId
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.hash_secret import HashSecretSource
    from pdserve.runtime.node import Node

__all__ = ["FrontendNode"]


class FrontendNode:
    """Owns the node and the requests dispatched from it: `join`, then `close`."""

    def __init__(
        self,
        node: Node,
        config: FrontendConfig,
        secrets: HashSecretSource,
        degradations: Degradations,
        metrics: Metrics | None = None,
        own_router: NodeId | None = None,
    ) -> None:
        """`own_router`: the router in the same process, if there is one."""
        self.node = node
        self.secrets = secrets
        self.backend = ClusterClient(node, config, degradations, metrics, own_router)
        self.hasher = PromptHasher(lambda: secrets.secret)
        """Hashes prompts with the cluster's secret, as workers do."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """Joins the cluster. The caller then publishes the node's card. `seeds`: addresses to join
        by, besides the configured ones."""
        await self.node.start(beside=seeds)

    async def close(self, *, leave: bool = True) -> None:
        """Ends all requests with `Draining` and releases everything. `leave`: tells the other
        nodes first."""
        self.backend.close(Draining("the server is shutting down", retry_after=1.0))
        if leave:
            await self.node.leave()
        await self.node.close()
