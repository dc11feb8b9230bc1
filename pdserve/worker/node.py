"""A node with the worker role: its topics, its model and engine, and the agent that joins them.

`launch` runs it in a process, `sim.replay` in virtual time. It knows no HTTP and no metrics page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.runtime.topics.service import Topics
from pdserve.worker.agent import WorkerAgent
from pdserve.worker.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.hash_secret import HashSecretSource
    from pdserve.runtime.node import Node
    from pdserve.worker.config import WorkerConfig
    from pdserve.worker.model import ProgressFn
    from pdserve.worker.model_source import ModelSource
    from pdserve.worker.service import SupervisedEngine

__all__ = ["WorkerNode"]


class WorkerNode:
    """Owns the node and everything on it: `join`, `load`, `drain`, then `close`."""

    def __init__(
        self,
        node: Node,
        config: WorkerConfig,
        make_engine: Callable[[EngineSpec], SupervisedEngine],
        card: NodeCard,
        secrets: HashSecretSource,
        metrics: Metrics,
        degradations: Degradations | None = None,
        *,
        source: ModelSource | None = None,
    ) -> None:
        """`card` is the node's common card; the agent adds the model. `source` as in
        `WorkerService`. The engine hashes blocks with the newest of `secrets`."""
        self.node = node
        self.secrets = secrets
        self.topics = Topics(node, node.timers)
        self.service = WorkerService(config, make_engine, metrics, source=source)
        secrets.listen(self.service.rekey)
        self.agent = WorkerAgent(self.service, node, self.topics, card, degradations)

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """Joins the cluster; the other nodes see the engine load. `seeds`: addresses to join by,
        besides the configured ones."""
        await self.node.start(beside=seeds)

    async def load(self, on_progress: ProgressFn = lambda stage, fraction: None) -> None:
        """Finds the model and starts the engine. Errors: as `WorkerService.start`."""
        self.service.rekey(self.secrets.need())
        await self.service.start(on_progress)

    async def drain(self, timeout: Seconds) -> bool:
        """Takes no new requests and hands over the running ones; False if some were left."""
        return await self.agent.drain(timeout)

    def undo_drain(self) -> None:
        """Takes requests again. Streams that were asked to move may still do so."""
        self.agent.undo_drain()

    async def close(self, *, leave: bool = True) -> None:
        """Ends all requests and releases everything. `leave`: tells the other nodes first."""
        self.agent.close()
        if leave:
            await self.node.leave()
        self.topics.close()
        await self.service.stop()
        await self.node.close()
