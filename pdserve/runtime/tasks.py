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

__all__ = ["Tasks", "close_runner"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE: Final[Seconds] = 5.0
"""How long a cancelled task may take before the log names it; it is then cancelled again."""
_DEADLINE: Final[Seconds] = 30.0
"""How long `close` waits. Tasks that clean up have deadlines of their own, of some seconds; what
takes longer does not end, and its owner must not wait for ever."""


class Tasks:
    """The background tasks of one owner; none outlives it."""

    def __init__(
        self,
        owner: str,
        on_failure: Callable[[str, BaseException], None] | None = None,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """Args: `on_failure` is called with the name and the error of each failed task; `on_stuck`
        once `close` gives up, in words that name the tasks. Neither must raise.
        """
        self.owner = owner
        self.closed = False
        self._on_failure = on_failure
        self._on_stuck = on_stuck
        self._running: dict[asyncio.Task[Any], None] = {}  # in order, so that runs repeat
        self._stuck: set[asyncio.Task[Any]] = set()
        """Tasks that `close` no longer waits for."""

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
        self._stuck.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        _log.error("%s: %s failed", self.owner, task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    async def close(self) -> tuple[str, ...]:
        """Refuses new tasks, cancels running ones, and waits for 30 s at most until all have ended.
        Returns the names of those that have not: they may still use what the caller is about to
        free. Idempotent; a repeat does not wait for those again.

        If called from one of the tasks, that one is left to end by itself. Cancellation: the tasks
        have been cancelled, but may not have ended.
        """
        self.closed = True
        loop = asyncio.get_running_loop()
        until = loop.time() + _DEADLINE
        while waiting := self._awaited():
            if loop.time() >= until:
                self._give_up(waiting)
                break
            for task in waiting:
                task.cancel(f"{self.owner} is closing")
            _, late = await asyncio.wait(waiting, timeout=_PATIENCE)
            for task in late:
                _log.warning("%s: %s does not end when cancelled", self.owner, task.get_name())
            # The done callback of the last ended task runs in the next turn of the loop.
            await asyncio.sleep(0)
        return tuple(sorted(task.get_name() for task in self._stuck))

    def _awaited(self) -> list[asyncio.Task[Any]]:
        current = asyncio.current_task()
        return [one for one in self._running if one is not current and one not in self._stuck]

    def _give_up(self, tasks: list[asyncio.Task[Any]]) -> None:
        self._stuck.update(tasks)
        names = ", ".join(sorted(task.get_name() for task in tasks))
        words = f"{self.owner}: {names} still run {_DEADLINE:.0f} s after they were cancelled"
        _log.error("%s: a defect, please report it", words)
        if self._on_stuck is not None:
            self._on_stuck(words)

    def __len__(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._running)

    def names(self) -> list[str]:
        """Names of the tasks that have not ended."""
        return sorted(task.get_name() for task in self._running)


def close_runner(runner: asyncio.Runner) -> None:
    """Closes a runner whose main task has ended. `Runner.close` waits without limit for tasks that
    ignore their cancellation; if there are such tasks after 5 s, they are named and the loop stays
    as it is: the process is about to end."""
    loop = runner.get_loop()
    if left := loop.run_until_complete(_cancel_all()):
        _log.error("the process ends although tasks still run: %s", ", ".join(left))
    else:
        runner.close()


async def _cancel_all() -> list[str]:
    """Cancels what runs on this loop; returns the names of the tasks that have not ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel("the process is ending")
    late = (await asyncio.wait(others, timeout=_PATIENCE))[1] if others else set()
    return sorted(task.get_name() for task in late)
