"""Starts children in order, restarts those that fail, and stops them in reverse order.

A child is anything with `when_ended` and `stop`: a child process, another `Supervisor`. When
children fail more often than allowed, all are stopped and the supervisor itself ends with
`RestartsExhausted`, for its owner to handle. `supervisor_plan` decides; this file performs, one
step at a time. The owner calls `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import DeadlineExceeded, RestartsExhausted
from pdserve.runtime.restart_intensity import RestartLimits
from pdserve.runtime.supervisor_plan import RestartsUsedUp, StartChild, StopChild, SupervisorPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.runtime.supervisor_plan import RestartKind, RestartStrategy
    from pdserve.runtime.tasks import Tasks

__all__ = ["ChildSpec", "SupervisedChild", "Supervisor"]

_log = logging.getLogger(__name__)


class SupervisedChild(Protocol):
    """The interface of a child."""

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls back once with the failure, None if there was none; also if it has ended
        already.
        """
        ...

    async def stop(self, *, timeout: Seconds) -> None:
        """Ends within about `timeout` seconds. Must not raise."""
        ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child, and when to restart it."""

    name: str
    start: Callable[[], Awaitable[SupervisedChild]]
    """Returns a running child. If it raises or is cancelled, nothing of the child may be left."""
    kind: RestartKind = "permanent"
    start_timeout: Seconds = 30.0
    stop_timeout: Seconds = 5.0


class Supervisor:
    """Supervises an ordered list of children."""

    def __init__(
        self,
        name: str,
        children: Sequence[ChildSpec],
        *,
        tasks: Tasks,
        random: Random,
        strategy: RestartStrategy = "one_for_one",
        restarts: RestartLimits | None = None,
    ) -> None:
        """Args: `tasks` owns its one task."""
        self.name = name
        self.failure: BaseException | None = None
        self._specs = tuple(children)
        self._tasks = tasks
        kinds = [spec.kind for spec in children]
        self._plan = SupervisorPlan(kinds, strategy, restarts or RestartLimits(), random)
        self._running: dict[int, SupervisedChild] = {}
        self._last_error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._happened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def child(self, name: str) -> SupervisedChild | None:
        """The present child of that name; None while it does not run."""
        names = [spec.name for spec in self._specs]
        return self._running.get(names.index(name))

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls back once with the supervisor's failure (`SupervisedChild.when_ended`)."""
        if self._ended:
            self._loop.call_soon(callback, self.failure)
        else:
            self._callbacks.append(callback)

    async def start(self) -> None:
        """Starts all children in order.

        Raises what a child's start raises, and `DeadlineExceeded`. Then, and on cancellation,
        started children have been stopped.
        """
        try:
            for index in range(len(self._specs)):
                await self._start(index)
        except BaseException:
            await self._stop_all()
            raise
        self._task = self._tasks.spawn(self._run(), f"supervisor {self.name}")

    async def stop(self, *, timeout: Seconds) -> None:
        """Stops all children in reverse order, without restarts. A child gets its `stop_timeout`,
        or the rest of `timeout` if that is less. Idempotent.
        """
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})  # what it may be doing has deadlines of its own
        await self._stop_all(self._loop.time() + timeout)
        self._end()

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        while not isinstance(action := self._plan.next(self._loop.time()), RestartsUsedUp):
            if isinstance(action, StopChild):
                await self._stop(action.index, self._specs[action.index].stop_timeout)
            elif isinstance(action, StartChild):
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

    def _on_end(self, index: int, child: SupervisedChild, error: BaseException | None) -> None:
        """Handles a child's end, requested or not."""
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
        """Stops all in reverse order of their start."""
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
