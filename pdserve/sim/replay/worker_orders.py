"""Takes orders for a worker of a replay as its process would: to drain, and to say how it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pdserve.messages.status import NodeReport
from pdserve.runtime.orders.drain import Drain
from pdserve.runtime.status import StatusService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.worker.node import WorkerNode

__all__ = ["WorkerOrders"]

_DRAIN_TIMEOUT: Final[Seconds] = 30.0
"""The default of `--drain-timeout`."""


class WorkerOrders:
    """The orders that one worker takes: the production drain over its node."""

    def __init__(self, worker: WorkerNode, on_end: Callable[[], None]) -> None:
        """`on_end` is called when it has drained and its process would end."""
        self.drain = Drain([_Part(worker)], _DRAIN_TIMEOUT, on_end)
        self.drain.serve(worker.node)
        self._worker = worker
        StatusService(worker.node, self._report, asyncio.get_running_loop().time)

    def _report(self) -> NodeReport:
        agent = self._worker.agent
        return NodeReport(
            reason=self._worker.service.unready_reason() or "",
            drain=self.drain.state(),
            mode=agent.mode.report(),
        )


class _Part:
    """The worker as a part of its process."""

    def __init__(self, worker: WorkerNode) -> None:
        self._worker = worker

    @property
    def left(self) -> int:
        return self._worker.agent.left

    def needed(self) -> str:
        return self._worker.agent.mode.needed()

    async def drain(self, timeout: Seconds) -> None:
        await self._worker.drain(timeout)

    async def undo_drain(self) -> None:
        self._worker.undo_drain()
