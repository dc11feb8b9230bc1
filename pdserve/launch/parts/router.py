"""The router role as a part of a process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.launch.parts.base import card, report
from pdserve.launch.samples import sample_node
from pdserve.messages.status import RouterNumbers
from pdserve.router.policies.load import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.status import StatusService
from pdserve.runtime.topics.service import Topics

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.launch.parts.base import Context
    from pdserve.messages.status import Report
    from pdserve.observe.node_metrics import NodeSample
    from pdserve.runtime.node import Node

__all__ = ["RouterPart"]


class RouterPart:
    """The router role."""

    def __init__(self, context: Context, node: Node) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        config = context.config.router
        self.service = RouterService(
            config,
            load_policy(config.policy),
            node,
            self.topics,
            card(context, "router"),
            context.degradations,
        )
        self.secrets = context.membership.secrets(node, context.degradations)
        self._context = context
        context.metrics.attach_node(self._sample)
        StatusService(node, self._report, time.time)

    def _sample(self) -> NodeSample:
        ledger = self.service.desk.bookings
        return sample_node(
            self.node,
            self.topics,
            routed=self.service.routed,
            refused=self.service.refused,
            bookings=len(ledger),
            bookings_ended={why.value: count for why, count in ledger.ended.items()},
        )

    def _report(self) -> Report:
        routed, refused = self.service.routed, self.service.refused
        numbers = RouterNumbers(routed, refused, len(self.service.desk.bookings))
        return replace(report(self._context, self), router=numbers)

    async def begin(self) -> None:
        """Nothing can fail before joining."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)
        self.service.open()

    async def drain(self, timeout: Seconds) -> None:
        """Frontends turn to other routers; what was decided is decided."""
        self.service.drain()

    async def close(self) -> None:
        await self.node.leave()
        self.topics.close()
        await self.node.close()

    def unready_reason(self) -> str | None:
        return self.service.unready_reason()
