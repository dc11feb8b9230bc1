"""Answers status requests: any node can be asked, and asks all others for their reports.

    REPORT   this node's own report, at once
    STATUS   the whole view: this node's members, each with the report that it gave in time

The asking side need not be a member. The role makes the report, `build_cluster_view` the view. It
lives as long as its node, whose tasks it uses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded, PdserveError
from pdserve.messages.node import NodeCard
from pdserve.messages.status import NodeReport, StatusQuery
from pdserve.runtime.cluster_view import build_cluster_view
from pdserve.runtime.registry import Member
from pdserve.runtime.rpc_methods import REPORT, STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.status import ClusterStatus
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["StatusService"]

_PATIENCE: Final[Seconds] = 1.0
"""Timeout of all reports together; a node without a report by then is listed with the reason."""
_MARGIN: Final[Seconds] = 0.25
"""Part of the request's deadline that is kept for the way back."""
_AT_ONCE: Final = 64
"""Most members asked at a time: each may need a new connection."""
_CALLERS: Final = 16
"""Most views under way at a time; one more is refused."""


class StatusService:
    """Status of the cluster, as one node sees it."""

    def __init__(
        self, node: Node, report: Callable[[], NodeReport], wall: Callable[[], Seconds]
    ) -> None:
        """`report` returns this node's report; it must be quick and must not raise. `wall` is the
        wall clock, in Unix seconds."""
        self._node = node
        self._report = report
        self._wall = wall
        self._callers = 0
        node.serve(REPORT, lambda query, call: report())
        node.serve(STATUS, self._status)

    def _status(self, query: StatusQuery, call: IncomingCall) -> None:
        if self._callers >= _CALLERS:
            raise Overloaded("too many status requests at once", retry_after=1.0)
        self._callers += 1
        task = self._node.tasks.spawn(self._answer(call), f"status for {call.link.peer.node}")
        task.add_done_callback(self._answered)

        def unwanted() -> None:
            task.cancel()

        call.on_cancel = unwanted

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._callers -= 1

    async def _answer(self, call: IncomingCall) -> None:
        patience = min(_PATIENCE, call.deadline - self._node.now() - _MARGIN)
        call.reply(await self.view(patience=max(0.0, patience)))

    async def view(self, *, patience: Seconds) -> ClusterStatus:
        """Ask all members and build the view. Cancellation: ends the calls."""
        node = self._node
        members = tuple(node.registry)
        answers: dict[NodeId, NodeReport | str] = {node.id: self._report()}
        turn = asyncio.Semaphore(_AT_ONCE)

        async def ask(member: NodeId) -> None:
            async with turn:
                answers[member] = await self._ask(member, patience)

        silent = f"no answer within {patience:g} s"
        answers |= dict.fromkeys((member.node for member in members), silent)
        asking = [node.tasks.spawn(ask(m.node), f"report of {m.node}") for m in members]
        try:
            if asking:
                await asyncio.wait(asking, timeout=patience)
        finally:
            for task in asking:
                task.cancel()
        return build_cluster_view(
            cluster=node.config.cluster,
            me=self._me(),
            members=members,
            answers=answers,
            now=self._wall(),
        )

    async def _ask(self, member: NodeId, patience: Seconds) -> NodeReport | str:
        try:
            link = await self._node.link(member, timeout=patience)
            return await link.request(REPORT, StatusQuery(), timeout=patience)
        except PdserveError as error:
            return error.message

    def _me(self) -> Member:
        node = self._node
        card = node.card or NodeCard(role=node.config.role)
        return Member(node.id, node.epoch, node.address, node.config.role, card)
