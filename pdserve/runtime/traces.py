"""Answers trace queries: any node can be asked, and asks all that may have traces.

Frontends have traces of requests, planners and workers of changes. A query that is not for
everywhere is answered from memory; by a node of another role with nothing. The asking side need not
be a member. It lives as long as its node, whose tasks it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from pdserve.errors import NoMethod, Overloaded, PdserveError
from pdserve.messages.trace import TraceReply
from pdserve.runtime.peers.handlers import answers_later
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.runtime.rpc_methods import TRACES
from pdserve.tracing.merge import merge_trace_replies

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.trace import TraceQuery
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["TraceService"]

_PATIENCE: Final[Seconds] = 1.0
"""Timeout of all frontends together; one without a reply by then is named in the reply."""
_MARGIN: Final[Seconds] = 0.25
"""Part of the request's deadline that is kept for the way back."""
_CALLERS: Final = 16
"""Most queries for everywhere that are under way at a time; one more is refused."""
_AT_ONCE: Final = 1024
"""Most queries of all kinds. One for this node alone takes a turn of the event loop, and must not
be refused because others wait for other frontends, which ask back."""
_OF_REQUESTS: Final = ("frontend",)
_OF_CHANGES: Final = ("planner", "worker")
_SUMMARIES: Final = 1000
"""Most summaries that all frontends together return: they must fit one message."""


class TraceService:
    """Traces of the cluster, asked of one node."""

    def __init__(
        self,
        node: Node,
        own: Callable[[TraceQuery], TraceReply] | None = None,
        *,
        of: Literal["requests", "changes"] = "requests",
    ) -> None:
        """`own` answers from this node's memory, quickly; None: it has no traces. `of`: what its
        traces are about."""
        self._node = node
        self._own = own
        self._of_changes = of == "changes"
        self._callers = 0
        node.host(self)

    @answers_later(TRACES, at_once=_AT_ONCE)
    async def _asked(self, query: TraceQuery, call: IncomingCall) -> TraceReply:
        if not query.everywhere:
            return TraceReply() if self._own is None else self._own(query)
        if self._callers >= _CALLERS:
            raise Overloaded("too many trace queries at once", retry_after=1.0)
        patience = min(_PATIENCE, call.deadline - self._node.now() - _MARGIN)
        self._callers += 1
        try:
            return await self.view(query, patience=max(0.0, patience))
        finally:
            self._callers -= 1

    async def view(self, query: TraceQuery, *, patience: Seconds) -> TraceReply:
        """Ask all that may have such traces and join their replies. Cancellation: ends the
        calls."""
        registry = self._node.registry
        others = [one.node for role in _roles(query) for one in registry.by_role(role)]
        share = max(1, _SUMMARIES // (len(others) + 1))
        single = replace(query, everywhere=False, limit=min(query.limit, share))
        asked = await ask_all(self._node, others, TRACES, single, timeout=patience)
        replies: dict[str, TraceReply | str] = {node: _told(one) for node, one in asked.items()}
        if self._own is not None and (query.id or query.changes == self._of_changes):
            replies[self._node.id] = self._asked_here(self._own, single)
        return merge_trace_replies(query, replies)

    def _asked_here(
        self, own: Callable[[TraceQuery], TraceReply], query: TraceQuery
    ) -> TraceReply | str:
        try:
            return own(query)
        except PdserveError as error:
            return error.message


def _roles(query: TraceQuery) -> tuple[str, ...]:
    """Roles of the nodes that may have what is asked for."""
    if query.id:
        return (*_OF_REQUESTS, *_OF_CHANGES)
    return _OF_CHANGES if query.changes else _OF_REQUESTS


def _told(answer: TraceReply | PdserveError) -> TraceReply | str:
    if isinstance(answer, NoMethod):
        return "its version of pdserve has no traces"
    return answer.message if isinstance(answer, PdserveError) else answer
