"""Owns background tasks, so that none is lost and no failure goes unnoticed.

asyncio keeps no reference to a bare task and reports its failure late or never. It does not restart
tasks; `supervisor` does. The owner calls `close`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.errors import Draining

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pdserve.ids import Seconds

__all__ = ["Tasks"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE: Final[Seconds] = 5.0
"""How long a cancelled task may take before the log names it; it is then cancelled again."""


class Tasks:
    """The background tasks of one owner; none outlives it."""

    def __init__(
        self, owner: str, on_failure: Callable[[str, BaseException], None] | None = None
    ) -> None:
        """Args: `on_failure` is called with the name and the error of each failed task; it must not
        raise.
        """
        self.owner = owner
        self.closed = False
        self._on_failure = on_failure
        self._running: dict[asyncio.Task[Any], None] = {}  # in order, so that runs repeat

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Runs `work` in the background. A failure is logged and passed to `on_failure`.

        Raises `Draining` once closed; then `work` never starts. Cancelling the task is no failure.
        A caller that does not need the task writes `_ = tasks.spawn(...)`, which mypy requires.
        """
        if self.closed:
            work.close()
            raise Draining(f"{self.owner} is closed: {name} was not started")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        _log.error("%s: %s failed", self.owner, task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    async def close(self) -> None:
        """Refuses new tasks, cancels running ones, and waits until all have ended. Idempotent.

        If called from one of the tasks, that one is left to end by itself. Cancellation: the tasks
        have been cancelled, but may not have ended.
        """
        self.closed = True
        while waiting := [t for t in self._running if t is not asyncio.current_task()]:
            for task in waiting:
                task.cancel(f"{self.owner} is closing")
            _, late = await asyncio.wait(waiting, timeout=_PATIENCE)
            for task in late:
                _log.warning("%s: %s does not end when cancelled", self.owner, task.get_name())
            # The done callback of the last ended task runs in the next turn of the loop.
            await asyncio.sleep(0)

    def __len__(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._running)

    def names(self) -> list[str]:
        """Names of the tasks that have not ended."""
        return sorted(task.get_name() for task in self._running)
