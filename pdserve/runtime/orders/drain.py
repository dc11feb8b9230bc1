"""Drains a process: runs the drain once, reports its progress, and can take it back.

A signal starts it, or an operator or planner through any node of the process (`DRAIN`). Each role
stops taking new work and hands over or finishes what it has, the frontend first, since it owns
requests; all within one time limit. Then the process ends, unless it is to stay as an idle member
until a signal. Until it begins to end it can serve again (`UNDO_DRAIN`); a signal is final.

A planner's order is refused if it is older than the last one, or if no other ready node would do
what this one does. Two such nodes may be ordered at the same moment by two planners that do not see
each other: so each looks again when it must have heard of the other, and serves on.

The roles implement their own drain. Owned by the process.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.errors import ConfigError, Overloaded
from pdserve.messages.status import DrainState
from pdserve.runtime.orders.order_fence import OrderFence
from pdserve.runtime.peers.handlers import answers, answers_later
from pdserve.runtime.rpc_methods import DRAIN, UNDO_DRAIN
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.status import DrainOrder, UndoDrain
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["Drain", "DrainPart", "describe", "requests_in_words"]

_log = logging.getLogger(__name__)

_REPLY: Final[Seconds] = 0.1
"""Delay after a drain request, so that its reply is sent before the process ends."""
_NEWS: Final[Seconds] = 3.0
"""Seconds after which a node knows that another one has begun to drain: more than twice the time
that gossip takes among 256 members."""
_UNDO: Final[Seconds] = 15.0
"""Most seconds to take a drain back; a frontend needs them to end connections that it closes."""
_CALLERS: Final = 4
"""Most nodes at once that take a drain back."""


class DrainPart(Protocol):
    """What a drain asks of each part of its process; a role has it."""

    @property
    def left(self) -> int:
        """Number of requests that a drain waits for."""
        ...

    def needed(self) -> str:
        """Why no planner may drain it, in words; empty: one may."""
        ...

    async def drain(self, timeout: Seconds) -> None:
        """Drain; return when no request is left or after `timeout`."""
        ...

    async def undo_drain(self) -> None:
        """Serve again."""
        ...


class Drain:
    """Drain of one process; `close` it at the end."""

    def __init__(
        self,
        parts: Sequence[DrainPart],
        timeout: Seconds,
        on_ordered: Callable[[], None],
        refusal: str = "",
    ) -> None:
        """`parts` in the order in which they joined; it may still grow until the drain begins.
        `on_ordered` is called when an operator wants the process to end. `refusal`: why no operator
        may."""
        self._parts = parts
        self._timeout = timeout
        self._on_ordered = on_ordered
        self._refusal = refusal
        self._stays = True
        """False once the process must end after the drain."""
        self._ending = False
        """True once the process ends, which cannot be taken back."""
        self._orders = OrderFence()
        self._term = 0
        """Term of the planner that ordered the drain."""
        self._sure_at: Seconds = 0.0
        """The process does not end before, since it may have to serve on."""
        self._undoing: asyncio.Task[None] | None = None
        self._tasks = Tasks("drain")
        self._task: asyncio.Task[None] | None = None
        self._until: Seconds = 0.0

    def serve(self, node: Node) -> None:
        """Accept drain requests on this node."""
        node.host(_DrainOrders(self, node))

    def begin(self, timeout: Seconds | None = None) -> None:
        """Begin the drain once. `timeout` replaces the configured one."""
        if self._task is None:
            timeout = self._timeout if timeout is None else timeout
            self._until = _now() + timeout
            self._task = self._tasks.spawn(self._run(), "drain")

    async def finish(self, timeout: Seconds) -> None:
        """Begin the drain if needed and wait for its end; the process ends afterwards."""
        self._ending, self._stays, self._sure_at = True, False, 0.0
        if self._undoing is not None:
            await asyncio.wait({self._undoing})
        self._term = 0
        self.begin(timeout)
        assert self._task is not None
        await asyncio.wait({self._task})

    async def close(self) -> None:
        """Cancel a running drain."""
        await self._tasks.close()

    @property
    def begun(self) -> bool:
        """True once the drain has begun and new work is refused."""
        return self._task is not None

    @property
    def left(self) -> int:
        """Number of requests in this process; one in several roles counts once."""
        return max((part.left for part in self._parts), default=0)

    def state(self) -> DrainState | None:
        """State of the drain for status requests; None before it begins."""
        if self._task is None:
            return None
        done = self._task.done()
        return DrainState(
            drained=done,
            left=self.left,
            remaining=0.0 if done else max(0.0, self._until - _now()),
            stays=self._stays,
            term=self._term,
        )

    def reason(self) -> str | None:
        """Return why the process refuses new work; None before the drain begins."""
        state = self.state()
        return None if state is None else describe(state)

    # ------------------------------------------------------------------ inside

    def ordered(self, node: Node, order: DrainOrder, by: NodeId) -> DrainState:
        """`by` wants `node` to drain; returns the state. Errors: `ConfigError` if it may not,
        `Overloaded` while an earlier drain is taken back."""
        self._check()
        if self._undoing is not None:
            raise Overloaded("its last drain is being taken back; order it again", retry_after=1.0)
        refused = self._objection(order)
        if refused:
            _log.warning("%s wants %s to drain, which is refused: %s", by, node.id, refused)
            return self._answer(refused=refused)
        self._orders.obeyed(order.term, order.number)
        before = self._task is not None
        if not before:
            self._begin_ordered(node, order, by)
        self._term = order.term if not before else min(self._term, order.term)
        if not order.stay:
            self._end_after(node)
        return replace(self._answer(), already=before)

    async def undo(self, node: Node, order: UndoDrain, by: NodeId) -> DrainState:
        """`by` wants `node` to serve again; returns when it does, or why it does not. Errors:
        `ConfigError` if a role cannot serve again: then it is drained."""
        self._check()
        refused = self._orders.refusal(order.term, order.number)
        if not refused and self._ending:
            refused = "it has begun to end, which cannot be taken back"
        if refused:
            _log.warning("%s wants %s to serve again, which is refused: %s", by, node.id, refused)
            return self._answer(refused=refused)
        self._orders.obeyed(order.term, order.number)
        if self._task is None:
            return replace(self._answer(), already=True)
        _log.info("%s is to serve again, says %s", node.id, by)
        await self._take_back()
        return self._answer()

    def _check(self) -> None:
        """Errors: `ConfigError` if this process takes no orders."""
        if self._refusal:
            raise ConfigError(self._refusal)

    def _objection(self, order: DrainOrder) -> str:
        """Why an order is not obeyed; empty: it is. An operator's always is."""
        late = self._orders.refusal(order.term, order.number)
        if late or not order.term or order.last or self.begun:
            return late
        return self._needed()

    def _needed(self) -> str:
        """What no other node would do without this process."""
        return next(filter(None, (part.needed() for part in self._parts)), "")

    def _answer(self, *, refused: str = "") -> DrainState:
        state = self.state()
        if state is None:
            state = DrainState(left=self.left, serves=not self._ending)
        return replace(state, refused=refused, newest=self._orders.newest)

    def _begin_ordered(self, node: Node, order: DrainOrder, by: NodeId) -> None:
        how = "stays in the cluster" if order.stay else "ends when that is done"
        _log.info(
            "%s is to drain, says %s: %s; it %s",
            *(node.id, by, requests_in_words(self.left), how),
        )
        self.begin()
        if order.term and not order.last:
            self._sure_at = _now() + _NEWS + _REPLY
            node.timers.call_later(_NEWS, partial(self._look_again, self._task))

    def _look_again(self, begun: asyncio.Task[None] | None) -> None:
        """Takes a planner's drain back if another node that did the same has drained, too."""
        if self._task is not begun or self._ending or self._undoing is not None:
            return
        needed = self._needed()
        if needed:
            _log.warning("serves on, although a planner ordered a drain: %s", needed)
            _ = self._tasks.spawn(self._take_back(), "take a drain back")

    def _end_after(self, node: Node) -> None:
        """Lets the process end when it is drained."""
        self._stays = False
        if self._task is not None and self._task.done():
            node.timers.call_later(_REPLY, self._end)

    def _end(self) -> None:
        if not self._stays and not self._ending and self._undoing is None:
            self._ending = True
            self._on_ordered()

    async def _take_back(self) -> None:
        """Serves again. Callers at the same time wait for the same end. Errors: as `undo`."""
        if self._undoing is None:
            self._undoing = self._tasks.spawn(self._serve_again(), "serve again")
        await asyncio.shield(self._undoing)

    async def _serve_again(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        try:
            async with asyncio.timeout(_UNDO):
                for part in self._parts:
                    await part.undo_drain()
        except Exception:
            _log.warning("a part cannot serve again: the process is drained as before")
            self._task = self._tasks.spawn(self._run(), "drain")
            raise
        else:
            self._task, self._term, self._stays = None, 0, not self._ending
            _log.info("serves again")
        finally:
            self._undoing = None

    async def _run(self) -> None:
        for part in reversed(self._parts):
            try:
                await part.drain(max(0.0, self._until - _now()))
            except Exception:
                # The other parts still have requests and must drain too.
                _log.exception("a part of this process did not drain in order")
        _log.info("drained")
        if not self._stays and not self._ending:
            await asyncio.sleep(max(_REPLY, self._sure_at - _now()))
            self._end()


class _DrainOrders:
    """What operators and planners say to one node of the process."""

    def __init__(self, drain: Drain, node: Node) -> None:
        self._drain = drain
        self._node = node

    @answers(DRAIN)
    def _ordered(self, order: DrainOrder, call: IncomingCall) -> DrainState:
        return self._drain.ordered(self._node, order, call.life.node)

    @answers_later(UNDO_DRAIN, at_once=_CALLERS)
    async def _undone(self, order: UndoDrain, call: IncomingCall) -> DrainState:
        return await self._drain.undo(self._node, order, call.life.node)


def _now() -> Seconds:
    return asyncio.get_running_loop().time()


def describe(state: DrainState) -> str:
    """Describe a drain in words for status and probes."""
    if state.drained:
        return "drained" if state.stays else "drained: it is leaving"
    return f"draining: {requests_in_words(state.left)} left, for {state.remaining:.0f} s at most"


def requests_in_words(count: int) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} request{'' if count == 1 else 's'}"
