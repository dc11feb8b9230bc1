"""Carries out what the core of the planner orders: at workers by calls, elsewhere by actuators.

    begin start        the actuator of the kind starts a worker
    begin stop         the worker drains and ends by itself (`DRAIN`)
    begin undo_drain   it serves again (`UNDO_DRAIN`)
    begin mode         it changes its mode (`MODE`)
    end                the actuator ends an instance that is drained, or never served

The core repeats an order at each tick until cards and lists show it. So an order that is still on
its way is not sent again, and one that was lost is. A refusal goes to the core with the next tick.
Orders carry term and number, so a worker obeys no planner that has a successor.
Owned by the service; the tasks are the node's.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.errors import DeadlineExceeded, LinkError, NoMethod, PdserveError
from pdserve.messages.mode import SetMode
from pdserve.messages.status import DrainOrder, UndoDrain
from pdserve.planner.actuators.base import (
    DEADLINE,
    ActuatorDenied,
    ActuatorError,
    ActuatorExhausted,
    within,
)
from pdserve.planner.tick import Refusal
from pdserve.runtime.rpc_methods import DRAIN, MODE, UNDO_DRAIN

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from pdserve.ids import Seconds
    from pdserve.messages.mode import ModeReport
    from pdserve.messages.status import DrainState
    from pdserve.planner.actuators.base import Actuator
    from pdserve.planner.driver.actuator_watch import ActuatorWatch
    from pdserve.planner.tick import Order
    from pdserve.runtime.node import Node
    from pdserve.wire.codec import Method

    Q = TypeVar("Q")
    R = TypeVar("R")

__all__ = ["Orders"]

_log = logging.getLogger(__name__)

_ANSWER: Final[Seconds] = 5.0
"""Longest wait for a worker's answer: a tick."""
_UNDO: Final[Seconds] = 20.0
"""The same for a drain that is undone: it answers when it serves again."""
_GRACE: Final[Seconds] = 45.0
"""Time for a process to end before it is killed: its own drain timeout, and 15 s."""
_SHARE: Final = 0.5
"""Share of a step for other workers' prompts where the core names none."""
_STALE: Final = "stale"
_MOST: Final = 64
"""Most orders on their way to workers, and as many to actuators; the core repeats those that have
to wait, and they go before those that have been tried."""
_MOST_TOLD: Final = 1024
"""Most refusals that are not logged again when they are repeated."""


class Orders:
    """The orders of one planner that are on their way."""

    def __init__(
        self,
        node: Node,
        watches: Iterable[ActuatorWatch],
        on_done: Callable[[Order, Refusal | None], None] = lambda order, refusal: None,
    ) -> None:
        """`on_done` is called with each order that was carried out, or with why it was not."""
        self._node = node
        self._watches = tuple(watches)
        self._on_done = on_done
        self._running: dict[tuple[str, str], bool] = {}
        """Orders on their way, by verb and change; True: to a worker."""
        self._tries: dict[tuple[str, str], int] = {}
        """How often each order of the last round was sent."""
        self._refusals: dict[str, Refusal] = {}
        self._told: dict[tuple[str, str], str] = {}
        """By verb and change: the refusal that was logged last."""

    def taken_refusals(self) -> dict[str, Refusal]:
        """Refusals since the last call, by id of the change."""
        found, self._refusals = self._refusals, {}
        return found

    def carry_out(self, orders: Iterable[Order]) -> None:
        """Sends each order that is not on its way. Orders that were sent least often go first: an
        order without an answer takes a place for seconds each time, and many such orders would
        keep all others waiting."""
        waiting = {_key(order): order for order in orders}
        self._tries = {key: self._tries.get(key, 0) for key in waiting}
        for key in sorted(waiting, key=self._tries.__getitem__):
            order, to_worker = waiting[key], _is_for_worker(waiting[key])
            on_their_way = sum(one is to_worker for one in self._running.values())
            if key in self._running or on_their_way >= _MOST:
                continue
            self._running[key] = to_worker
            self._tries[key] += 1
            name = f"{order.verb} {order.change.action} {order.change.id}"
            task = self._node.tasks.spawn(self._do(order), name)
            task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._running[key]

    async def _do(self, order: Order) -> None:
        try:
            refusal = await self._carried_out(order)
        except ActuatorError as error:
            refusal = _by_actuator(error)
        except NoMethod:
            refusal = Refusal("denied", "its version of pdserve cannot do that")
        except PdserveError as error:
            silent = isinstance(error, LinkError | DeadlineExceeded)
            refusal = Refusal("transient", error.message, silent=silent)
        except Exception as error:
            _log.exception("an order of the planner")
            refusal = Refusal("transient", f"{type(error).__name__}, see the planner's log")
        action = order.change.action if order.verb == "begin" else "end"
        self._on_done(order, refusal)
        if refusal is not None:
            self._refusals[order.change.id] = refusal
        self._tell(order, action, "" if refusal is None else refusal.reason)

    def _tell(self, order: Order, action: str, reason: str) -> None:
        """Logs why an order is not obeyed, once: the core repeats the order at each tick."""
        key = _key(order)
        if reason and self._told.get(key) != reason:
            _log.info("%s of %s: %s", action, _what(order), reason)
        self._told.pop(key, None)
        if reason:
            self._told[key] = reason
        if len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]

    async def _carried_out(self, order: Order) -> Refusal | None:
        """Returns why it is not obeyed; None: it is. Errors: `PdserveError` of some kind."""
        if order.verb == "end":
            return await self._end(order)
        by_action = {
            "start": self._start,
            "stop": self._drain,
            "undo_drain": self._undo,
            "mode": self._set_mode,
        }
        carry_out = by_action.get(order.change.action)
        if carry_out is None:
            return Refusal("denied", f"this planner cannot carry out {order.change.action!r}")
        return await carry_out(order)

    # ------------------------------------------------------------------ by actuators

    async def _start(self, order: Order) -> Refusal | None:
        change, actuator = order.change, self._starts(order.change.kind)
        if actuator is None:
            return Refusal("transient", f"no actuator offers kind {change.kind!r} now")
        async with within(DEADLINE, f"{actuator.name} was asked to start {change.kind}"):
            await actuator.start(change.kind, change.mode, change.id)
        return None  # one that fails is in the list, with the reason

    async def _end(self, order: Order) -> Refusal | None:
        actuator = self._started(order.instance)
        if actuator is None:
            return Refusal("transient", f"no actuator lists {order.instance or 'it'}")
        async with within(DEADLINE, f"{actuator.name} was asked to end {order.instance}"):
            await actuator.stop(order.instance, _GRACE)
        return None

    def _starts(self, kind: str) -> Actuator | None:
        return next(
            (one.actuator for one in self._watches if any(k.name == kind for k in one.kinds)), None
        )

    def _started(self, change: str) -> Actuator | None:
        """The actuator that has an instance. One that does not answer now may be the one."""
        for watch in self._watches:
            if any(one.change == change for one in watch.instances):
                return watch.actuator
        return None

    # ------------------------------------------------------------------ at workers

    async def _drain(self, order: Order) -> Refusal | None:
        message = DrainOrder(False, order.term, order.number)
        state = await self._ask(order, DRAIN, message, _ANSWER)
        return _by_worker(state)

    async def _undo(self, order: Order) -> Refusal | None:
        state = await self._ask(order, UNDO_DRAIN, UndoDrain(order.term, order.number), _UNDO)
        return _by_worker(state)

    async def _set_mode(self, order: Order) -> Refusal | None:
        message = SetMode(
            mode=order.change.mode,
            share=order.change.share or _SHARE,
            last=order.last,
            term=order.term,
            number=order.number,
        )
        report = await self._ask(order, MODE, message, _ANSWER)
        return _by_worker(report)

    async def _ask(self, order: Order, method: Method[Q, R], message: Q, timeout: Seconds) -> R:
        """Asks the life of the worker that is meant. Errors: as `PeerRef.ask`."""
        assert order.change.node is not None
        worker = self._node.ref(order.change.node, order.change.epoch)
        return await worker.ask(method, message, timeout=timeout)


def _by_worker(answer: DrainState | ModeReport) -> Refusal | None:
    refused = answer.refused
    if not refused:
        return None
    if refused.startswith(_STALE):
        return Refusal("stale", refused, newest=answer.newest)
    return Refusal("vetoed", refused)


def _by_actuator(error: ActuatorError) -> Refusal:
    if isinstance(error, ActuatorDenied):
        return Refusal("denied", error.message)
    if isinstance(error, ActuatorExhausted):
        return Refusal("exhausted", error.message, error.retry_after)
    return Refusal("transient", error.message)


def _key(order: Order) -> tuple[str, str]:
    return order.verb, order.change.id


def _is_for_worker(order: Order) -> bool:
    return order.verb == "begin" and order.change.action != "start"


def _what(order: Order) -> str:
    return str(order.change.node or order.change.kind or order.change.id)
