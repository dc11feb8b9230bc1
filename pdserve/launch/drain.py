"""A process's drain: begun once, whoever asks for it, and how far it is.

A signal asks for it, and so does an operator through any node of the process (`DRAIN`). Each part
takes nothing new from its turn on and hands over or finishes what it has, the frontend first, since
it owns requests; all within one time. Then the process ends, unless the operator wants it to stay:
a drained node is a member that does nothing, until a signal ends it. How a part drains is its own
business. Owned by the process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.messages.status import DrainState
from pdserve.runtime.methods import DRAIN
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.launch.parts.base import Part
    from pdserve.messages.status import DrainOrder
    from pdserve.net.base import Call
    from pdserve.runtime.node import Node

__all__ = ["Drain", "describe", "requests_in_words"]

_log = logging.getLogger(__name__)

_REPLY: Final[Seconds] = 0.1
"""For the answer to an order to be on its way before the process can be gone."""


class Drain:
    """See above; `close` it at the end."""

    def __init__(
        self,
        parts: Sequence[Part],
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
        """Until it is told to end."""
        self._tasks = Tasks("drain")
        self._task: asyncio.Task[None] | None = None
        self._until: Seconds = 0.0

    def serve(self, node: Node) -> None:
        """Take orders through this node."""
        node.serve(DRAIN, lambda order, call: self._ordered(node, order, call))

    def begin(self, timeout: Seconds | None = None) -> None:
        """Begin, unless it has begun. `timeout`: in place of the configured one."""
        if self._task is None:
            timeout = self._timeout if timeout is None else timeout
            self._until = _now() + timeout
            self._task = self._tasks.spawn(self._run(), "drain")

    async def finish(self, timeout: Seconds) -> None:
        """Begin, unless it has begun, and wait for its end: the process goes."""
        self._stays = False
        self.begin(timeout)
        assert self._task is not None
        await asyncio.wait({self._task})

    async def close(self) -> None:
        """End what is left of it."""
        await self._tasks.close()

    @property
    def begun(self) -> bool:
        """Nothing new is taken."""
        return self._task is not None

    @property
    def left(self) -> int:
        """Requests in this process; one that several parts have counts once."""
        return max((part.left for part in self._parts), default=0)

    def state(self) -> DrainState | None:
        """For whoever asks; None: it has not begun."""
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
        """Why the process serves nothing new; None: it has not begun."""
        state = self.state()
        return None if state is None else describe(state)

    # ------------------------------------------------------------------ inside

    def _ordered(self, node: Node, order: DrainOrder, call: Call) -> DrainState:
        if self._refusal:
            raise ConfigError(self._refusal)
        before = self.state()
        if before is None:
            how = "stays in the cluster" if order.stay else "ends when that is done"
            _log.info(
                "%s is to drain, says %s: %s; it %s",
                *(node.id, call.link.peer.node, requests_in_words(self.left), how),
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
            except Exception:  # the others still have somebody's requests
                _log.exception("a part of this process did not drain in order")
        _log.info("drained")


def _now() -> Seconds:
    return asyncio.get_running_loop().time()


def describe(state: DrainState) -> str:
    """In words, for status and probes."""
    if state.drained:
        return "drained" if state.stays else "drained: it is leaving"
    return f"draining: {requests_in_words(state.left)} left, for {state.remaining:.0f} s at most"


def requests_in_words(count: int) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} request{'' if count == 1 else 's'}"
