"""An event loop for many simulated processes, with virtual time and a seed that orders them.

Every callback belongs to the process whose context it runs in, or to the network. Within a process
callbacks keep asyncio's order. Between processes the seed sometimes lets another one go first, as
happens between machines. A killed process runs no further callback, even in the middle of a wait; a
suspended one keeps its callbacks until it resumes.

The world owns the loop. The loop knows neither hosts nor nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from pdserve.testing.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextvars import Context
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["Livelock", "VirtualProcess", "WorldLoop"]

_OVERTAKE: Final = 0.25
"""How often the callback that is next in turn is not the one that runs."""
_REACH: Final = 8
"""Longest distance in the queue of a callback that is run first, so that no callback is
overtaken by many more."""
_TURNS: Final = 20_000
"""Turns of the loop within one moment; more means an endless loop."""
_RESOLUTION: Final[Seconds] = 1e-9
"""Timers so close to each other are due together; far above the rounding of a clock's readings."""

_process: contextvars.ContextVar[VirtualProcess | None] = contextvars.ContextVar(
    "process", default=None
)


class Livelock(RuntimeError):
    """Callbacks wake each other, and the virtual time does not advance."""


class VirtualProcess:
    """One process: what runs in its context is its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context = contextvars.Context()
        self.context.run(_process.set, self)
        self.dead = False
        self.paused = False
        self.held: list[asyncio.Handle] = []
        """Callbacks that became due during the pause, in order."""
        self.dropped = 0
        """Callbacks that never ran, because it is dead."""
        self.remains: list[asyncio.Task[Any]] = []
        """Tasks that a dead process left in the middle of something; kept, so that the garbage
        collector does not finish them."""

    def __repr__(self) -> str:
        return f"<process {self.name}>"


class WorldLoop(VirtualTimeLoop):
    """See above."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._clock_resolution = _RESOLUTION
        self._ready: deque[asyncio.Handle] = _Ready(random)
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], VirtualProcess] = (
            weakref.WeakKeyDictionary()
        )
        self._turns = 0
        self.problems: list[str] = []
        """Exceptions that were not caught."""
        self.set_exception_handler(self._note_problem)

    # ------------------------------------------------------------------ processes

    def start(self, process: VirtualProcess, work: Coroutine[Any, Any, Any], name: str) -> Any:
        """Run `work` as a task of `process`."""
        return self.create_task(work, name=name, context=process.context.copy())

    def kill(self, process: VirtualProcess) -> None:
        """Ends the process at once: its callbacks run no more."""
        process.dead = True
        process.paused = False
        process.dropped += len(process.held)
        process.held.clear()
        for task, owner in tuple(self._owners.items()):
            if owner is process and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                process.remains.append(task)

    def pause(self, process: VirtualProcess) -> None:
        """Pauses the process."""
        process.paused = True

    def resume(self, process: VirtualProcess) -> int:
        """Resumes the process with all callbacks that have become due; returns their number."""
        process.paused = False
        held, process.held = process.held, []
        self._ready.extend(held)
        return len(held)

    def tasks_of(self, process: VirtualProcess) -> list[asyncio.Task[Any]]:
        """Tasks of the process that have not ended."""
        return [t for t, owner in tuple(self._owners.items()) if owner is process and not t.done()]

    def timers_of(self, process: VirtualProcess) -> list[asyncio.TimerHandle]:
        """Timers of the process that are set."""
        scheduled: list[asyncio.TimerHandle] = vars(self)["_scheduled"]
        return [h for h in scheduled if not h.cancelled() and _owner(h) is process]

    def bury(self, process: VirtualProcess) -> None:
        """The run is over: end what it left."""
        for task in process.remains:
            with contextlib.suppress(BaseException):  # whatever its clean-up wants is not there
                task.get_coro().close()
        process.remains.clear()

    def calm(self) -> None:
        """Count turns anew: the run that went in circles is over."""
        self._turns = 0

    # ------------------------------------------------------------------ asyncio's own seams

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task = super().create_task(coro, name=name, context=context)
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            self._owners[task] = process
        return task

    def _run_once(self) -> None:
        self._turns += 1
        if self._turns > _TURNS:
            raise Livelock(
                f"{self._turns} turns without a tick at {self.time():.6f}: {self._ready}"
            )
        super()._run_once()  # type: ignore[misc]

    def _advance(self, seconds: Seconds) -> None:
        """A little more, so that who waits for a moment does not wake before it, by the rounding of
        a difference, to wait for nothing again and again."""
        super()._advance(seconds + 2 * _RESOLUTION)
        if seconds > 0:
            self._turns = 0

    def _note_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"{context.get('message')}: {error!r}")


class _Ready(deque[asyncio.Handle]):
    """The loop's queue of what is due."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def popleft(self) -> asyncio.Handle:
        """The next one to run; a cancelled one, which the loop passes over, where it must not."""
        index = 0
        if len(self) > 1 and self._random.random() < _OVERTAKE:
            index = self._first_of_its_own(self._random.randrange(1, min(len(self), _REACH)))
        handle = self[index]
        del self[index]
        process = _owner(handle)
        if process is None or not (process.dead or process.paused):
            return handle
        if process.dead:
            process.dropped += 1
        else:
            process.held.append(handle)
        return _NOTHING

    def _first_of_its_own(self, index: int) -> int:
        """Returns the first callback of the same process, so that no other overtakes it."""
        process = _owner(self[index])
        return next(at for at in range(index + 1) if _owner(self[at]) is process)


def _owner(handle: asyncio.Handle) -> VirtualProcess | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(_process)


class _Nothing(asyncio.Handle):
    """Is passed over."""

    __slots__ = ()

    def __init__(self) -> None:
        self._cancelled = True


_NOTHING: Final = _Nothing()
