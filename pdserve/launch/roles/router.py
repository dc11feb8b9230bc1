"""Runs the router role in a process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.launch.metrics_samples import sample_node
from pdserve.launch.roles.base import node_card, node_report
from pdserve.observe.node_metrics import RouterSample
from pdserve.router.node import RouterNode
from pdserve.router.service import SETTLE
from pdserve.runtime.status import StatusService
from pdserve.runtime.traces import TraceService

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.status import NodeReport
    from pdserve.observe.node_metrics import NodeSample
    from pdserve.router.service import RouterService
    from pdserve.runtime.node import Node

__all__ = ["RouterRole"]


class RouterRole:
    """The router role."""

    def __init__(self, context: RoleContext, node: Node) -> None:
        self.node = node
        self.router = RouterNode(
            node,
            context.config.router,
            node_card(context, "router"),
            context.membership.secrets(node, context.degradations),
            context.degradations,
            on_move=context.metrics.moves_asked.labels("queue").inc,
        )
        self._context = context
        context.metrics.attach_node(self._sample)
        StatusService(node, self._report, time.time)
        TraceService(node)

    def _sample(self) -> NodeSample:
        service = self.router.service
        ledger = service.core.bookings
        return sample_node(
            self.node,
            self.router.topics,
            routed=service.routed,
            refused=service.refused,
            bookings=len(ledger),
            bookings_ended={why.value: count for why, count in ledger.ended.items()},
            router=_sampled(service),
        )

    def _report(self) -> NodeReport:
        return replace(node_report(self._context, self), router=self.router.service.numbers())

    async def begin(self) -> None:
        """Does nothing: nothing can fail before joining."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        # Without other processes there is nothing to hear before the first decision.
        settle = 0.0 if self._context.membership.private else SETTLE
        await self.router.join(seeds, settle=settle)

    async def drain(self, timeout: Seconds) -> None:
        """Announces the drain, so that frontends use other routers; decisions made so far stay."""
        self.router.drain()

    async def undo_drain(self) -> None:
        self.router.undo_drain()

    def needed(self) -> str:
        return ""  # frontends wait for a router; a planner drains none

    @property
    def left(self) -> int:
        """Number of requests held here."""
        return self.router.service.core.held

    async def close(self) -> None:
        await self.router.close()

    def unready_reason(self) -> str | None:
        return self.router.service.unready_reason()


def _sampled(service: RouterService) -> RouterSample:
    core, queues = service.core, service.prefill.states()
    numbers, index, ratios = core.numbers, core.index.counters, core.prediction()
    demand = core.demand.totals()
    return RouterSample(
        decisions=dict(core.decisions),
        held=core.held,
        ever_held=numbers.held,
        held_seconds=numbers.held_seconds,
        held_ended={"expired": numbers.expired, "withdrawn": numbers.withdrawn},
        kv_copies={"kept": numbers.copies_kept, "let_go": numbers.copies_let_go},
        prompt_tokens={
            "all": numbers.prompt_tokens,
            "expected": numbers.expected_tokens,
            "cached": numbers.cached_tokens,
        },
        first_token_seconds={
            "predicted": numbers.predicted_seconds,
            "observed": numbers.waited_seconds,
        },
        prediction={} if ratios is None else {"0.5": ratios.p50, "0.9": ratios.p90},
        index_blocks={
            "distinct": index["blocks"],
            "workers": index["worker_blocks"],
            "refused": index["refused_blocks"],
        },
        index_bytes=index["bytes"],
        approximate_workers=index["approximate_workers"],
        silent_routers=len(core.bookings.silent_peers),
        arrivals={model: each.arrivals for model, each in demand.items()},
        arrived_work={model: each.work for model, each in demand.items()},
        kv_token_seconds={model: each.kv_token_seconds for model, each in demand.items()},
        prefill_items={model: queue.waiting for model, queue in queues.items()},
        prefill_tokens={model: queue.waiting_tokens for model, queue in queues.items()},
        prefill_claims={model: queue.claimed for model, queue in queues.items()},
        prefill_workers={model: queue.workers for model, queue in queues.items()},
        prefill_credits={model: queue.credits for model, queue in queues.items()},
        prefill_events=dict(service.prefill.counters),
    )
