"""Drains a process: runs the drain once and reports its progress.

A signal starts it, or an operator through any node of the process (`DRAIN`). Each role stops taking
new work and hands over or finishes what it has, the frontend first, since it owns requests; all
within one time limit. Then the process ends, unless the operator wants it to stay as an idle member
until a signal. The roles implement their own drain. Owned by the process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.messages.status import DrainState
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import DRAIN
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.launch.roles.base import Role
    from pdserve.messages.status import DrainOrder
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["Drain", "describe", "requests_in_words"]

_log = logging.getLogger(__name__)

_REPLY: Final[Seconds] = 0.1
"""Delay after a drain request, so that its reply is sent before the process ends."""


class Drain:
    """Drain of one process; `close` it at the end."""

    def __init__(
        self,
        parts: Sequence[Role],
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
        self._stays = False
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
        )

    def reason(self) -> str | None:
        """Return why the process refuses new work; None before the drain begins."""
        state = self.state()
        return None if state is None else describe(state)

    # ------------------------------------------------------------------ inside

    def ordered(self, node: Node, order: DrainOrder, by: NodeId) -> DrainState:
        """`by` wants `node` to drain; returns the state. Errors: `ConfigError` if it may not."""
        if self._refusal:
            raise ConfigError(self._refusal)
        before = self.state()
        if before is None:
            how = "stays in the cluster" if order.stay else "ends when that is done"
            _log.info(
                "%s is to drain, says %s: %s; it %s",
                *(node.id, by, requests_in_words(self.left), how),
            )
            self.begin()
        if not order.stay:
            self._stays = False
            node.timers.call_later(_REPLY, self._on_ordered)
        state = self.state()
        assert state is not None
        return DrainState(state.drained, state.left, state.remaining, state.stays, bool(before))

    async def _run(self) -> None:
        for part in reversed(self._parts):
            try:
                await part.drain(max(0.0, self._until - _now()))
            except Exception:
                # The other parts still have requests and must drain too.
                _log.exception("a part of this process did not drain in order")
        _log.info("drained")


class _DrainOrders:
    """What operators say to one node of the process."""

    def __init__(self, drain: Drain, node: Node) -> None:
        self._drain = drain
        self._node = node

    @answers(DRAIN)
    def _ordered(self, order: DrainOrder, call: IncomingCall) -> DrainState:
        return self._drain.ordered(self._node, order, call.life.node)


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
