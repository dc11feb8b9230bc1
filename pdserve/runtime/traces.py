"""Answers trace queries: any node can be asked, and asks all frontends.

Only frontends have traces. A query that is not for everywhere is answered at once, from memory; by
a node of another role with nothing. The asking side need not be a member. It lives as long as its
node, whose tasks it uses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import NoMethod, Overloaded, PdserveError
from pdserve.messages.trace import TraceReply
from pdserve.runtime.rpc_methods import TRACES
from pdserve.tracing.merge import merge_trace_replies

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.trace import TraceQuery
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["TraceService"]

_PATIENCE: Final[Seconds] = 1.0
"""Timeout of all frontends together; one without a reply by then is named in the reply."""
_MARGIN: Final[Seconds] = 0.25
"""Part of the request's deadline that is kept for the way back."""
_AT_ONCE: Final = 64
"""Most frontends asked at a time: each may need a new connection."""
_CALLERS: Final = 16
"""Most queries for everywhere that are under way at a time; one more is refused."""
_SUMMARIES: Final = 1000
"""Most summaries that all frontends together return: they must fit one message."""


class TraceService:
    """Traces of the cluster's requests, asked of one node."""

    def __init__(self, node: Node, own: Callable[[TraceQuery], TraceReply] | None = None) -> None:
        """`own` answers from this node's memory, quickly; None: it is no frontend."""
        self._node = node
        self._own = own
        self._callers = 0
        node.serve(TRACES, self._asked)

    def _asked(self, query: TraceQuery, call: IncomingCall) -> TraceReply | None:
        if not query.everywhere:
            return TraceReply() if self._own is None else self._own(query)
        if self._callers >= _CALLERS:
            raise Overloaded("too many trace queries at once", retry_after=1.0)
        self._callers += 1
        task = self._node.tasks.spawn(
            self._answer(query, call), f"traces for {call.link.peer.node}"
        )
        task.add_done_callback(self._answered)

        def unwanted() -> None:
            task.cancel()

        call.on_cancel = unwanted
        return None

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._callers -= 1

    async def _answer(self, query: TraceQuery, call: IncomingCall) -> None:
        patience = min(_PATIENCE, call.deadline - self._node.now() - _MARGIN)
        call.reply(await self.view(query, patience=max(0.0, patience)))

    async def view(self, query: TraceQuery, *, patience: Seconds) -> TraceReply:
        """Ask all frontends and join their replies. Cancellation: ends the calls."""
        others = [member.node for member in self._node.registry.by_role("frontend")]
        share = max(1, _SUMMARIES // (len(others) + 1))
        single = replace(query, everywhere=False, limit=min(query.limit, share))
        answers: dict[str, TraceReply | str] = {
            **dict.fromkeys(others, f"no answer within {patience:g} s")
        }
        if self._own is not None:
            answers[self._node.id] = self._asked_here(single)
        turn = asyncio.Semaphore(_AT_ONCE)

        async def ask(frontend: NodeId) -> None:
            async with turn:
                answers[frontend] = await self._ask(frontend, single, patience)

        asking = [self._node.tasks.spawn(ask(one), f"traces of {one}") for one in others]
        try:
            if asking:
                await asyncio.wait(asking, timeout=patience)
        finally:
            for task in asking:
                task.cancel()
        return merge_trace_replies(query, answers)

    def _asked_here(self, query: TraceQuery) -> TraceReply | str:
        assert self._own is not None
        try:
            return self._own(query)
        except PdserveError as error:
            return error.message

    async def _ask(
        self, frontend: NodeId, query: TraceQuery, patience: Seconds
    ) -> TraceReply | str:
        try:
            link = await self._node.link(frontend, timeout=patience)
            return await link.request(TRACES, query, timeout=patience)
        except NoMethod:
            return "its version of pdserve has no traces"
        except PdserveError as error:
            return error.message
