"""Starts children in order, restarts those that fail, stops them in reverse order.

Children are anything with `when_ended` and `stop`: an actor's `Cell`, another `Supervisor`. When
they fail more often than allowed, all are stopped and the supervisor itself ends by
`RestartsExhausted`: the failure of its owner, which is another supervisor or the process.

What to do is decided by `supervision`; this file performs, one thing at a time. Owned by whoever
calls `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import DeadlineExceeded, RestartsExhausted
from pdserve.runtime.intensity import Restarts
from pdserve.runtime.supervision import GiveUp, Plan, Start, Stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.runtime.supervision import Kind, Strategy
    from pdserve.runtime.tasks import Tasks

__all__ = ["Child", "ChildSpec", "Supervisor"]

_log = logging.getLogger(__name__)


class Child(Protocol):
    """What can be supervised."""

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call back once with why it failed, None if it did not; also if it has ended already."""
        ...

    async def stop(self, *, timeout: Seconds) -> None:
        """End within about `timeout`. Must not raise."""
        ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to make a child, and how to treat it."""

    name: str
    start: Callable[[], Awaitable[Child]]
    """Returns a running child. When it raises or is cancelled, nothing may be left of it."""
    kind: Kind = "permanent"
    start_timeout: Seconds = 30.0
    stop_timeout: Seconds = 5.0


class Supervisor:
    """See above."""

    def __init__(
        self,
        name: str,
        children: Sequence[ChildSpec],
        *,
        tasks: Tasks,
        random: Random,
        strategy: Strategy = "one_for_one",
        restarts: Restarts | None = None,
    ) -> None:
        """`tasks` own its one task."""
        self.name = name
        self.failure: BaseException | None = None
        self._specs = tuple(children)
        self._tasks = tasks
        kinds = [spec.kind for spec in children]
        self._plan = Plan(kinds, strategy, restarts or Restarts(), random)
        self._running: dict[int, Child] = {}
        self._last_error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._happened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def child(self, name: str) -> Child | None:
        """The present child of that name; None while it does not run."""
        names = [spec.name for spec in self._specs]
        return self._running.get(names.index(name))

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `Child`."""
        if self._ended:
            self._loop.call_soon(callback, self.failure)
        else:
            self._callbacks.append(callback)

    async def start(self) -> None:
        """Start all, in order. Raises what a start raises, and `DeadlineExceeded`; then, and when
        cancelled, those that had started have been stopped."""
        try:
            for index in range(len(self._specs)):
                await self._start(index)
        except BaseException:
            await self._stop_all()
            raise
        self._task = self._tasks.spawn(self._run(), f"supervisor {self.name}")

    async def stop(self, *, timeout: Seconds) -> None:
        """Restart nothing more, and stop all in reverse order. A child gets its `stop_timeout`, or
        what is left of `timeout` if that is less. Idempotent."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})  # what it may be doing has deadlines of its own
        await self._stop_all(self._loop.time() + timeout)
        self._end()

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        while not isinstance(action := self._plan.next(self._loop.time()), GiveUp):
            if isinstance(action, Stop):
                await self._stop(action.index, self._specs[action.index].stop_timeout)
            elif isinstance(action, Start):
                await self._restart(action.index)
            else:
                await self._wait(action.until)
        self.failure = RestartsExhausted(f"{self.name} gives up after {self._last_error!r}")
        self.failure.__cause__ = self._last_error
        _log.error("%s", self.failure)
        await self._stop_all()
        self._end()

    async def _restart(self, index: int) -> None:
        name = self._specs[index].name
        _log.info("%s restarts %s", self.name, name)
        try:
            await self._start(index)
        except Exception as error:
            _log.warning("%s: %s did not start: %s", self.name, name, error)
            self._last_error = error
            self._plan.start_failed(index, self._loop.time())

    async def _start(self, index: int) -> None:
        spec = self._specs[index]
        try:
            async with asyncio.timeout(spec.start_timeout):
                child = await spec.start()
        except TimeoutError:
            late = f"{spec.name} did not start within {spec.start_timeout:g} s"
            raise DeadlineExceeded(late) from None
        self._running[index] = child
        self._plan.started(index)
        child.when_ended(lambda error: self._on_end(index, child, error))

    def _on_end(self, index: int, child: Child, error: BaseException | None) -> None:
        """A child has ended, at its own will or ours."""
        if self._running.get(index) is not child:
            return
        del self._running[index]
        self._last_error = error or self._last_error
        self._plan.ended(index, self._loop.time(), failed=error is not None)
        if self._happened is not None and not self._happened.done():
            self._happened.set_result(None)

    async def _wait(self, until: Seconds | None) -> None:
        self._happened = self._loop.create_future()
        left = None if until is None else max(0.0, until - self._loop.time())
        await asyncio.wait({self._happened}, timeout=left)

    # ------------------------------------------------------------------ the end

    async def _stop(self, index: int, timeout: Seconds) -> None:
        child = self._running[index]
        await child.stop(timeout=timeout)
        self._on_end(index, child, None)  # for one that did not end: it has been named in the log

    async def _stop_all(self, until: Seconds | None = None) -> None:
        """In reverse order of their start."""
        for index in reversed(range(len(self._specs))):
            if index in self._running:
                timeout = self._specs[index].stop_timeout
                if until is not None:
                    timeout = min(timeout, max(0.0, until - self._loop.time()))
                await self._stop(index, timeout)

    def _end(self) -> None:
        self._ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self.failure)
