"""Answers operators who have a worker forget KV: of a tenant, what is old, or all.

The engine does it, on every tier. The agent owns it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import PdserveError
from pdserve.messages.tiers import DropReport
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import DROP_KV

if TYPE_CHECKING:
    from pdserve.engine.port import Dropped
    from pdserve.ids import Seconds
    from pdserve.messages.kv_events import Tier
    from pdserve.messages.tiers import DropOrder
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["DropOrders"]

_log = logging.getLogger(__name__)


class ForgetfulEngine(Protocol):
    """What is needed of an engine."""

    def drop_kv(self, owners: tuple[str, ...] | None, older: Seconds, done: Dropped) -> None: ...


class DropOrders:
    """Passes orders from the node's links to the engine, and answers with what it did."""

    def __init__(self, node: Node, engine: ForgetfulEngine) -> None:
        self._engine = engine
        node.host(self)

    @answers(DROP_KV)
    def _drop(self, order: DropOrder, call: IncomingCall) -> DropReport | None:
        def done(answer: dict[Tier, int] | PdserveError) -> None:
            if isinstance(answer, PdserveError):
                call.fail(answer)
                return
            _log.info(
                "%s dropped KV of %s: %s",
                call.life.node,
                _meant(order),
                ", ".join(f"blocks on {tier}: {count}" for tier, count in answer.items()) or "none",
            )
            call.reply(DropReport(answer))

        self._engine.drop_kv(order.owners, order.older, done)
        return None


def _meant(order: DropOrder) -> str:
    """Whose KV is meant. Tenants are counted and not named: a log has no names of tenants."""
    whose = "all" if order.owners is None else f"{len(order.owners)} tenants or salts"
    return f"{whose}, unused for {order.older:g} s" if order.older else whose
