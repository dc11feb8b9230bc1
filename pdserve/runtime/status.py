"""Answers status requests: any node can be asked, and asks all others for their reports.

    REPORT   this node's own report, at once
    STATUS   the whole view: this node's members, each with the report that it gave in time

The asking side need not be a member. The role makes the report, `build_cluster_view` the view. It
lives as long as its node, whose tasks it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.messages.node import NodeCard
from pdserve.messages.status import NodeReport, StatusQuery
from pdserve.runtime.cluster_view import build_cluster_view
from pdserve.runtime.peers.handlers import answers, answers_later
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.runtime.registry import Member
from pdserve.runtime.rpc_methods import REPORT, STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["StatusService"]

_PATIENCE: Final[Seconds] = 1.0
"""Timeout of all reports together; a node without a report by then is listed with the reason."""
_MARGIN: Final[Seconds] = 0.25
"""Part of the request's deadline that is kept for the way back."""
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
        node.host(self)

    @answers(REPORT)
    def _own_report(self, query: StatusQuery, call: IncomingCall) -> NodeReport:
        return self._report()

    @answers_later(STATUS, at_once=_CALLERS)
    async def _status(self, query: StatusQuery, call: IncomingCall) -> ClusterStatus:
        patience = min(_PATIENCE, call.deadline - self._node.now() - _MARGIN)
        return await self.view(patience=max(0.0, patience))

    async def view(self, *, patience: Seconds) -> ClusterStatus:
        """Ask all members and build the view. Cancellation: ends the calls."""
        node = self._node
        members = tuple(node.registry)
        asked = [member.node for member in members]
        answers = await ask_all(node, asked, REPORT, StatusQuery(), timeout=patience)
        return build_cluster_view(
            cluster=node.config.cluster,
            me=self._me(),
            members=members,
            answers={node.id: self._report(), **{who: _told(a) for who, a in answers.items()}},
            now=self._wall(),
        )

    def _me(self) -> Member:
        node = self._node
        card = node.card or NodeCard(role=node.config.role)
        return Member(node.id, node.epoch, node.address, node.config.role, card)


def _told(answer: NodeReport | PdserveError) -> NodeReport | str:
    return answer.message if isinstance(answer, PdserveError) else answer
